"""Text logs of roles: bounded by settings, and read from their ends.

A role's output is an open file, to which its children write as well, so nobody can move all of them to another. A large log is
copied to `<role>.log.1` and cut to nothing instead, by the role itself. What is written between copy and cut is lost.
"""

import contextlib
import fcntl
import os
import shutil
import threading
import time
from pathlib import Path

LOOK_SECONDS = 10.0
# The end of a log in which the last words of a role are looked for.
TAIL_BYTES = 1 << 20
_OUTPUTS = (1, 2)  # descriptors of standard output and standard error


def keep_bounded(folder: Path, *, megabytes: float, keep: int) -> None:
    """Bounds the logs of this process from now on, in a thread; output that is not a log of the run in `folder` is left alone.

    Args:
      megabytes: the size above which a log is set aside; keep: how many older logs stay beside it, at least 1.
    """
    logs = {path for descriptor in _OUTPUTS if (path := _log_of(descriptor, folder)) is not None}

    def look_after() -> None:
        while True:  # at once, too: a role may die again and again before the next look
            for path in logs:
                with contextlib.suppress(OSError):  # storage that refuses is left to the writers of what must not be lost
                    rotate(path, limit=int(megabytes * 2**20), keep=keep)
            time.sleep(LOOK_SECONDS)

    if logs:
        threading.Thread(target=look_after, name="log files", daemon=True).start()


def _log_of(descriptor: int, folder: Path) -> Path | None:
    """The log that a descriptor of this process writes to; None where it is no file of `folder`."""
    with contextlib.suppress(OSError):
        output = os.fstat(descriptor)
        found = next((path for path in folder.glob("*.log") if os.path.samestat(path.stat(), output)), None)
        if found is not None:  # after the cut, who writes elsewhere than at the end would leave a hole
            fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_APPEND)
        return found
    return None


def rotate(path: Path, *, limit: int, keep: int) -> bool:
    """Sets a log aside that has more than `limit` bytes. Returns whether it did. Raises OSError, the log is then as before.

    Of a log that has become far larger, the last 2 · `limit` bytes are kept.
    """
    if (size := path.stat().st_size) <= limit:
        return False
    draft = path.with_name(f"{path.name}.draft")
    try:
        with open(path, "rb") as log, open(draft, "wb") as copy:
            log.seek(max(0, size - 2 * limit))
            shutil.copyfileobj(log, copy, 1 << 20)
        shutil.copymode(path, draft)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
    for number in range(keep - 1, 0, -1):
        with contextlib.suppress(FileNotFoundError):
            older(path, number).replace(older(path, number + 1))
    draft.replace(older(path, 1))
    os.truncate(path, 0)
    return True


def older(path: Path, number: int) -> Path:
    """The log that was set aside before `number` − 1 others."""
    return path.with_name(f"{path.name}.{number}")


def last_lines(path: Path) -> list[str]:
    """The lines at the end of a log, of the one before it too where it was just set aside. Raises OSError where there is none."""
    content = _end(path, TAIL_BYTES)
    if len(content) < TAIL_BYTES:
        with contextlib.suppress(FileNotFoundError):
            content = _end(older(path, 1), TAIL_BYTES - len(content)) + content
    return content.decode(errors="replace").strip().splitlines()


def _end(path: Path, size: int) -> bytes:
    """The last bytes of a file, from the begin of a line on where there are more."""
    with open(path, "rb") as file:
        there = file.seek(0, os.SEEK_END)
        file.seek(max(0, there - size))
        content = file.read()
    return content if there <= size else content.partition(b"\n")[2] or content
