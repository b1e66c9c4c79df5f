"""The publishing thread, and what a trainer that has been replaced shows no more."""

import random
import threading
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tba_jax.models.parameters import Params
from tba_jax.roles.trainer.publishing import Publisher
from tba_jax.storage import fenced, places, published, snapshots
from tba_jax.storage.fenced import StaleEpoch
from tba_jax.storage.published import Pointer
from tests.support import frozen_runs
from tests.support.tiny_snapshots import SPECS, assert_same_bits, random_params, shardings


def make_publisher(policies: places.Place, **settings) -> Publisher:
    made = {"epoch": 1, "dtype": "float32", "every_steps": 1, "keep": 0, "keep_every": 10, "final_step": 99}
    return Publisher(policies, **made | settings)


def publish(publisher: Publisher, step: int) -> None:
    publisher.publish(jax.device_put(random_params(step), shardings()), step)


def test_slow_storage_leaves_out_steps_that_need_not_stay(tmp_path, monkeypatch):
    """Two snapshots may be unwritten; one that stays for good waits until there is room."""
    began, goes_on, write = threading.Event(), threading.Event(), snapshots.write
    monkeypatch.setattr(snapshots, "write", lambda *a, **settings: (began.set(), goes_on.wait(30), write(*a, **settings)))
    publisher = make_publisher(tmp_path)
    for step in (1, 2, 3, 4):
        publish(publisher, step)
        assert began.wait(30)
    later = threading.Timer(0.2, goes_on.set)
    later.start()
    publish(publisher, 10)
    publish(publisher, 11)
    publisher.wait()
    later.join()
    assert [*published.kept(tmp_path)][:3] == [1, 2, 10]
    publish(publisher, 13)
    publisher.close()
    assert_same_bits(published.Published(tmp_path).load(13, SPECS, shardings()), random_params(13))


def drifted(step: int) -> Params:
    """Weights of which each step moves some."""
    return jax.tree.map(lambda x: (x * (1 - 0.002 * step)).astype(np.float32), random_params())


def as_published(step: int) -> Params:
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(np.float32), drifted(step))


def publish_all(publisher: Publisher, steps: Iterable[int]) -> None:
    for step in steps:
        publisher.publish(jax.device_put(drifted(step), shardings()), step)
        publisher.wait()


def bases(policies: places.Place) -> dict[int, int]:
    """Step -> step of the base, of the deltas that are kept."""
    of = {step: snapshots.step_and_epoch(snapshots.base_of(folder.name)) for step, folder in published.kept(policies).items()}
    return {step: base[0] for step, base in of.items() if base is not None}


def test_every_fourth_is_full_and_all_are_read_in_any_order(tmp_path):
    publisher = make_publisher(tmp_path, dtype="bfloat16", full_every=4)
    publish_all(publisher, range(1, 11))
    assert bases(tmp_path) == {2: 1, 3: 1, 4: 1, 6: 5, 7: 5, 8: 5}, "10 stays for good"
    publisher.close()
    one_reader, steps = published.Published(tmp_path), [*range(1, 11)] * 2
    random.Random(0).shuffle(steps)
    for step in steps:
        assert_same_bits(one_reader.load(step, SPECS, shardings()), as_published(step))
    one_reader.load(6, SPECS, shardings())
    places.remove_tree(published.kept(tmp_path)[5])
    assert_same_bits(one_reader.load(8, SPECS, shardings()), as_published(8))  # of which it holds the base
    with pytest.raises(snapshots.Damaged, match=published.kept(tmp_path)[8].name):
        published.Published(tmp_path).load(8, SPECS, shardings())


def test_a_resumed_trainer_begins_full_and_leaves_what_there_is_whole(tmp_path):
    first = make_publisher(tmp_path, dtype="bfloat16", full_every=8, keep=3)
    publish_all(first, (1, 2, 3))
    second = make_publisher(tmp_path, dtype="bfloat16", full_every=8, keep=3, epoch=2)
    publish_all(second, (3, 4))
    assert bases(tmp_path) == {2: 1, 4: 3}
    for step in (4, 3, 2, 1):
        assert_same_bits(published.Published(tmp_path).load(step, SPECS, shardings()), as_published(step))
    publish_all(second, (5, 6))
    assert bases(tmp_path) == {4: 3, 5: 3, 6: 3} and [*published.kept(tmp_path)] == [3, 4, 5, 6]


