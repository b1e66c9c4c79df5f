"""The resume of a trainer: exactly where the journal ends, whatever stopped the last one.

Order of a resume:
  1. hold the epoch lease; nobody else writes journal, checkpoints or snapshots from here on. Remove what dead processes left
  2. restore the newest checkpoint that counts: train state and replay index (none: the reference policy, an empty index)
  3. do every journalled step after the checkpoint again, exactly: same rows, same order, same hash
  4. publish where that ends, whatever snapshot is there, which a loss of power may have damaged; then go on live
"""

import itertools
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tba_jax.models.parameters import Params
from tba_jax.models.policy import Policy
from tba_jax.replay import journal
from tba_jax.replay.log import REGISTER
from tba_jax.roles.trainer.trainer import Trainer
from tba_jax.roles.trainer.update_program import UpdateProgram
from tba_jax.storage import contract, layout, places, snapshots
from tba_jax.storage.checkpoints import ASIDE, UNFINISHED
from tba_jax.storage.published import POINTER
from tba_jax.telemetry.status import code_digest

log = logging.getLogger(__name__)


def resume(trainer: Trainer, *, until: int | None = None) -> None:
    """Brings a trainer that was just built to where the run stands, and lets it go on from there.

    Args: until: the last journalled step that is done again under this trainer's config; None: all of them.

    Raises CheckpointLeftOut, see restore, or ValueError naming the file where checkpoint, journal and log do not go together.
    """
    plan, status = trainer.plan, trainer.record.status
    lineage = _survey(trainer) if plan.leads else None  # 1
    checkpoint, lines = plan.share(lambda: _begins(trainer, lineage))
    status.phase("loading the policy of step 0" if checkpoint is None else f"restoring the checkpoint of step {checkpoint}")
    restore(trainer, checkpoint, lineage)  # 2
    status.phase("")
    if lineage is not None:
        remove_snapshots_of_lost_steps(trainer, end=lineage.last)
    if lines:
        trainer.publish_unless_there()
        _replay(trainer, lineage, until=until)  # 3
    if lineage is not None:
        trainer.buffer.note_losses(since=checkpoint or 0)
    if lines:
        # A trainer that is killed again and again must get further than before.
        trainer.save_checkpoint()
    trainer.publish_unless_there(by_this_process=True)  # 4
    if lineage is None:
        return
    trainer.go_live()
    if checkpoint is not None or lineage.last:
        rows, epoch = len(trainer.index), trainer.lease.epoch
        log.info("resumed at step %d with %d resident rows (epoch %d)", trainer.step_number, rows, epoch)


def _survey(trainer: Trainer) -> journal.Lineage:
    """The journalled steps after the newest checkpoint, in process 0. Sweeps what dead processes left."""
    trainer.lease.check()
    sweep(trainer.run, keep=trainer.config.checkpoint.keep)
    checkpoint = trainer.checkpoints.stored.latest_step()
    lineage = journal.read_lineage(trainer.run.journal, after=checkpoint or 0, must_exist=True)
    trainer.buffer.expect(lineage)
    return lineage


def _begins(trainer: Trainer, lineage: journal.Lineage | None) -> list[int | None]:
    """The step of the checkpoint that the trainer begins with, None without one, and how many journalled steps come after it."""
    assert lineage is not None, "process 0 has it"
    checkpoint = trainer.checkpoints.stored.latest_step()
    _check_journal(trainer, checkpoint or 0, end=lineage.last)
    return [checkpoint, len(lineage) if lineage else 0]


def _replay(trainer: Trainer, lineage: journal.Lineage | None, *, until: int | None) -> None:
    """Does journalled steps again, to the step `until` at most. Args: lineage: of process 0, which shares its batches."""
    again: Iterator[dict[str, Any]] = iter(()) if lineage is None else _again(trainer, lineage, until=until)
    while (told := trainer.plan.share(lambda: next(again, dict[str, Any](do="end"))))["do"] == "update":
        slots = np.array(told["slots"]) if trainer.plan.leads else None
        trainer.update(told["rows"], slots=slots, was_passed=told["was_passed"])
        if trainer.publishing.is_due(trainer.step_number):
            trainer.publish_unless_there()
            trainer.flush_snapshot()  # so that every step that may have been published is there again


