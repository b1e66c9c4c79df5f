"""Runs whose files their owner alone may read: those of tasks that say so (`private_files`, see tasks.interface.Task).

An object store has no such permissions: who may read a run there is a rule of the bucket. Trackers and reports, which others
see, get the settings without what is secret in them.
"""

import contextlib
import os
import re
import stat
from pathlib import Path
from typing import Any

from tba_jax.storage import layout

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


HIDDEN = "(not told)"
# Parts of names of settings whose texts are hidden.
_NAME = re.compile(r"token|secret|password|credential|api_?key", re.IGNORECASE)
# User and password in an address, such as https://user:password@host.
_USER = re.compile(r"(?<=://)[^/@\s]+(?=@)")


def without_secrets(tree: Any, *, name: str = "") -> Any:
    """The same settings, where texts under a name that says so, and users of addresses, are HIDDEN.

    Args: tree: of dictionaries, lists and plain values; name: of the setting that `tree` is the value of.
    """
    if isinstance(tree, dict):
        return {
            key: without_secrets(value, name=f"{name}.{key}" if _NAME.search(name) else str(key)) for key, value in tree.items()
        }
    if isinstance(tree, list | tuple):
        return [without_secrets(each, name=name) for each in tree]
    if isinstance(tree, str) and tree:
        return HIDDEN if _NAME.search(name) else _USER.sub(HIDDEN, tree)
    return tree
