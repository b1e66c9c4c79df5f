"""Readers of snapshots take the newest whole one, whatever has become of the others."""

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tba_jax.storage import layout, places, snapshots
from tba_jax.storage.damaged_snapshots import DamagedSnapshots, lagging
from tba_jax.storage.snapshots import SnapshotInfo
from tests.support.tiny_snapshots import SPECS, assert_same_bits, random_params, shardings


def save(policies: places.Place, step: int, *, epoch: int = 3, seed: int | None = None) -> places.Place:
    folder = policies / layout.step_name(step)
    params = random_params(step if seed is None else seed)
    snapshots.save(folder, params, SnapshotInfo(step=step, epoch=epoch), dtype="float32")
    return folder


def reader(policies: places.Place) -> Callable[..., Any]:
    return functools.partial(DamagedSnapshots(policies, follows="Without it").load_newest, SPECS, shardings())


@pytest.fixture
def loads(monkeypatch) -> list[int]:
    """The steps whose snapshots are read."""
    seen: list[int] = []
    load_step = snapshots.load_step

    def noted(policies, step, *arguments, **settings):
        seen.append(step)
        return load_step(policies, step, *arguments, **settings)

    monkeypatch.setattr(snapshots, "load_step", noted)
    return seen


@pytest.mark.parametrize(
    ("steps", "lag", "found"),
    [
        ([], 4, []),
        ([0, 2], 4, [0]),
        ([0, 20, 22, 24], 4, [0, 20]),  # older ones were removed
        ([0, 2, 3, 4, 7], 4, [0, 2, 3]),  # a trainer that waited has published steps between
        ([22, 24], 4, []),  # above the one in use
        ([0, 2, 4], 0, [0, 2, 4]),
    ],
)
def test_those_may_be_taken_up_that_are_as_much_older_than_the_newest(steps, lag, found):
    assert lagging(steps, lag=lag) == found


def test_a_snapshot_pruned_while_read_gives_the_next_newest(tmp_path, monkeypatch):
    for step in (0, 2, 4):
        save(tmp_path, step)
    open_array = snapshots.ts.open

    def prune_then_open(spec, **settings):
        if "00000004/layers.attention.query" in spec["kvstore"]["path"]:
            (tmp_path / "00000004" / snapshots.COMMIT).unlink()
            shutil.rmtree(tmp_path / "00000004")
        return open_array(spec, **settings)

    monkeypatch.setattr(snapshots.ts, "open", prune_then_open)
    step, params = reader(tmp_path)(newer_than=-1)
    assert step == 2
    assert_same_bits(params, random_params(2))


def test_a_damaged_snapshot_is_read_once_and_told_once(tmp_path, loads, caplog):
    """The one before is taken, then one that is newer, and the damaged one itself once it is published again."""
    policies = tmp_path
    for step in (2, 4):
        folder = save(policies, step)
    places.remove(folder / "embedding.weight" / "c" / "0" / "0")
    load = reader(policies)
    step, params = load(newer_than=-1)
    assert step == 2
    assert_same_bits(params, random_params(2))
    for _ in range(5):
        assert load(newer_than=2) is None
    assert loads == [4, 2]
    (told,) = [record.message for record in caplog.records]
    assert "step 4 is damaged" in told and "embedding.weight" in told and f"remove {folder}" in told and "Without it" in told
    assert load.func.__self__.above(3) == told and load.func.__self__.above(4) == ""

    save(policies, 4, epoch=4)
    step, params = load(newer_than=2)
    assert step == 4 and load.func.__self__.above(3) == ""
    assert_same_bits(params, random_params(4))
    folder = save(policies, 8)
    places.write_bytes(folder / snapshots.COMMIT, b"")
    save(policies, 6)
    assert load(newer_than=4)[0] == 6 and load(newer_than=6) is None
    save(policies, 10)
    assert load(newer_than=6)[0] == 10
    assert loads == [4, 2, 4, 8, 6, 10] and len(caplog.records) == 2


def test_a_torn_file_of_a_snapshot_costs_this_snapshot_alone(tmp_path):
    """Of each of its files in turn the last bytes, all bytes, or the file are lost."""
    save(tmp_path, 2)
    whole = save(tmp_path / "whole", 4)
    files = sorted(path.relative_to(whole) for path in whole.rglob("*") if path.is_file())
    assert len(files) > 20 and Path(snapshots.COMMIT) in files
    taken = []
    for number, file in enumerate(files):
        shutil.rmtree(tmp_path / "00000004", ignore_errors=True)
        shutil.copytree(whole, tmp_path / "00000004")
        torn, left = tmp_path / "00000004" / file, (-3, 0, None)[number // 2 % 3]  # an array has two files
        if left is None:
            torn.unlink()
        else:
            torn.write_bytes(torn.read_bytes()[:left])
        taken.append(reader(tmp_path)(newer_than=-1)[0])
    assert set(taken) == {2}


def test_a_snapshot_that_is_written_again_while_it_is_read_is_read_again(tmp_path, monkeypatch, caplog):
    """No mixture of the two is taken, and the first one is not called damaged."""
    save(tmp_path, 2)
    save(tmp_path, 4)
    make, written = snapshots.jax.make_array_from_callback, []

    def write_then_make(*arguments):
        if not written:
            written.append(save(tmp_path, 4, epoch=4, seed=9))
        return make(*arguments)

    monkeypatch.setattr(snapshots.jax, "make_array_from_callback", write_then_make)
    step, params = reader(tmp_path)(newer_than=-1)
    assert step == 4
    assert_same_bits(params, random_params(9))
    assert not caplog.records


def test_what_is_no_damage_is_raised(tmp_path):
    """A snapshot of another model is a mistake, and not to be passed over."""
    folder = save(tmp_path, 4)
    name = "final_norm.scale"
    metadata = json.loads((folder / name / "zarr.json").read_text())
    (folder / name / "zarr.json").write_text(json.dumps(metadata | {"shape": [8]}))
    with pytest.raises(ValueError, match=r"parameter final_norm.scale has shape \(8,\), the model needs \(16,\)"):
        reader(tmp_path)(newer_than=-1)
