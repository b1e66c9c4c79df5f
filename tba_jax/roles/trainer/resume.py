"""The resume of a trainer: exactly where the journal ends, whatever stopped the last one.

Order of a resume:
  1. hold the epoch lease; nobody else writes journal, checkpoints or snapshots from here on. Remove what dead processes left
  2. restore the newest checkpoint that counts: train state and replay index (none: the reference policy, an empty index)
  3. do every journalled step after the checkpoint again, exactly: same rows, same order, same hash
  4. publish where that ends, whatever snapshot is there, which a loss of power may have damaged; then go on live
"""

import itertools
import logging

from tba_jax.replay import expiry, journal
from tba_jax.roles.trainer import leftovers, restoring
from tba_jax.roles.trainer.trainer import Trainer
from tba_jax.run import layout, snapshots

log = logging.getLogger(__name__)


def resume(trainer: Trainer, *, until: int | None = None) -> None:
    """Brings a trainer that was just built to where the run stands, and lets it go on from there.

    Args: until: the last journalled step that is done again under this trainer's config; None: all of them.

    Raises:
      CheckpointLeftOut: see restoring.restore. ValueError: checkpoint, journal and log do not go together, or one of them is
        damaged; names the file.
    """
    run = trainer.run
    trainer.lease.check()  # 1
    leftovers.sweep(run, keep=trainer.config.checkpoint.keep)
    expiry.mend(run.replay)
    checkpoint = trainer.checkpoints.latest_step()
    lineage = journal.read_lineage(run.journal, after=checkpoint or 0, must_exist=True)
    if checkpoint is None and not lineage.last:
        _check_is_new(run)
    trainer.buffer.expect(lineage)
    status = trainer.record.status
    status.phase("loading the policy of step 0" if checkpoint is None else f"restoring the checkpoint of step {checkpoint}")
    restoring.restore(trainer, checkpoint, end=lineage.last, recorded_by=lineage.epoch)  # 2
    status.phase("")
    leftovers.remove_snapshots_of_lost_steps(run, end=lineage.last)
    if lineage:
        trainer.publish_unless_there()
        _replay(trainer, lineage, until=until)  # 3
    trainer.buffer.note_losses(since=checkpoint or 0)
    if lineage:
        # A trainer that is killed again and again must get further than before.
        trainer.save_checkpoint()
    trainer.publish_again()  # 4
    trainer.go_live()
    if checkpoint is not None or lineage.last:
        rows, epoch = len(trainer.index), trainer.lease.epoch
        log.info("resumed at step %d with %d resident rows (epoch %d)", trainer.step_number, rows, epoch)


def _check_is_new(run: layout.RunDir) -> None:
    """Raises ValueError where snapshots show that the run had begun: then its state is lost."""
    if (there := snapshots.latest_step(run.policies, newer_than=0)) is not None:
        raise ValueError(
            f"{run.policies} holds the policy of step {there} of a trainer whose checkpoints and journal are not in "
            f"{run.root}: restore them, or begin a new run in another workdir (--init_from={run.shared}@{there})"
        )


def _replay(trainer: Trainer, lineage: journal.Lineage, *, until: int | None) -> None:
    """Does journalled steps again, to the step `until` at most. The run never went past the last step of the whole journal."""
    first, last = trainer.step_number, lineage.last if until is None else min(until, lineage.last)
    for line in itertools.islice(lineage, None if until is None else until - lineage.after):
        trainer.record.status.phase("doing steps of the journal again", done=trainer.step_number - first, total=last - first)
        slots, rows = trainer.buffer.replay(line)
        trainer.update(slots, rows, was_passed=line["step"] < lineage.last)
        if trainer.publishing.is_due(trainer.step_number):
            trainer.publish_unless_there()
            trainer.flush_snapshot()  # so that every step that may have been published is there again
