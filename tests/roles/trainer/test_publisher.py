"""The publishing thread, and the shards that other processes of a trainer write beside it."""

import concurrent.futures
import socket
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tba_jax.models import parameters
from tba_jax.roles.process_group import Leader, Member
from tba_jax.roles.trainer.publishing import FollowersShards, Publisher, ShardWriter
from tba_jax.roles.wire import Wire
from tba_jax.storage import layout, places, snapshots
from tba_jax.storage.damaged_snapshots import DamagedSnapshots
from tba_jax.storage.snapshots import SnapshotInfo
from tests.support.tiny_snapshots import SPECS, assert_same_bits, random_params, shardings


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
            found = DamagedSnapshots(tmp_path, follows="").load_newest(SPECS, shardings(), newer_than=max(seen, default=-1))
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


def connected() -> tuple[Leader, Member]:
    """A leader and a member in this process."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        wire = Wire(socket.create_connection(server.getsockname()))
        leader = Leader({1: Wire(server.accept()[0])}, {1: "there"}, heartbeat_seconds=600.0)
    return leader, Member(wire, "here", process=1, processes=2, heartbeat_seconds=600.0)


def end(leader: Leader, member: Member) -> None:
    """Without JAX' runtime, which only real processes have."""
    leader._ending.set()
    member._ending.set()


def test_a_snapshot_is_visible_once_another_process_has_written_its_shards(tmp_path, monkeypatch):
    """The devices of one process stand for those of two: each half writes the shards on its own devices."""
    there = set(jax.devices()[4:])
    is_there = threading.local()

    def own_shards(array):
        mine = getattr(is_there, "yes", False)
        shards = [shard for shard in array.addressable_shards if shard.replica_id == 0 and (shard.device in there) == mine]
        return [(shard.index, np.asarray(shard.data)) for shard in shards]

    monkeypatch.setattr(snapshots, "_host_shards", own_shards)
    leader, member = connected()
    writer = ShardWriter(member, "policy", tmp_path, dtype="float32")
    write = writer._write

    def write_there(*arguments):
        is_there.yes = True
        write(*arguments)

    monkeypatch.setattr(writer, "_write", write_there)
    publisher = Publisher(tmp_path, dtype="float32", keep=0, keep_every=10, final_step=99, group=leader)
    params = jax.device_put(random_params(4), shardings((1, 8, 1)))
    publisher.publish(params, SnapshotInfo(step=4, epoch=1))
    time.sleep(0.3)
    assert snapshots.committed_steps(tmp_path) == [], "the other process has not offered its shards"
    calls = member.calls()
    name, content, _ = next(calls)
    assert (name, content) == ("publish", {"step": 4, "held": []})
    writer.offer(params, 4)
    publisher.wait()
    assert_same_bits(snapshots.load_step(tmp_path, 4, SPECS, shardings()), random_params(4))
    writer.drain()
    publisher.close()
    writer.close()
    end(leader, member)


def test_a_write_that_fails_in_another_process_is_raised_and_nothing_is_visible(tmp_path, monkeypatch):
    leader, member = connected()
    writer = ShardWriter(member, "policy", tmp_path, dtype="float32")
    monkeypatch.setattr(snapshots, "write_shards", lambda *_, **__: (_ for _ in ()).throw(OSError("no space there")))
    publisher = Publisher(tmp_path, dtype="float32", keep=0, keep_every=10, final_step=99, group=leader)
    params = jax.device_put(random_params(4), shardings())
    publisher.publish(params, SnapshotInfo(step=4, epoch=1))
    writer.offer(params, 4)
    with pytest.raises(OSError, match="process 1: no space there"):
        publisher.wait()
    assert snapshots.committed_steps(tmp_path) == [] and not list(tmp_path.glob(".*"))
    writer.close()
    end(leader, member)


def test_a_process_lets_go_of_weights_that_nobody_will_ask_for(tmp_path):
    leader, member = connected()
    writer = ShardWriter(member, "policy", tmp_path, dtype="float32")
    for step, held in ((1, []), (2, [1]), (3, [1]), (4, [1, 3])):
        writer.offer({"w": jnp.zeros(4)}, step, held=held)
    assert sorted(writer._offered) == [1, 3, 4]
    others = FollowersShards(leader, "policy")
    folder = tmp_path / ".draft"
    folder.mkdir()
    stores = snapshots._make_arrays(folder, {"w": jnp.zeros(4)}, dtype="float32", durable=False)
    assert stores
    others.start(folder, 3, durable=False)
    others.wait(3)
    assert sorted(writer._offered) == [1, 4]
    writer.close()
    end(leader, member)
