"""One step after another: compiled once, shown once it is durable, by one trainer."""

import jax
import pytest

from tba_jax.experiment import training
from tba_jax.replay import journal
from tba_jax.storage import snapshots
from tba_jax.storage.lease import LeaseHeld
from tests.support import frozen_runs

pytestmark = pytest.mark.usefixtures("one_device_throughout")


def test_a_second_trainer_is_refused(tmp_path, frozen):
    s = frozen(tmp_path / "run", batches=2)
    with frozen_runs.trainer(s), pytest.raises(LeaseHeld, match="held by process"):
        training.trainer(s)


def test_the_update_is_compiled_while_rows_are_awaited_and_once_for_a_shape(tmp_path, caplog, monkeypatch, frozen):
    s = frozen(tmp_path / "run", batches=2)

    def updates_compiled():
        return sum("Finished XLA compilation of jit(train_step)" in record.getMessage() for record in caplog.records)

    with frozen_runs.trainer(s) as trainer, jax.log_compiles():
        place, plans = trainer.program.place, []

        def noted(rows):
            placed = place(rows)
            plans.append(placed.plan)
            return placed

        monkeypatch.setattr(trainer.program, "place", noted)
        trainer.start()
        assert updates_compiled() == len(plans) == 1
        trainer.poll()
        for steps in range(1, 6):
            assert trainer.step() is not None
            # How long the rows are that the frozen searcher drew is chance, and so is what their update has for a shape.
            assert len(plans) == 1 + steps
            assert updates_compiled() == len({(plan.sequences, plan.whole_groups) for plan in plans})


def test_nothing_shows_an_update_whose_line_was_refused(tmp_path, monkeypatch, frozen):
    """The line is written while the devices compute: the update must not be seen before it is durable."""
    s = frozen(tmp_path / "run", batches=2)

    def refuse(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with frozen_runs.trainer(s, publish_every_steps=1) as trainer:
        trainer.poll()
        assert trainer.step() is not None
        trainer.flush_snapshot()
        with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
            patch.setattr(journal.os, "fsync", refuse)
            trainer.step()
        assert snapshots.committed_steps(s.run.policies) == [0, 1]
        assert [line["step"] for line in journal.read_lineage(s.run.journal)] == [1]
    with frozen_runs.trainer(s, publish_every_steps=1) as again:
        assert again.step_number == 1
        again.poll()
        assert again.step() is not None
        again.flush_snapshot()
        assert snapshots.committed_steps(s.run.policies) == [0, 1, 2]


def test_rows_that_are_not_valid_are_told_by_writer_and_row(tmp_path, caplog, frozen):
    s = frozen(tmp_path / "run", batches=2)
    frozen_runs.append_changed(s, "bad-1", tokens=((2, 0), 9999))
    with frozen_runs.trainer(s) as trainer:
        trainer.poll()
        assert trainer.step() is not None
        for _ in range(2):
            trainer.report_problems()
    told = [record.message for record in caplog.records if "bad-1" in record.message]
    (sentence,) = told
    assert sentence.startswith("replay log of writer bad-1: row 2 is not valid (a token, padding included, is not below ")
    assert sentence.endswith(" 17 ids), it and others like it are left out and counted")
