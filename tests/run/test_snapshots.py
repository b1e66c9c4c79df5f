"""Snapshots: what is visible when, exact round trips into other meshes, damage, retention, and the publishing thread."""

import concurrent.futures
import functools
import json
import resource
import shutil
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tba_jax.models import parameters
from tba_jax.models.parameters import Params
from tba_jax.run import layout, places, processes, snapshots
from tba_jax.run.publisher import Publisher
from tba_jax.run.snapshots import SnapshotInfo
from tests.support import applied
from tests.support.tiny_snapshots import MODEL, SPECS, assert_same_bits, random_params, shardings


def save(policies: Path, step: int, params: Params | None = None, dtype: str = "float32") -> Path:
    folder = policies / layout.step_name(step)
    snapshots.save(folder, random_params(step) if params is None else params, SnapshotInfo(step=step, epoch=3), dtype=dtype)
    return folder


@pytest.mark.parametrize("written", [(8, 1, 1), (2, 2, 2)], ids=str)
@pytest.mark.parametrize("read", [(1, 4, 2), (8, 1, 1)], ids=str)
def test_parameters_come_back_bit_by_bit_on_any_mesh(tmp_path, written, read):
    folder = save(tmp_path, 5, jax.device_put(random_params(), shardings(written)))
    assert json.loads((folder / snapshots.COMMIT).read_text()) == {"step": 5, "epoch": 3, "dtype": "float32"}
    found = snapshots.load(folder, SPECS, shardings(read))
    assert_same_bits(found, random_params())
    assert jax.tree.map(lambda x: x.sharding, found) == shardings(read)


@pytest.mark.parametrize("written", [(8, 1, 1), (2, 2, 2), (1, 8, 1)], ids=str)
def test_large_shards_are_cut_into_chunks(tmp_path, monkeypatch, written):
    """Axes of 16, 24 and 12 in pieces that do and do not divide them, cut along one axis and along several."""
    sharding_of = parameters.flatten(shardings(written))
    for size in (8, 100, 300):
        monkeypatch.setattr(snapshots, "CHUNK_BYTES", size)
        folder = save(tmp_path, size, jax.device_put(random_params(), shardings(written)))
        for name, spec in parameters.flatten(SPECS).items():
            sizes = [path.stat().st_size - 4 for path in (folder / name).rglob("c/**/*") if path.is_file()]  # and a checksum
            assert sum(sizes) >= 4 * np.prod(spec.shape) and max(sizes) <= 2 * size, name
            chunk = json.loads((folder / name / "zarr.json").read_text())["chunk_grid"]["configuration"]["chunk_shape"]
            for whole, part, length in zip(spec.shape, sharding_of[name].shard_shape(spec.shape), chunk, strict=True):
                assert part == whole or part % length == 0, "two shards share a chunk"
        assert_same_bits(snapshots.load(folder, SPECS, shardings((1, 4, 2))), random_params())


def test_bfloat16_snapshots_hold_the_rounded_parameters(tmp_path):
    folder = save(tmp_path, 5, jax.device_put(random_params(), shardings((2, 2, 2))), dtype="bfloat16")
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(np.float32), random_params())
    found = snapshots.load(folder, SPECS, shardings())
    assert_same_bits(found, rounded)
    assert all(leaf.dtype == np.float32 for leaf in jax.tree.leaves(found))
    assert sum(p.stat().st_size for p in folder.rglob("*") if p.is_file() and p.suffix != ".json") < 3 * applied.count(MODEL)


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
    # The leftover is replaced by the same step's next write.
    save(tmp_path, 6)
    assert snapshots.committed_steps(tmp_path) == [4, 6]
    assert_same_bits(snapshots.load_step(tmp_path, 6, SPECS, shardings()), random_params(6))


@pytest.mark.parametrize("where", ["the last parameter", "the commit", "the rename"])
def test_a_write_that_fails_half_way_leaves_nothing(tmp_path, monkeypatch, where):
    params = random_params()
    if where == "the last parameter":
        params["layers"]["attention"]["value"] = np.full((2, 2), "text")
    elif where == "the commit":
        monkeypatch.setattr(layout, "write_json", refuse)
    else:
        monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises((OSError, ValueError)):
        save(tmp_path, 5, params)
    assert list(tmp_path.iterdir()) == []


