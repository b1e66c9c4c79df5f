"""What dead processes left in a run's folders: a trainer that begins removes it, under its lease.

What other processes may be using stays. Snapshots, checkpoints, drafts and copies are written by the run's trainer alone, or by
--role=reference, which holds the lease as well. Temporary files are also written by searchers and the evaluator, for a moment:
one that is an hour old belongs to nobody. Mounted runs are not touched.
"""

import logging
import os
import re
import shutil
from pathlib import Path

from tba_jax.replay.log import REGISTER
from tba_jax.run import layout, places, snapshots
from tba_jax.run.checkpoints import ASIDE, UNFINISHED

log = logging.getLogger(__name__)

_TEMPORARY = re.compile(r"\..+\.([0-9a-f]{8}|[0-9a-f]{16})")
_REFERENCE = re.compile(r"[0-9a-f]{16}")
_OLD_SECONDS = 3600.0


def sweep(run: layout.RunDir, *, keep: int) -> None:
    """Removes what is of no use to anybody. Only the trainer that holds the lease may call it, before it writes anything.

    Args: keep: checkpoint.keep: a checkpoint that was set aside goes once so many newer ones are there.
    """
    snapshots.sweep(run.policies)
    _sweep_checkpoints(run.checkpoints, keep=keep)
    _sweep_references(run)
    folders = [run.root, run.shared, run.journal, run.evaluations, run.references, run.replay, run.replay / REGISTER]
    for folder in dict.fromkeys(folders):
        if isinstance(folder, Path):
            _sweep_temporary_files(folder, journal=run.journal)


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


def _sweep_temporary_files(folder: Path, *, journal: Path) -> None:
    """Removes the files that were being written when their process died. Args: journal: with this trainer's lease."""
    # The storage's own clock: this host's may be hours off. The lease was written a moment ago.
    now = max((lease.stat().st_mtime for lease in journal.glob("*.lease")), default=0.0)
    for name in places.names_in(folder):
        file = folder / name
        if not (_TEMPORARY.fullmatch(name) and file.is_file() and not file.is_symlink()):
            continue
        try:
            if now - file.stat().st_mtime > _OLD_SECONDS:
                os.unlink(file)
        except FileNotFoundError:  # its process lives, and has renamed it
            continue


def remove_snapshots_of_lost_steps(run: layout.RunDir, *, end: int) -> None:
    """Removes the snapshots of steps that the journal does not have, and the evaluations of such steps.

    A line is durable before its snapshot shows, so there are such snapshots only where storage has lost the end of the journal.
    These steps are done anew, with other rows. A searcher that took such a snapshot would leave out the new ones, and an
    evaluator does not evaluate what has a report.

    Args: end: the last step of the journal.
    """
    for step in layout.steps_in(run.policies, newer_than=end):
        log.warning(
            "snapshot %s is removed: storage has lost the end of the journal, which ends at step %d, and goes on from there",
            *(run.policies / layout.step_name(step), end),
        )
        snapshots.remove(run.policies, step)
    # After the snapshots, which an evaluator would evaluate again.
    for step in layout.steps_in(run.evaluations, newer_than=end):
        places.remove(run.evaluations / f"{layout.step_name(step)}.json")
