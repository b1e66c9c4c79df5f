"""A trainer's process that waits for rows: what it says, and what it does about it."""

import time

import numpy as np
import pytest

from tba_jax.experiment import training
from tba_jax.replay.log import LogWriter
from tba_jax.replay.reader import LogReader
from tba_jax.roles.trainer import loop
from tba_jax.run.processes import BadInput
from tba_jax.storage import layout, published
from tba_jax.telemetry import status
from tests.support import frozen_runs, tiny_run

pytestmark = pytest.mark.usefixtures("one_device_throughout")


def test_a_trainer_that_waits_publishes_what_it_has_and_then_gives_grants(tmp_path, frozen, monkeypatch):
    """A row is drawn once, and rows come for some steps only: the next regular snapshot would be that of step 100."""
    monkeypatch.setattr(status, "FLUSH_SECONDS", 0.02)
    limits = {"replay__max_draws_per_row": 1, "publish__every_steps": 100, "publish__at_most_seconds": 0.3}
    s = frozen(tmp_path / "run", batches=2, **limits, searchers__max_rows_per_snapshot=0)
    end, seen = time.monotonic() + 60, []

    def stop() -> bool:
        told = status.read(s.run.metrics("trainer"))
        if told.waits and not seen:
            seen.append(told.waits)
        return layout.grants_given(s.run) >= 2 or time.monotonic() > end

    with frozen_runs.trainer(s, publish_every_steps=100) as trainer:
        assert not loop.run_trainer(trainer, s.run, stop=stop)
        step = trainer.step_number
        monkeypatch.setattr(trainer, "close", lambda: None)  # it is closed
    assert 0 < step < 100 and [*published.kept(s.run.policies)] == [0, step]
    assert layout.grants_given(s.run) == 2 and layout.read_json(s.run.grant)["step"] == step
    assert layout.steps_in(s.run.checkpoints) == [step]
    assert seen[0].startswith("rows: rows of learner.queries=3 queries, ")
    assert "have some that may be drawn under replay.max_draws_per_row=1; " in seen[0]
    assert status.read(s.run.metrics("trainer")).waits == ""


def test_a_run_whose_mounts_give_no_more_ends_with_a_sentence(tmp_path, frozen):
    source = frozen(tmp_path / "source", batches=1)
    layout.write_json(source.run.finished, {"step": 12})
    s = frozen_runs.offline(tmp_path / "run", source.run.root, replay__max_draws_per_row=1, publish__at_most_seconds=0.3)
    training.reference(s)()
    with pytest.raises(BadInput, match=r"finds too few rows, and none can come: .*max_draws_per_row=1.* searchers.count=0"):
        training.trainer(s)()


BAD = {"all": (12, "tokens", (slice(None), -1), 99), "unscored": (12, "reward", ..., np.nan)}


@pytest.mark.parametrize("name", BAD)
def test_a_trainer_that_refuses_every_row_ends_with_the_reason_unless_better_rows_may_come(tmp_path, frozen, name):
    """A batch has 12 rows. The padding of all is a token that the model does not have."""
    count, column, place, value = BAD[name]
    source = frozen(tmp_path / "source", batches=1)
    s = tiny_run.settings(tmp_path / "run", frozen_runs.config())
    training.reference(s)()
    reader = LogReader(source.run.replay, source.experiment.contract.row_shape())
    rows = {each: column.copy() for each, column in reader.read(next(iter(reader.heads())), 0, count).items()}
    rows[column][place] = value
    LogWriter(s.run.replay, "bad-1", reader.shape, rows_per_append=count, segment_appends=4, info={}).append(rows)
    with frozen_runs.trainer(s, polls=True) as trainer:
        if name == "all":
            told = (
                r"^all 12 rows that have come are refused, the first, row 0 of writer bad-1, because it is not valid \(a token, "
                rf"padding included, is not below the model's vocabulary of {s.experiment.policy.model.vocab} ids\)"
            )
            with pytest.raises(BadInput, match=told):
                trainer.step()
        else:
            assert trainer.step() is None and trainer.scalars()["rows_rejected"] == count