def refuse(*arguments, **settings):
    raise OSError(28, "No space left on device")


def largest_file(folder: Path) -> Path:
    return max(
        (path for path in folder.rglob("*") if path.is_file() and path.name != "zarr.json"), key=lambda p: p.stat().st_size
    )


def test_a_damaged_byte_is_an_error_that_names_the_parameter(tmp_path):
    folder = save(tmp_path, 5)
    for name, path in {
        name: largest_file(folder / name) for name in ("embedding.weight", "layers.feed_forward.up.weight")
    }.items():
        whole = path.read_bytes()
        damaged = bytearray(whole)
        damaged[len(whole) // 2] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=rf"{folder}: parameter {name} is damaged"):
            snapshots.load(folder, SPECS, shardings())
        path.unlink()
        with pytest.raises(ValueError, match=rf"{folder}: parameter {name} is damaged"):
            snapshots.load(folder, SPECS, shardings())
        path.write_bytes(whole)
    assert_same_bits(snapshots.load(folder, SPECS, shardings()), random_params(5))


@pytest.mark.parametrize("moment", ["opening", "reading"])
def test_storage_that_does_not_answer_is_no_damage(tmp_path, monkeypatch, moment):
    folder = save(tmp_path, 5)

    class Failing:
        """What is opened or read where the storage is away, in tensorstore's words."""

        def result(self, *_):
            raise ValueError("UNAVAILABLE: CURL error [source locations='tensorstore/…']")

    if moment == "opening":
        monkeypatch.setattr(snapshots.ts, "open", lambda *_, **__: Failing())
    else:
        monkeypatch.setattr(jax, "make_array_from_callback", Failing().result)
    with pytest.raises(OSError, match=rf"{folder}: parameter .* UNAVAILABLE") as refused:
        snapshots.load(folder, SPECS, shardings())
    assert processes.is_storage_failure(refused.value)


def test_parameters_of_another_model_are_named(tmp_path):
    params = random_params()
    up = params["layers"]["feed_forward"]["up"]
    params["layers"]["feed_forward"]["up"] = {"weight": up["weight"][..., :12]}
    folder = save(tmp_path, 5, params)
    with pytest.raises(
        ValueError, match=r"parameter layers.feed_forward.up.weight has shape \(2, 16, 12\), the model needs \(2, 16, 24\)"
    ):
        snapshots.load(folder, SPECS, shardings())
    shutil.rmtree(folder)
    params["layers"]["feed_forward"]["up"] = up
    del params["layers"]["attention"]["value"]
    with pytest.raises(ValueError, match=r"parameter layers.attention.value.weight is missing or unreadable"):
        snapshots.load(save(tmp_path, 5, params), SPECS, shardings())


def test_pruning_keeps_the_newest_and_what_is_evaluated(tmp_path):
    steps = [0, 1, 2, 3, 10, 11, 13, 20, 21, 22, 23]
    for step in steps:
        (tmp_path / layout.step_name(step)).mkdir()
        (tmp_path / layout.step_name(step) / snapshots.COMMIT).write_text("{}")
    assert snapshots.prune(tmp_path, keep=0, keep_every=10, final_step=13) == []
    assert snapshots.prune(tmp_path, keep=3, keep_every=10, final_step=13) == [1, 2, 3, 11]
    assert snapshots.committed_steps(tmp_path) == layout.steps_in(tmp_path) == [0, 10, 13, 20, 21, 22, 23]
    assert snapshots.prune(tmp_path, keep=3, keep_every=10, final_step=13) == []


def test_the_newest_snapshot_is_taken_once(tmp_path):
    load = functools.partial(snapshots.load_latest, tmp_path, SPECS, shardings())
    assert load(newer_than=-1) is None
    for step in (0, 2, 4):
        save(tmp_path, step)
    step, params = load(newer_than=0)
    assert step == 4
    assert_same_bits(params, random_params(4))
    assert load(newer_than=4) is None


@pytest.mark.parametrize("moment", ["before opening", "before reading"])
def test_a_snapshot_pruned_while_read_gives_the_next_newest(tmp_path, monkeypatch, moment):
    for step in (0, 2, 4):
        save(tmp_path, step)
    open_array = snapshots.ts.open

    def prune_then_open(spec, **settings):
        path = spec["kvstore"]["path"]
        opened = open_array(spec, **settings) if moment == "before reading" else None
        if opened is not None:
            opened.result()
        if (
            "00000004/layers.attention.query" if moment == "before opening" else "00000004/layers.feed_forward_norm"
        ) in path:  # the last one to be opened
            (tmp_path / "00000004" / snapshots.COMMIT).unlink()
            shutil.rmtree(tmp_path / "00000004")
        return opened if opened is not None else open_array(spec, **settings)

    monkeypatch.setattr(snapshots.ts, "open", prune_then_open)
    step, params = snapshots.load_latest(tmp_path, SPECS, shardings(), newer_than=-1)
    assert step == 2
    assert_same_bits(params, random_params(2))


def test_the_fingerprint_is_that_of_the_weights(tmp_path):
    first, same, other = save(tmp_path / "a", 1), save(tmp_path / "b", 2, random_params(1)), save(tmp_path, 3)
    assert snapshots.fingerprint(first) == snapshots.fingerprint(same)
    assert len({snapshots.fingerprint(first), snapshots.fingerprint(other)}) == 2
    assert int(snapshots.fingerprint(first), 16) < 2**64 and len(snapshots.fingerprint(first)) == 16


def make_publisher(policies: Path, keep: int = 0) -> Publisher:
    return Publisher(policies, dtype="float32", keep=keep, keep_every=10, final_step=99)


def test_published_snapshots_are_visible_and_old_ones_go(tmp_path):
    publisher = make_publisher(tmp_path, keep=3)
    for step in range(5):
        publisher.publish(jax.device_put(random_params(step), shardings()), SnapshotInfo(step=step, epoch=1))
        publisher.wait()
    assert snapshots.committed_steps(tmp_path) == [0, 2, 3, 4]
    assert_same_bits(snapshots.load_step(tmp_path, 4, SPECS, shardings()), random_params(4))
    publisher.close()


def test_what_waits_for_slow_storage_gives_way_to_what_is_newer(tmp_path, monkeypatch):
    """But for snapshots that stay; and what is newest comes in the end, as searchers may be waiting for it."""
    began, goes_on = threading.Event(), threading.Event()
    write = snapshots.save

    def slow(*arguments, **settings):
        began.set()
        assert goes_on.wait(30)
        write(*arguments, **settings)

    monkeypatch.setattr(snapshots, "save", slow)
    publisher = make_publisher(tmp_path)
    for step in (1, 2, 3, 10, 11, 12):
        publisher.publish(jax.device_put(random_params(step), shardings()), SnapshotInfo(step=step, epoch=1))
        assert began.wait(30)
    goes_on.set()
    publisher.wait()
    assert snapshots.committed_steps(tmp_path) == [1, 10, 12]
    publisher.publish(jax.device_put(random_params(13), shardings()), SnapshotInfo(step=13, epoch=1))
    publisher.close()
    assert_same_bits(snapshots.load_step(tmp_path, 13, SPECS, shardings()), random_params(13))


def test_the_next_update_may_overwrite_the_published_buffers(tmp_path, monkeypatch):
    """The write is held back until the parameters have been donated to an update and are gone."""
    donated = threading.Event()
    write = snapshots.save

    def held_back(*arguments, **settings):
        assert donated.wait(30)
        write(*arguments, **settings)

    monkeypatch.setattr(snapshots, "save", held_back)
    publisher = make_publisher(tmp_path)
    params = jax.device_put(random_params(), shardings())
    publisher.publish(params, SnapshotInfo(step=1, epoch=1))
    assert snapshots.committed_steps(tmp_path) == []
    update = jax.jit(lambda p: jax.tree.map(lambda x: x * 0 + 7, p), donate_argnums=0)
    after = jax.block_until_ready(update(params))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(params))
    donated.set()
    publisher.close()
    assert_same_bits(snapshots.load_step(tmp_path, 1, SPECS, shardings()), random_params())
    assert float(after["embedding"]["weight"][0, 0]) == 7


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_published_leaves_the_device_in_its_dtype(tmp_path, monkeypatch, dtype):
    """And is byte for byte what is written of the float32 parameters."""
    handed, write = [], snapshots.save

    def recorded(folder, params, *arguments, **settings):
        handed.append(params)
        write(folder, params, *arguments, **settings)

    monkeypatch.setattr(snapshots, "save", recorded)
    publisher = Publisher(tmp_path / "policy", dtype=dtype, keep=0, keep_every=10, final_step=99)
    params, info = jax.device_put(random_params(), shardings((2, 2, 2))), SnapshotInfo(step=1, epoch=1)
    publisher.publish(params, info)
    publisher.close()
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(handed[0])} == {dtype}
    assert all(
        jax.tree.leaves(jax.tree.map(lambda x, s: x.sharding.is_equivalent_to(s, x.ndim), handed[0], shardings((2, 2, 2))))
    )
    write(tmp_path / "other", params, info, dtype=dtype)
    assert files(tmp_path / "policy" / layout.step_name(1)) == files(tmp_path / "other")


