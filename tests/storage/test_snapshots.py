"""Snapshots: what is visible when, exact round trips into other meshes, damage, retention; readers take the newest whole one."""

import functools
import json
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tba_jax.models import parameters
from tba_jax.models.parameters import Params
from tba_jax.run import processes
from tba_jax.storage import layout, places, snapshots
from tba_jax.storage.snapshots import DamagedSnapshots, SnapshotInfo, lagging
from tests.support import applied
from tests.support.tiny_snapshots import MODEL, SPECS, assert_same_bits, random_params, shardings


def save(policies: Path, step: int, params: Params | None = None, *, epoch: int = 3, dtype: str = "float32") -> Path:
    folder, info = policies / layout.step_name(step), SnapshotInfo(step=step, epoch=epoch)
    snapshots.save(folder, random_params(step) if params is None else params, info, dtype=dtype)
    return folder


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_parameters_come_back_bit_by_bit_on_any_mesh(tmp_path, dtype):
    folder = save(tmp_path, 5, jax.device_put(random_params(), shardings((2, 2, 2))), dtype=dtype)
    assert json.loads((folder / snapshots.COMMIT).read_text()) == {"step": 5, "epoch": 3, "dtype": dtype}
    found = snapshots.load(folder, SPECS, shardings((8, 1, 1)))
    assert_same_bits(found, jax.tree.map(lambda x: x.astype(jnp.dtype(dtype)).astype(np.float32), random_params()))
    assert jax.tree.map(lambda x: x.sharding, found) == shardings((8, 1, 1))
    sizes = [path.stat().st_size for path in folder.rglob("c/**/*") if path.is_file()]
    assert sum(sizes) < (jnp.dtype(dtype).itemsize + 1) * applied.count(MODEL)


def test_large_shards_are_cut_into_chunks(tmp_path, monkeypatch):
    written = (2, 2, 2)
    sharding_of = parameters.flatten(shardings(written))
    monkeypatch.setattr(snapshots, "CHUNK_BYTES", size := 64)
    folder = save(tmp_path, 1, jax.device_put(random_params(), shardings(written)))
    for name, spec in parameters.flatten(SPECS).items():
        sizes = [path.stat().st_size - 4 for path in (folder / name).rglob("c/**/*") if path.is_file()]  # and a checksum
        assert sum(sizes) >= 4 * np.prod(spec.shape) and max(sizes) <= 2 * size, name
        chunk = json.loads((folder / name / "zarr.json").read_text())["chunk_grid"]["configuration"]["chunk_shape"]
        for whole, part, length in zip(spec.shape, sharding_of[name].shard_shape(spec.shape), chunk, strict=True):
            assert part == whole or part % length == 0, "two shards share a chunk"
    assert_same_bits(snapshots.load(folder, SPECS, shardings((1, 4, 2))), random_params())


@pytest.mark.parametrize("kind", ["folder", "memory"])
def test_files_beside_the_parameters_come_and_go_with_the_snapshot(tmp_path, kind):
    policies = places.place("memory://beside/policy") if kind == "memory" else tmp_path
    folder, file = policies / layout.step_name(5), policies / layout.step_name(5) / "counts"
    info = SnapshotInfo(step=5, epoch=3, beside={"counts": b"\0 and more"})

    def refused() -> None:
        raise OSError("no more")

    with pytest.raises(OSError, match="no more"):
        snapshots.save(folder, random_params(), info, dtype="float32", check=refused)
    assert not snapshots.is_committed(policies, 5)
    snapshots.save(folder, random_params(), info, dtype="float32")
    assert places.read_bytes(file) == b"\0 and more"
    assert json.loads(places.read_bytes(folder / snapshots.COMMIT)) == {"step": 5, "epoch": 3, "dtype": "float32"}
    assert_same_bits(snapshots.load(folder, SPECS, shardings()), random_params())
    snapshots.save(folder, random_params(), SnapshotInfo(step=5, epoch=4), dtype="float32")  # written again without it
    assert not places.exists(file)
    with pytest.raises(ValueError, match="was published under epoch 4, this trainer's is 3"):
        snapshots.save(folder, random_params(1), info, dtype="float32")
    snapshots.save(folder, random_params(2), SnapshotInfo(step=5, epoch=4), dtype="float32")
    assert_same_bits(snapshots.load(folder, SPECS, shardings()), random_params(2))


