"""State and replay index of a trainer that begins: those of its newest checkpoint, or those of step 0.

A checkpoint counts where it can be read, the journal reaches its step, and the trainer that wrote it held the lease of that step.
Another one is set aside where the run can go on without it: from an older checkpoint, or from the reference policy with the whole
journal. The steps after that are in the journal, and are done again exactly. Where more than one line of the journal is lost,
nobody knows what these steps were, and the trainer ends.
"""

from collections.abc import Sequence
from typing import Any, NoReturn

from tba_jax.models.parameters import Params
from tba_jax.models.policy import Policy
from tba_jax.replay import expiry
from tba_jax.roles.trainer.trainer import Trainer
from tba_jax.roles.trainer.update_program import UpdateProgram
from tba_jax.run import contract as contract_lib
from tba_jax.run import layout, snapshots


class CheckpointLeftOut(Exception):
    """The newest checkpoint does not count, and has been set aside: a trainer that is built anew begins from the one before."""


def restore(trainer: Trainer, checkpoint: int | None, *, end: int, recorded_by: int) -> None:
    """Brings a trainer to its newest checkpoint, or to step 0 where it has none.

    Args:
      checkpoint: its step. end: the last step of the journal.
      recorded_by: the epoch whose journal has the step of the checkpoint, 0 where none has.

    Raises:
      CheckpointLeftOut: see there.
      ValueError: storage has lost lines of the journal; or the checkpoint does not count, and the run cannot go on without it; or
        it cannot be restored although all of it can be read.
    """
    _check_journal(trainer.run, checkpoint or 0, end=end)
    program, group, reference = trainer.program, trainer.group, trainer.reference_id
    if checkpoint is None:
        group.call("begin", reference=reference)
        program.begin(load_reference(trainer.policy, program, trainer.run, reference))
        return
    if checkpoint > end:
        _leave_out(trainer, checkpoint, f"the journal in {trainer.run.journal} ends before it, at step {end}")
    trees, host = _read(trainer, checkpoint)
    if host["epoch"] < recorded_by:
        late = f"a trainer of epoch {host['epoch']} wrote it, and had been replaced: its step belongs to epoch {recorded_by}"
        _leave_out(trainer, checkpoint, late)
    group.call("take restored", reference=reference)
    program.restore(trees, load_frozen(trainer.policy, program, trainer.run, reference))
    trainer.checkpoints.take(checkpoint, host)
    trainer.step_number = trainer.resumed_from = checkpoint


def _check_journal(run: layout.RunDir, checkpoint: int, *, end: int) -> None:
    """Raises ValueError where a checkpoint or a snapshot shows that storage has lost more of the journal than a crash tears."""
    newest = layout.step_name(max([checkpoint, *layout.steps_in(run.policies, newer_than=end)]))
    # Lines become durable one after the other, and a checkpoint or a snapshot comes after its line: a crash tears one line.
    if int(newest) > end + 1:
        there = run.checkpoints / newest if int(newest) == checkpoint else run.policies / newest
        raise ValueError(
            f"storage has lost lines of the journal in {run.journal}: it ends at step {end}, and {there} is there. Restore its "
            f"files; or remove the checkpoints and snapshots after step {end}, and these steps are done anew, with other rows; "
            f"or begin a new run from a snapshot (--init_from={run.shared}@STEP)"
        )


def _read(trainer: Trainer, step: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The trees of the checkpoint, which the other processes have read then as well, and its replay buffer."""
    shapes = trainer.program.checkpointed_shapes(step)
    trainer.group.call("restore", step=step)
    read, errors = None, []
    try:
        read = trainer.checkpoints.read(step, shapes)
    except ValueError as error:
        errors.append(error)
    errors += [ValueError(report["error"]) for report in trainer.group.reports("restored") if report["error"]]
    if read is not None and not errors:
        return read
    del read
    if damage := trainer.checkpoints.damage(step, shapes):
        _leave_out(trainer, step, f"it is damaged ({damage})")
    raise errors[0]


def _leave_out(trainer: Trainer, step: int, reason: str) -> NoReturn:
    """Sets the newest checkpoint aside. Raises ValueError where the run cannot go on without it, else CheckpointLeftOut.

    Args: reason: why it does not count.
    """
    run, older = trainer.run, trainer.checkpoints.steps()[:-1]
    if obstacle := _obstacle(trainer, older):
        raise ValueError(
            f"checkpoint {run.checkpoints / layout.step_name(step)} cannot be used: {reason}. The run cannot go on without it: "
            f"{obstacle}, or begin a new run from a snapshot (--init_from={run.shared}@STEP)"
        )
    there = f"its checkpoint of step {older[-1]}" if older else "its reference policy"
    trainer.checkpoints.set_aside(step, f"{reason}; the run goes on from {there} and its journal")
    raise CheckpointLeftOut(reason)


def _obstacle(trainer: Trainer, older: Sequence[int]) -> str:
    """Why there is no way on without a checkpoint, and what is to be done; "" where there is one. Args: older: the others."""
    run = trainer.run
    if older:
        return ""
    if contract_lib.read(run)["init_from"]:
        return "it may have begun with the optimiser of another run, which checkpoints alone hold; restore the folder"
    if trainer.config.replay.retention == "checkpoints" and any(expiry.expired_segments(run.replay).values()):
        return "replay.retention=checkpoints has removed rows that its first steps need; restore the folder"
    return ""


def load_reference(policy: Policy, program: UpdateProgram, run: layout.RunDir, reference_id: str) -> Params:
    """The reference policy on the trainer's mesh, of which each process loads what its devices need."""
    shardings = policy.model_shardings(program.mesh)
    return snapshots.load(run.reference(reference_id), policy.model_specs, shardings, dtype=program.reference_dtype)


def load_frozen(policy: Policy, program: UpdateProgram, run: layout.RunDir, reference_id: str) -> Params:
    """What stays frozen of the policy, {} where everything is trained."""
    return load_reference(policy, program, run, reference_id) if policy.lora is not None else {}
