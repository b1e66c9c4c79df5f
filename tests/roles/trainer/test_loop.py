"""A trainer's process that waits for rows: what it says, and what it does about it."""

import time

import numpy as np
import pytest

from tba_jax.experiment import training
from tba_jax.replay.log import LogWriter
from tba_jax.replay.reader import LogReader
from tba_jax.roles.trainer import loop
from tba_jax.run.processes import BadInput
from tba_jax.storage import grants, layout, snapshots
from tba_jax.telemetry import status
from tests.support import frozen_runs, tiny_run

pytestmark = pytest.mark.usefixtures("one_device_throughout")


def run(s, stop):
    made, lease = training.make_trainer(s, publish_every_steps=s.config.publish.every_steps)
    try:
        return made, loop.run_trainer(made, s.run, stop=stop)
    finally:
        lease.release()


def test_a_trainer_that_waits_publishes_what_it_has_and_then_gives_grants(tmp_path, frozen, monkeypatch):
    """A row is drawn once, and rows come for some steps only: the next regular snapshot would be that of step 100."""
    monkeypatch.setattr(status, "FLUSH_SECONDS", 0.02)
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


def with_changed_rows(workdir, source, count, column, place, value):
    """A run whose log holds `count` rows of `source` alone, with another value of a column."""
    s = tiny_run.settings(workdir, frozen_runs.config())
    training.reference(s)()
    reader = LogReader(source.run.replay, source.experiment.contract.row_shape())
    rows = {name: column.copy() for name, column in reader.read(next(iter(reader.heads())), 0, count).items()}
    rows[column][place] = value
    LogWriter(s.run.replay, "bad-1", reader.shape, rows_per_append=count, segment_appends=4, info={}).append(rows)
    return s


def test_a_trainer_that_refuses_every_row_ends_with_the_reason(tmp_path, frozen):
    """A batch has 12 rows. The padding is a token that the model does not have."""
    source = frozen(tmp_path / "source", batches=1)
    s = with_changed_rows(tmp_path / "run", source, 12, "tokens", (slice(None), -1), 99)
    told = (
        r"^all 12 rows that have come are refused, the first, row 0 of writer bad-1, because it is not valid \(a token, padding "
        rf"included, is not below the model's vocabulary of {s.experiment.policy.model.vocab} ids\)"
    )
    for _ in range(2):  # a start that follows finds the same
        with frozen_runs.trainer(s) as trainer, pytest.raises(BadInput, match=told):
            trainer.poll()
            trainer.step()


@pytest.mark.parametrize("count, column, value", [(8, "tokens", 99), (12, "reward", np.nan)], ids=["few", "without rewards"])
def test_a_trainer_waits_while_better_rows_may_come(tmp_path, frozen, count, column, value):
    source = frozen(tmp_path / "source", batches=1)
    s = with_changed_rows(tmp_path / "run", source, count, column, ..., value)
    with frozen_runs.trainer(s) as trainer:
        trainer.poll()
        assert trainer.step() is None and trainer.scalars()["rows_rejected"] == count