def test_storage_that_refuses_is_no_mistake_of_the_user(tmp_path):
    """An OSError, whatever tensorstore raises: a ValueError at the start of a trainer would end its run."""
    save(tmp_path, 4)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(OSError, match=r"snapshot .*00000006 could not be written: .*File too large") as refused:
            save(tmp_path, 6)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert processes.is_storage_failure(refused.value)
    assert snapshots.committed_steps(tmp_path) == [4] and [path.name for path in tmp_path.iterdir()] == ["00000004"]


def test_only_committed_snapshots_are_visible(tmp_path):
    assert snapshots.latest_step(tmp_path / "policy") is None
    save(tmp_path, 4)
    torn = save(tmp_path, 6)
    (torn / snapshots.COMMIT).unlink()
    (tmp_path / f".{layout.step_name(8)}.0123abcd").mkdir()
    assert snapshots.committed_steps(tmp_path) == [4]
    with pytest.raises(FileNotFoundError):
        snapshots.load_step(tmp_path, 6, SPECS, shardings())
    save(tmp_path, 6)  # in the place of the leftover
    assert_same_bits(snapshots.load_step(tmp_path, 6, SPECS, shardings()), random_params(6))


def test_a_damaged_byte_is_an_error_that_names_the_parameter(tmp_path):
    folder = save(tmp_path, 5)
    path = max((folder / "embedding.weight" / "c").rglob("0"), key=lambda path: path.stat().st_size * path.is_file())
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(ValueError, match=rf"{folder}: parameter embedding.weight is damaged"):
        snapshots.load(folder, SPECS, shardings())
    (folder / "embedding.weight" / "zarr.json").write_bytes((folder / "final_norm.scale" / "zarr.json").read_bytes())
    with pytest.raises(ValueError, match=r"embedding.weight has shape \(16,\), the model needs \(12, 16\)"):
        snapshots.load(folder, SPECS, shardings())


@pytest.mark.parametrize("moment", ["opening", "reading"])
def test_storage_that_does_not_answer_is_no_damage(tmp_path, monkeypatch, moment):
    folder = save(tmp_path, 5)

    class Failing:
        def result(self, *_):
            raise ValueError("UNAVAILABLE: CURL error [source locations='tensorstore/…']")

    if moment == "opening":
        monkeypatch.setattr(snapshots.ts, "open", lambda *_, **__: Failing())
    else:
        monkeypatch.setattr(jax, "make_array_from_callback", Failing().result)
    with pytest.raises(OSError, match=rf"{folder}: parameter .* UNAVAILABLE") as refused:
        snapshots.load(folder, SPECS, shardings())
    assert processes.is_storage_failure(refused.value)


def test_pruning_keeps_the_best_while_it_is_the_best(tmp_path):
    for step in [0, 7, 10, 14, 20, 21, 22]:
        (tmp_path / layout.step_name(step)).mkdir()
        (tmp_path / layout.step_name(step) / snapshots.COMMIT).write_text("{}")
    settings, asked = dict(keep=2, keep_every=10, final_step=99), []
    assert snapshots.prune(tmp_path, **settings | {"keep": 0}) == []
    scores = {5: 0.99, 7: 0.9, 10: 0.1, 14: 0.8}  # the snapshot of step 5 is gone: it is nobody's best any more

    def told() -> dict[int, float]:
        asked.append(dict(scores))
        return scores

    assert snapshots.prune(tmp_path, **settings | {"final_step": 14}, scores=told) == [] and asked.pop()
    assert snapshots.prune(tmp_path, **settings, scores=told) == [14]
    assert snapshots.committed_steps(tmp_path) == [0, 7, 10, 20, 21, 22]
    scores[20] = 0.95
    assert snapshots.prune(tmp_path, **settings, scores=told) == [7] and len(asked) == 2
    assert snapshots.prune(tmp_path, **settings, scores=told) == [] and len(asked) == 2, "where nothing goes, nobody is asked"


def test_the_fingerprint_is_that_of_the_weights(tmp_path):
    folders = save(tmp_path / "a", 1), save(tmp_path / "b", 2, random_params(1)), save(tmp_path, 3)
    first, same, other = map(snapshots.fingerprint, folders)
    assert first == same != other and len(first) == 16 and int(first, 16) < 2**64


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
            save(tmp_path, 4, random_params(9), epoch=4)
        changed.append(1)
        return make(*arguments)

    monkeypatch.setattr(snapshots.jax, "make_array_from_callback", change_then_make)
    found, params = reader(tmp_path)(newer_than=-1)
    assert found == step and not caplog.records
    assert_same_bits(params, random_params(seed))
