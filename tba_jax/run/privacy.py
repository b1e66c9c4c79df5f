"""Runs whose files their owner alone may read: those of tasks that say so (`private_files`, see tasks.interface.Task).

An object store has no such permissions: who may read a run there is a rule of the bucket.
"""

import contextlib
import os
import stat
from pathlib import Path

from tba_jax.run import layout

_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def is_private(run: layout.RunDir) -> bool:
    """Whether the contract of the run says so; False where there is no run yet, or its config.json cannot be read."""
    try:
        stored = layout.read_json(run.config)
        return stored["contract"]["private_files"] is True
    except (OSError, ValueError, KeyError, TypeError):  # who reads the whole file says what is wrong with it
        return False


def keep(run: layout.RunDir) -> None:
    """Has this process, and those that it starts, make files and folders that their owner alone may read.

    The folders of the run that are there already, such as a workdir that a launcher has made, are closed to others as well.
    """
    os.umask(_OTHERS)
    for folder in {run.root, run.shared}:
        if isinstance(folder, Path) and folder.is_dir():
            mode = stat.S_IMODE(folder.stat().st_mode)
            if mode & _OTHERS:
                with contextlib.suppress(PermissionError):  # another user's folder
                    folder.chmod(mode & ~_OTHERS)


def follow(workdir: Path) -> None:
    """`keep`, if the run in a workdir is private. A command calls this before it writes anything of the run."""
    run = layout.open_run_dir(workdir)
    if is_private(run):
        keep(run)