def _again(trainer: Trainer, lineage: journal.Lineage, *, until: int | None) -> Iterator[dict[str, Any]]:
    """What each journalled step does again. The run never went past the last step of the whole journal."""
    first, last = trainer.step_number, lineage.last if until is None else min(until, lineage.last)
    here, other = code_digest(), 0
    for line in itertools.islice(lineage, None if until is None else until - lineage.after):
        trainer.record.status.phase("doing steps of the journal again", done=trainer.step_number - first, total=last - first)
        if line.get("code", here) != here and not other:
            other = line["step"]
            log.warning(
                "steps from %d on were made by other code or other versions (digest %s; these are %s), and are done again by "
                "these: the same rows, but the weights may differ. To have the same weights, resume with what made them",
                *(other, line["code"], here),
            )
        slots, rows = trainer.buffer.replay(line)
        yield {"do": "update", "rows": rows, "slots": slots.tolist(), "was_passed": line["step"] < lineage.last}


class CheckpointLeftOut(Exception):
    """The newest checkpoint does not count, and has been set aside: a trainer that is built anew begins from the one before."""


def restore(trainer: Trainer, checkpoint: int | None, lineage: journal.Lineage | None) -> None:
    """Brings a trainer to its newest checkpoint, or to step 0 where it has none.

    A checkpoint counts where it can be read, the journal reaches its step, and the trainer that wrote it held the lease of that
    step. Another one is set aside where the run can go on without it.

    Args: checkpoint: its step; lineage: of process 0: what the journal has after it.

    Raises CheckpointLeftOut, or ValueError where the run cannot go on: lost lines, or a checkpoint that does not fit.
    """
    program, reference = trainer.program, trainer.reference_id
    if checkpoint is None:
        program.begin(load_reference(trainer.policy, program, trainer.run, reference))
        return
    found, error = None, ""
    try:
        found = trainer.checkpoints.stored.restore(checkpoint, program.checkpointed_shapes(checkpoint))
    except ValueError as failure:
        error = str(failure)
    errors = [each for each in trainer.plan.gather(error) if each]
    if trainer.plan.share(lambda: _set_aside(trainer, checkpoint, lineage, found[1] if found else {}, errors)):
        raise CheckpointLeftOut
    assert found is not None, "a checkpoint that cannot be read is left out, or ends the trainer"
    trees, host = found
    program.restore(trees, load_frozen(trainer.policy, program, trainer.run, reference))
    # Gradients of objectives differ by factors of 10^4: under another one's moments, no update would move for hundreds of steps.
    changes = (entry["settings"] for entry in contract.read(trainer.run)["changes"] if entry["step"] == checkpoint)
    if any("learner.objective" in settings for settings in changes):
        program.restart_moments()
    trainer.checkpoints.take(checkpoint, host)
    trainer.step_number = trainer.resumed_from = checkpoint


def _set_aside(
    trainer: Trainer, checkpoint: int, lineage: journal.Lineage | None, host: Mapping[str, Any], errors: Sequence[str]
) -> bool:
    """Sets a checkpoint aside where it does not count, in process 0; returns whether it did.

    Args: host: its replay buffer. errors: why processes cannot read it. Raises ValueError where the run cannot go on without it.
    """
    assert lineage is not None
    if checkpoint > lineage.last:
        _leave_out(trainer, checkpoint, f"the journal in {trainer.run.journal} ends before it, at step {lineage.last}")
    elif errors:
        damage = trainer.checkpoints.stored.damage(checkpoint, trainer.program.checkpointed_shapes(checkpoint))
        if not damage:
            raise ValueError(errors[0])
        _leave_out(trainer, checkpoint, f"it is damaged ({damage})")
    elif host["epoch"] < lineage.epoch:
        late = f"a trainer of epoch {host['epoch']} wrote it, and had been replaced: its step belongs to epoch {lineage.epoch}"
        _leave_out(trainer, checkpoint, late)
    else:
        return False
    return True


def _check_journal(trainer: Trainer, checkpoint: int, *, end: int) -> None:
    """Raises ValueError where a checkpoint, a snapshot or the lease shows that storage has lost more of the journal than a crash
    tears, or that this workdir is an older copy of the one where the run went on."""
    run, told = trainer.run, trainer.lease.journal
    shown = {step: f"{run.policies / name}" for step, name in trainer.publishing.pointer.kept.items()}
    shown |= {checkpoint: f"{run.checkpoints / layout.step_name(checkpoint)}"}
    if told.get("step", 0) > end + 1 >= max(shown):
        shown[told["step"]] = f"step {told['step']} of the journal in {told['workdir']} on host {told['host']}"
    newest, there = max(shown.items())
    # Lines become durable one after the other, and a checkpoint or a snapshot comes after its line: a crash tears one line.
    if newest > end + 1:
        raise ValueError(
            f"storage has lost lines of the journal in {run.journal}: it ends at step {end}, and {there} is there. Restore its "
            f"files; or remove the checkpoints and snapshots after step {end}, and these steps are done anew, with other rows; "
            f"or begin a new run from a snapshot (--init_from={run.shared}@STEP)"
        )


