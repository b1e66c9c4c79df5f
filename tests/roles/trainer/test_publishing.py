"""Which snapshots a trainer publishes, and which it does not."""

import json
import shutil
import threading

import pytest

from tba_jax.storage import layout, snapshots
from tba_jax.storage.lease import StaleEpoch
from tests.support import frozen_runs

pytestmark = pytest.mark.usefixtures("one_device_throughout")


@pytest.mark.parametrize("steps", [0, 3])
def test_a_beginning_is_published_once_however_slow_storage_is(steps, tmp_path, frozen, monkeypatch):
    """A second snapshot of the same step would take the first one away from whoever reads it."""
    s = frozen(tmp_path / "run", batches=2)
    if steps:
        frozen_runs.train(s, until=steps, abandon=True)
    shutil.rmtree(s.run.policies)
    saved, goes_on, save = [], threading.Event(), snapshots.save

    def slow(folder, params, info, **settings):
        saved.append(info.step)
        assert goes_on.wait(30)
        save(folder, params, info, **settings)

    monkeypatch.setattr(snapshots, "save", slow)
    with frozen_runs.trainer(s, publish_every_steps=100) as trainer:
        goes_on.set()
        trainer.flush_snapshot()
        assert saved == sorted({0, steps}) == snapshots.committed_steps(s.run.policies)


def test_a_replaced_trainer_publishes_nothing_more(tmp_path, frozen, monkeypatch):
    """It checks its lease when a snapshot is about to become visible, and when it hands one over."""
    s = frozen(tmp_path / "run", batches=2)
    save = snapshots.save
    with frozen_runs.trainer(s, publish_every_steps=1) as trainer:
        trainer.poll()
        assert trainer.step() is not None
        trainer.flush_snapshot()
        later = trainer.lease.epoch + 1

        def replaced_meanwhile(*arguments, **settings):
            (s.run.journal / f"epoch-{later:06d}.lease").write_text(json.dumps({"epoch": later, "released": True}))
            save(*arguments, **settings)

        monkeypatch.setattr(snapshots, "save", replaced_meanwhile)
        assert trainer.step() is not None
        for look in (trainer.flush_snapshot, lambda: trainer.publish({}), trainer.step):
            with pytest.raises(StaleEpoch, match=f"epoch {later} has been taken"):
                look()
        assert snapshots.committed_steps(s.run.policies) == [0, 1]


def test_the_best_step_stays_until_another_is_better(tmp_path, frozen):
    """No setting keeps step 2, which was evaluated all the same: as the last step of a run that was extended, say."""
    s = frozen(tmp_path / "run", publish__keep=3)
    s.run.evaluations.mkdir()

    def score(step: int, reward: float) -> None:
        layout.write_json(s.run.evaluations / f"{layout.step_name(step)}.json", {"step": step, "greedy_reward": reward})

    with frozen_runs.trainer(s, publish_every_steps=1) as trainer:
        trainer.poll()
        for step in range(1, 9):
            assert trainer.step() is not None
            trainer.flush_snapshot()
            if step == 2:
                score(2, 0.5)
            if step == 7:
                assert snapshots.committed_steps(s.run.policies) == [0, 2, 5, 6, 7]
                score(7, 0.75)
        assert snapshots.committed_steps(s.run.policies) == [0, 6, 7, 8]
