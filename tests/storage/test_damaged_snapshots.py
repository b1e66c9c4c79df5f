"""Readers of snapshots take the newest whole one, whatever has become of the others."""

import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tba_jax.storage import layout, places, snapshots
from tba_jax.storage.damaged_snapshots import DamagedSnapshots, lagging
from tba_jax.storage.snapshots import SnapshotInfo
from tests.support.tiny_snapshots import SPECS, assert_same_bits, random_params, shardings


def save(policies: Path, step: int, *, epoch: int = 3, seed: int | None = None) -> Path:
    folder = policies / layout.step_name(step)
    params = random_params(step if seed is None else seed)
    snapshots.save(folder, params, SnapshotInfo(step=step, epoch=epoch), dtype="float32")
    return folder


def reader(policies: Path) -> Callable[..., Any]:
    return functools.partial(DamagedSnapshots(policies, follows="Without it").load_newest, SPECS, shardings())


def test_those_may_be_taken_up_that_are_as_much_older_than_the_newest():
    assert lagging([], lag=4) == [] and lagging([0, 2], lag=4) == [0] and lagging([0, 2, 4], lag=0) == [0, 2, 4]
    assert lagging([0, 20, 22, 24], lag=4) == [0, 20] and lagging([0, 2, 3, 4, 7], lag=4) == [0, 2, 3]
    assert lagging([22, 24], lag=4) == [], "above the one in use"


def test_a_damaged_snapshot_is_read_once_and_told_once(tmp_path, monkeypatch, caplog):
    loads, load_step = [], snapshots.load_step
    monkeypatch.setattr(snapshots, "load_step", lambda *a, **settings: (loads.append(a[1]), load_step(*a, **settings))[1])
    for step in (2, 4):
        folder = save(tmp_path, step)
    places.remove(folder / "embedding.weight" / "c" / "0" / "0")
    load = reader(tmp_path)
    step, params = load(newer_than=-1)
    assert step == 2
    assert_same_bits(params, random_params(2))
    for _ in range(5):
        assert load(newer_than=2) is None
    assert loads == [4, 2]
    (told,) = [record.message for record in caplog.records]
    assert "step 4 is damaged" in told and "embedding.weight" in told and f"remove {folder}" in told and "Without it" in told
    assert load.func.__self__.above(3) == told and load.func.__self__.above(4) == ""

    save(tmp_path, 4, epoch=4)
    assert load(newer_than=2)[0] == 4 and load.func.__self__.above(3) == ""
    places.write_bytes(save(tmp_path, 8) / snapshots.COMMIT, b"")
    save(tmp_path, 6)
    assert load(newer_than=4)[0] == 6 and load(newer_than=6) is None
    assert loads == [4, 2, 4, 8, 6] and len(caplog.records) == 2


@pytest.mark.parametrize("file", [snapshots.COMMIT, "embedding.weight/zarr.json", "layers.attention.query.weight/c/0/0/0/0"])
def test_a_torn_file_of_a_snapshot_costs_this_snapshot_alone(tmp_path, file):
    save(tmp_path, 2)
    whole = save(tmp_path / "whole", 4)
    found = next(path for path in whole.rglob("*") if path.is_file() and path.relative_to(whole).as_posix().startswith(file[:32]))
    for left in (-3, 0, None):
        shutil.rmtree(tmp_path / "00000004", ignore_errors=True)
        shutil.copytree(whole, tmp_path / "00000004")
        torn = tmp_path / "00000004" / found.relative_to(whole)
        if left is None:
            torn.unlink()
        else:
            torn.write_bytes(torn.read_bytes()[:left])
        assert reader(tmp_path)(newer_than=-1)[0] == 2


@pytest.mark.parametrize(("becomes", "step", "seed"), [("pruned", 2, 2), ("written again", 4, 9)])
def test_a_snapshot_that_changes_while_it_is_read_is_neither_mixed_nor_called_damaged(
    tmp_path, monkeypatch, caplog, becomes, step, seed
):
    for each in (2, 4):
        save(tmp_path, each)
    make, changed = snapshots.jax.make_array_from_callback, []

    def change_then_make(*arguments):
        if not changed and becomes == "pruned":
            snapshots.remove(tmp_path, 4)
        elif not changed:
            save(tmp_path, 4, epoch=4, seed=9)
        changed.append(1)
        return make(*arguments)

    monkeypatch.setattr(snapshots.jax, "make_array_from_callback", change_then_make)
    found, params = reader(tmp_path)(newer_than=-1)
    assert found == step and not caplog.records
    assert_same_bits(params, random_params(seed))
