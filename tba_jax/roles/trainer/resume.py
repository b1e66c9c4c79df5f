"""The resume of a trainer: exactly where the journal ends, whatever stopped the last one.

Order of a resume:
  1. hold the epoch lease; nobody else writes journal, checkpoints or snapshots from here on
  2. restore the newest checkpoint: train state and replay index (none: the reference policy, an empty index)
  3. do every journalled step after the checkpoint again, exactly: same rows, same order, same hash
  4. publish where that ends, then go on live
"""

import itertools
import logging

from tba_jax.models.parameters import Params
from tba_jax.models.policy import Policy
from tba_jax.replay import journal
from tba_jax.roles.trainer.trainer import Trainer
from tba_jax.roles.trainer.update_program import UpdateProgram
from tba_jax.run import layout, snapshots

log = logging.getLogger(__name__)


def resume(trainer: Trainer, *, until: int | None = None) -> None:
    """Brings a trainer that was just built to where the run stands, and lets it go on from there.

    Args: until: the last journalled step that is done again under this trainer's config; None: all of them.

    Raises:
      ValueError: checkpoint, journal and log do not go together, or one of them is damaged; names the file.
    """
    run = trainer.run
    trainer.lease.check()  # 1
    snapshots.sweep(run.policies)
    checkpoint = trainer.checkpoints.latest_step()
    lineage = journal.read_lineage(run.journal, after=checkpoint or 0, must_exist=True)
    if checkpoint is None and not lineage.last:
        _check_is_new(run)
    trainer.buffer.expect(lineage)
    _restore(trainer, checkpoint, lineage)  # 2
    trainer.publish_unless_there()
    if lineage:
        _replay(trainer, lineage, until=until)  # 3
        # A trainer that is killed again and again must get further than before.
        trainer.save_checkpoint()
        trainer.publish_unless_there()  # 4
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


def _restore(trainer: Trainer, checkpoint: int | None, lineage: journal.Lineage) -> None:
    """State and index of the checkpoint; without one, those of step 0."""
    program, group = trainer.program, trainer.group
    if checkpoint is None:
        group.call("begin", reference=trainer.reference_id)
        program.begin(load_reference(trainer.policy, program, trainer.run, trainer.reference_id))
        return
    group.call("restore", step=checkpoint, reference=trainer.reference_id)
    trees = trainer.checkpoints.restore(checkpoint, program.checkpointed_shapes(checkpoint), recorded_by=lineage.epoch)
    program.restore(trees, load_frozen(trainer.policy, program, trainer.run, trainer.reference_id))
    trainer.step_number = trainer.resumed_from = checkpoint
    if 0 < lineage.last < checkpoint:
        raise ValueError(f"checkpoint {checkpoint} is ahead of the journal, which ends at step {lineage.last}")


def load_reference(policy: Policy, program: UpdateProgram, run: layout.RunDir, reference_id: str) -> Params:
    """The reference policy on the trainer's mesh, of which each process loads what its devices need."""
    shardings = policy.model_shardings(program.mesh)
    return snapshots.load(run.reference(reference_id), policy.model_specs, shardings, dtype=program.reference_dtype)


def load_frozen(policy: Policy, program: UpdateProgram, run: layout.RunDir, reference_id: str) -> Params:
    """What stays frozen of the policy, {} where everything is trained."""
    return load_reference(policy, program, run, reference_id) if policy.lora is not None else {}


def _replay(trainer: Trainer, lineage: journal.Lineage, *, until: int | None) -> None:
    """Does journalled steps again, to the step `until` at most. The run never went past the last step of the whole journal."""
    for line in itertools.islice(lineage, None if until is None else until - lineage.after):
        slots, rows = trainer.buffer.replay(line)
        trainer.update(slots, rows, was_passed=line["step"] < lineage.last)
        if trainer.publishing.is_due(trainer.step_number):
            trainer.publish_unless_there()
            trainer.flush_snapshot()  # so that every step that may have been published is there again
