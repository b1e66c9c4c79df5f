"""The publishing thread, and what a trainer that has been replaced shows no more."""

import json
import threading

import jax
import pytest

from tba_jax.roles.trainer.publishing import Publisher
from tba_jax.storage import layout, places, snapshots
from tba_jax.storage.lease import StaleEpoch
from tba_jax.storage.snapshots import SnapshotInfo
from tests.support import frozen_runs
from tests.support.tiny_snapshots import SPECS, assert_same_bits, random_params, shardings


def make_publisher(policies: places.Place, **settings) -> Publisher:
    made = {"epoch": 1, "dtype": "float32", "every_steps": 1, "keep": 0, "keep_every": 10, "final_step": 99}
    return Publisher(policies, **made | settings)


def publish(publisher: Publisher, step: int) -> None:
    publisher.publish(jax.device_put(random_params(step), shardings()), step)


def test_what_waits_for_slow_storage_gives_way_to_what_is_newer(tmp_path, monkeypatch):
    began, goes_on, save = threading.Event(), threading.Event(), snapshots.save
    monkeypatch.setattr(snapshots, "save", lambda *a, **settings: (began.set(), goes_on.wait(30), save(*a, **settings)))
    publisher = make_publisher(tmp_path)
    for step in (1, 2, 3, 10, 11, 12):
        publish(publisher, step)
        assert began.wait(30)
    goes_on.set()
    publisher.wait()
    assert snapshots.committed_steps(tmp_path) == [1, 10, 12]
    publish(publisher, 13)
    publisher.close()
    assert_same_bits(snapshots.load_step(tmp_path, 13, SPECS, shardings()), random_params(13))


@pytest.mark.parametrize("kind", ["local", "memory"])
def test_a_trainer_that_has_been_replaced_shows_nothing(tmp_path, kind):
    policies, replaced = tmp_path / "policy" if kind == "local" else places.place("memory://store/policy"), []

    def check() -> None:
        replaced.append(1)
        if len(replaced) == 4:  # while step 2 is written
            raise StaleEpoch

    publisher = make_publisher(policies, check=check)
    publish(publisher, 1)
    publisher.wait()
    publish(publisher, 2)
    with pytest.raises(StaleEpoch):
        publisher.wait()
    assert snapshots.committed_steps(policies) == [1]
    # The one that replaced it has written step 3; even without the lease the old one leaves that as it is.
    folder = policies / layout.step_name(3)
    for epoch in (1, 2):  # what an earlier one left is replaced
        snapshots.save(folder, random_params(6 + epoch), SnapshotInfo(step=3, epoch=epoch), dtype="float32")
    publish(publisher, 3)
    with pytest.raises(ValueError, match="published under epoch 2, this trainer's is 1: it has been replaced"):
        publisher.wait()
    assert_same_bits(snapshots.load_step(policies, 3, SPECS, shardings()), random_params(8))
    if kind == "local":
        assert layout.steps_in(policies) == [1, 3] and not list(policies.glob(".*"))


def test_a_replaced_trainer_publishes_nothing_more(tmp_path, frozen, monkeypatch, one_device):
    s, save = frozen(tmp_path / "run", batches=2), snapshots.save
    with frozen_runs.trainer(s, publish_every_steps=1, polls=True) as trainer:
        assert trainer.step() is not None
        trainer.flush_snapshot()
        later = trainer.lease.epoch + 1

        def replaced_meanwhile(*arguments, **settings):
            (s.run.journal / f"epoch-{later:06d}.lease").write_text(json.dumps({"epoch": later, "released": True}))
            save(*arguments, **settings)

        monkeypatch.setattr(snapshots, "save", replaced_meanwhile)
        assert trainer.step() is not None
        for look in (trainer.flush_snapshot, trainer.publish_unless_there, trainer.step):
            with pytest.raises(StaleEpoch, match=f"epoch {later} has been taken"):
                look()
        assert snapshots.committed_steps(s.run.policies) == [0, 1]