@pytest.mark.parametrize("how", ["publish", "wait"])
def test_a_failed_write_is_raised_by_the_next_call(tmp_path, how):
    policies = tmp_path / "policy"
    policies.write_text("a file where the folder should be")
    publisher = make_publisher(policies)
    params = jax.device_put(random_params(), shardings())
    publisher.publish(params, SnapshotInfo(step=1, epoch=1))
    with pytest.raises(OSError, match="policy"):
        if how == "wait":
            publisher.wait()
        for step in range(2, 1000):  # the thread needs a moment to fail
            publisher.publish(params, SnapshotInfo(step=step, epoch=1))
            time.sleep(0.01)
    publisher.close()


@pytest.mark.parametrize("kind", ["local", "memory"])
def test_a_trainer_that_has_been_replaced_shows_nothing(tmp_path, kind):
    policies = tmp_path / "policy" if kind == "local" else places.place("memory://store/policy")

    class Replaced(RuntimeError):
        pass

    def check() -> None:
        if replaced:
            raise Replaced

    replaced: list[int] = []
    publisher, other = (Publisher(policies, dtype="float32", keep=0, keep_every=10, final_step=99, check=check) for _ in range(2))
    params = jax.device_put(random_params(), shardings())
    publisher.publish(params, SnapshotInfo(step=1, epoch=1))
    publisher.wait()
    replaced.append(1)
    publisher.publish(params, SnapshotInfo(step=2, epoch=1))
    with pytest.raises(Replaced):
        publisher.wait()
    assert snapshots.committed_steps(policies) == [1]
    # The one that replaced it has written step 3; even without the lease the old one leaves that as it is.
    replaced.clear()
    folder = policies / layout.step_name(3)
    snapshots.save(folder, random_params(7), SnapshotInfo(step=3, epoch=2), dtype="float32")
    other.publish(params, SnapshotInfo(step=3, epoch=1))
    with pytest.raises(ValueError, match="published under epoch 2, this trainer's is 1: it has been replaced"):
        other.wait()
    assert layout.read_json(folder / snapshots.COMMIT)["epoch"] == 2
    assert_same_bits(snapshots.load_step(policies, 3, SPECS, shardings()), random_params(7))
    # The same or an earlier epoch's is replaced.
    snapshots.save(folder, random_params(8), SnapshotInfo(step=3, epoch=3), dtype="float32")
    assert_same_bits(snapshots.load_step(policies, 3, SPECS, shardings()), random_params(8))
    if kind == "local":
        assert layout.steps_in(policies) == [1, 3] and not list(policies.glob(".*"))


def test_a_reader_beside_a_publisher_sees_whole_snapshots_only(tmp_path):
    """Every snapshot is one number throughout: a mixture of two would show."""
    publisher = make_publisher(tmp_path, keep=3)
    constant = {
        step: parameters.map_specs(lambda _, spec, s=step: np.full(spec.shape, s, np.float32), SPECS) for step in range(25)
    }

    def read() -> set[int]:
        seen: set[int] = set()
        while not seen or max(seen) < 24:
            found = snapshots.load_latest(tmp_path, SPECS, shardings(), newer_than=max(seen, default=-1))
            if found is not None:
                values = {float(value) for leaf in jax.tree.leaves(found[1]) for value in np.unique(leaf)}
                assert values == {float(found[0])}
                seen.add(found[0])
        return seen

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        reader = pool.submit(read)
        for step, params in constant.items():
            publisher.publish(params, SnapshotInfo(step=step, epoch=1))
        publisher.close()
        assert len(reader.result(30)) > 1
