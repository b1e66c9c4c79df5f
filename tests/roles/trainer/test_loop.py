"""A trainer's process that waits for rows: what it says, and what it does about it."""

import time

import pytest

from tba_jax.experiment import training
from tba_jax.roles.trainer import loop
from tba_jax.run import grants, layout, snapshots, status
from tba_jax.run.processes import BadInput
from tests.support import frozen_runs

pytestmark = pytest.mark.usefixtures("one_device_throughout")


def run(s, stop):
    made, lease = training.make_trainer(s, publish_every_steps=s.config.publish.every_steps)
    try:
        return made, loop.run_trainer(made, s.run, stop=stop)
    finally:
        lease.release()


def test_a_trainer_that_waits_publishes_what_it_has_and_then_gives_grants(tmp_path, frozen):
    """A row is drawn once, and rows come for some steps only: the next regular snapshot would be that of step 100."""
    limits = {"replay__max_draws_per_row": 1, "publish__every_steps": 100, "publish__at_most_seconds": 0.3}
    s = frozen(tmp_path / "run", batches=6, **limits, searchers__max_rows_per_snapshot=0)
    end, seen = time.monotonic() + 60, []

    def stop() -> bool:
        told = status.read(s.run.metrics("trainer"))
        if told.waits and not seen:
            seen.append(told.waits)
        return grants.number(s.run) >= 2 or time.monotonic() > end

    trainer, finished = run(s, stop)
    assert not finished and 0 < trainer.step_number < 100
    assert snapshots.committed_steps(s.run.policies) == [0, trainer.step_number]
    assert grants.number(s.run) == 2 and layout.read_json(s.run.grant)["step"] == trainer.step_number
    need = "rows: rows of learner.queries=3 queries, "
    assert seen[0].startswith(need) and "have some that may be drawn under replay.max_draws_per_row=1; " in seen[0]
    assert status.read(s.run.metrics("trainer")).waits == ""


def test_a_run_whose_mounts_give_no_more_ends_with_a_sentence(tmp_path, frozen):
    source = frozen(tmp_path / "source", batches=1)
    layout.write_json(source.run.finished, {"step": 12})
    s = frozen_runs.offline(tmp_path / "run", source.run.root, replay__max_draws_per_row=1, publish__at_most_seconds=0.3)
    training.reference(s)()
    with pytest.raises(BadInput, match=r"finds too few rows, and none can come: .*max_draws_per_row=1.* searchers.count=0"):
        training.trainer(s)()