def _leave_out(trainer: Trainer, step: int, reason: str) -> None:
    """Sets the newest checkpoint aside. Raises ValueError where the run cannot go on without it.

    Args: reason: why it does not count.
    """
    run, older = trainer.run, trainer.checkpoints.stored.steps()[:-1]
    removes = trainer.config.replay.retention == "checkpoints"
    if not older and removes and trainer.buffer.lacks_rows():
        raise ValueError(
            f"checkpoint {run.checkpoints / layout.step_name(step)} cannot be used: {reason}. The run cannot go on without it: "
            "replay.retention=checkpoints has removed rows that its first steps need; restore the folder, or begin a new run "
            f"from a snapshot (--init_from={run.shared}@STEP)"
        )
    there = f"its checkpoint of step {older[-1]}" if older else "its reference policy"
    trainer.checkpoints.set_aside(step, f"{reason}; the run goes on from {there} and its journal")


def load_reference(policy: Policy, program: UpdateProgram, run: layout.RunDir, reference_id: str) -> Params:
    """The reference policy on the trainer's mesh, of which each process loads what its devices need."""
    shardings = policy.model_shardings(program.mesh)
    return snapshots.load(run.reference(reference_id), policy.model_specs, shardings, dtype=program.reference_dtype)


def load_frozen(policy: Policy, program: UpdateProgram, run: layout.RunDir, reference_id: str) -> Params:
    """What stays frozen of the policy, {} where everything is trained."""
    return load_reference(policy, program, run, reference_id) if policy.lora is not None else {}


_TEMPORARY = re.compile(r"\..+\.([0-9a-f]{8}|[0-9a-f]{16})")
_REFERENCE = re.compile(r"[0-9a-f]{16}")
_OLD_SECONDS = 3600.0


def sweep(run: layout.RunDir, *, keep: int) -> None:
    """Removes what is of no use to anybody. Only the trainer that holds the lease may call it, before it writes anything.

    Args: keep: checkpoint.keep: a checkpoint that was set aside goes once so many newer ones are there.
    """
    _sweep_checkpoints(run.checkpoints, keep=keep)
    _sweep_references(run)
    folders = [run.root, run.shared, run.journal, run.evaluations, run.references, run.replay, run.replay / REGISTER]
    folders += [run.lease, run.policies / POINTER]
    for folder in dict.fromkeys(folders):
        if isinstance(folder, Path):
            _sweep_temporary_files(folder)


def _sweep_checkpoints(folder: Path, *, keep: int) -> None:
    for unfinished in folder.glob(UNFINISHED):
        shutil.rmtree(unfinished, ignore_errors=True)
    steps = layout.steps_in(folder)
    for aside in folder.glob(f"{ASIDE}*"):
        (step,) = layout.as_steps([aside.name.removeprefix(ASIDE)]) or [0]
        if sum(newer > step for newer in steps) >= keep:
            shutil.rmtree(aside, ignore_errors=True)


def _sweep_references(run: layout.RunDir) -> None:
    """Removes drafts of reference policies, and copies of which the file that makes them visible is missing."""
    for draft in run.draft.parent.glob(".draft-*"):
        shutil.rmtree(draft, ignore_errors=True)
    whole = {*places.folders_with(run.references, snapshots.COMMIT), layout.reference_id(run)}
    for name in places.names_in(run.references):
        if _REFERENCE.fullmatch(name) and name not in whole:
            places.remove_tree(run.reference(name))


def _sweep_temporary_files(folder: Path) -> None:
    """Removes the files that were being written when their process died."""
    files = [folder / name for name in places.names_in(folder) if _TEMPORARY.fullmatch(name)]
    files = [file for file in files if file.is_file() and not file.is_symlink()]
    if not files:
        return
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".") as new:
        now = os.stat(new.name).st_mtime  # by the storage's own clock: this host's may be hours off
    for file in files:
        try:
            if now - file.stat().st_mtime > _OLD_SECONDS:
                os.unlink(file)
        except FileNotFoundError:  # its process lives, and has renamed it
            continue


def remove_snapshots_of_lost_steps(trainer: Trainer, *, end: int) -> None:
    """Removes the snapshots and evaluations of steps after `end`, the last one of the journal, whose rest storage has lost: these
    steps are done anew, with other rows."""
    run = trainer.run
    for step in trainer.publishing.pointer.drop_after(end):
        log.warning(
            "the snapshot of step %d is removed: storage has lost the end of the journal, and the run goes on from step %d",
            *(step, end),
        )
    # After the snapshots, which an evaluator would evaluate again.
    for step in layout.steps_in(run.evaluations, newer_than=end):
        places.remove(run.evaluations / f"{layout.step_name(step)}.json")