@pytest.mark.parametrize("kind", ["local", "memory"])
def test_a_trainer_that_stalls_while_it_writes_does_no_harm_to_its_successor(tmp_path, monkeypatch, kind):
    """It comes to within its shard writer, another one publishes the same step, and then it goes on."""
    policies = tmp_path / "policy" if kind == "local" else places.place(f"memory://{tmp_path.name}/policy")
    stalls, goes_on, write_shards = threading.Event(), threading.Event(), snapshots._write_shards

    def stalling(*arguments):
        if not stalls.is_set():
            stalls.set()
            assert goes_on.wait(30)
        write_shards(*arguments)

    first = make_publisher(policies)
    monkeypatch.setattr(snapshots, "_write_shards", stalling)
    publish(first, 3)
    assert stalls.wait(30)
    second = make_publisher(policies, epoch=2)
    second.publish(jax.device_put(random_params(8), shardings()), 3)
    second.wait()
    goes_on.set()
    with pytest.raises((StaleEpoch, OSError)):  # the folder that it was writing has been swept
        first.wait()
    (folder,) = published.kept(policies).values()
    assert snapshots.step_and_epoch(folder.name) == (3, 2)
    assert_same_bits(snapshots.load(folder, SPECS, shardings()), random_params(8))


@pytest.mark.parametrize("kind", ["local", "memory"])
def test_a_trainer_that_stalls_before_the_pointer_moves_shows_nothing_more(tmp_path, kind):
    policies = tmp_path / "policy" if kind == "local" else places.place(f"memory://{tmp_path.name}/policy")
    first = make_publisher(policies)
    publish(first, 1)
    first.wait()
    add, second = first.pointer.add, []

    def stalled(*arguments):
        second.append(make_publisher(policies, epoch=2))
        publish(second[0], 3)
        second[0].wait()
        add(*arguments)

    first.pointer.add = stalled
    publish(first, 2)
    with pytest.raises(StaleEpoch, match=r"holds epoch 1 .*epoch 2 has been taken"):
        first.wait()
    assert [*published.kept(policies)] == [1, 3]
    assert len([name for name in places.names_in(policies) if snapshots.step_and_epoch(name)]) == 2


@pytest.mark.parametrize("kind", ["local", "memory"])
def test_a_snapshot_that_the_successor_took_over_stays(tmp_path, monkeypatch, kind):
    """The first trainer moves the pointer, and does not hear of it before another one has taken it."""
    policies = tmp_path / "policy" if kind == "local" else places.place(f"memory://{tmp_path.name}/policy")
    first, second, began, call = make_publisher(policies), [], [], "create" if kind == "local" else "write_if"
    write = getattr(places, call)

    def replaced_behind_it(file, *arguments):
        made = write(file, *arguments)
        if not began and published.POINTER in str(file):
            began.append(True)
            second.append(make_publisher(policies, epoch=2))
            return made if kind == "local" else b""  # the reply is lost, and the request that is sent again is refused
        return made

    monkeypatch.setattr(places, call, replaced_behind_it)
    publish(first, 10)
    with pytest.raises(StaleEpoch):
        first.wait()
    assert [*second[0].pointer.kept] == [10] and second[0].is_there(10, by_this_process=False)
    assert_same_bits(published.Published(policies).load(10, SPECS, shardings()), random_params(10))


def test_a_replaced_trainer_publishes_nothing_more(tmp_path, frozen, monkeypatch, one_device):
    s, write = frozen(tmp_path / "run", batches=2), snapshots.write
    with frozen_runs.trainer(s, publish_every_steps=1, polls=True) as trainer:
        assert trainer.step() is not None
        trainer.flush_snapshot()
        later = trainer.lease.epoch + 1

        def replaced_meanwhile(*arguments, **settings):
            fenced.write(s.run.lease, {"released": True}, epoch=later)
            Pointer(s.run.policies, epoch=later, keep=0, keep_every=1, final_step=1)
            write(*arguments, **settings)

        monkeypatch.setattr(snapshots, "write", replaced_meanwhile)
        assert trainer.step() is not None
        with pytest.raises(StaleEpoch, match=f"epoch {later} has been taken"):
            trainer.flush_snapshot()
        with pytest.raises(StaleEpoch, match=f"epoch {later} has been taken"):
            trainer.lease.journals(2, workdir=s.run.root)
        assert [*published.kept(s.run.policies)] == [0, 1]
