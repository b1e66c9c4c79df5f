"""Processes of a run that end together: a child dies with its parent, however the parent ends.

The parent holds the write end of a pipe, the child reads from the other; the kernel closes it when the parent is gone,
by SIGKILL too. This file also holds what a parent tells its children before they import JAX, and the exit codes of a role.
"""

import contextlib
import errno
import os
import re
import signal
import threading
import time

# Exit codes of a role. A supervisor starts a role again after every code but the final ones: a storage problem (a full disk, a
# lost mount) may be solved while the run waits, and committed rows and snapshots are not lost meanwhile.
BAD_INPUT = 2
STORAGE_FAILED = 3
NOT_FINITE = 4
NO_REWARDS = 5
STOPPED = 130
FINAL_CODES = (BAD_INPUT, NOT_FINITE)


class BadInput(ValueError):
    """A user's mistake that shows only while a role runs. It ends the process with its sentence and the code BAD_INPUT."""


class NoRewards(RuntimeError):
    """No row has had a reward for so long that a searcher gives up: it ends with this sentence and the code NO_REWARDS."""


# Full, over a quota, over a size limit, read-only, not permitted any more, broken, gone from its server.
_STORAGE_ERRORS = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.EIO,
    errno.ESTALE,
)
# Status words that object stores report instead of an errno. JAX uses RESOURCE_EXHAUSTED for memory, but never in an OSError.
_REFUSING = re.compile(r"\b(UNAVAILABLE|PERMISSION_DENIED|UNAUTHENTICATED|RESOURCE_EXHAUSTED|DEADLINE_EXCEEDED)\b")

_LIFELINE = "TBA_JAX_LIFELINE"
_CPUS = "TBA_JAX_CPUS"


def is_storage_failure(error: BaseException) -> bool:
    """Whether storage refused or broke, told by an OSError's errno or status word, or by an errno's text in another error.

    The errors that an error was raised from, or while handling, count as well.
    """
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        text = str(cause)
        if isinstance(cause, OSError) and (cause.errno in _STORAGE_ERRORS or _REFUSING.search(text)):
            return True
        if any(os.strerror(number) in text for number in _STORAGE_ERRORS):
            return True
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return False


class Lifeline:
    """The parent's end of the pipe. Keep the object as long as children may live."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()

    @property
    def child_fds(self) -> tuple[int, ...]:
        """File descriptors to pass on to a child (subprocess' pass_fds)."""
        return (self._read,)

    def child_environment(self, cpus: tuple[int, ...]) -> dict[str, str]:
        """Environment of a child that is to run on these CPU cores."""
        return {_LIFELINE: str(self._read), _CPUS: ",".join(map(str, cpus))}

    def close(self) -> None:
        os.close(self._write)
        os.close(self._read)


def hold() -> None:
    """Called first in a child: moves to the cores that the parent chose, and dies by SIGKILL when the parent is gone."""
    cpus = os.environ.pop(_CPUS, "")
    if cpus and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {int(cpu) for cpu in cpus.split(",")})
    read = os.environ.pop(_LIFELINE, "")
    if read:
        die_with(int(read))


def die_with(read: int) -> None:
    """Called in a child, which then dies by SIGKILL once every write end of the pipe behind `read` is closed."""
    threading.Thread(target=_die_with_parent, args=(read,), name="lifeline", daemon=True).start()


def _die_with_parent(read: int) -> None:
    with contextlib.suppress(OSError):
        os.read(read, 1)  # blocks until the last write end is closed
    os.kill(os.getpid(), signal.SIGKILL)


class StopSignal:
    """Turns SIGTERM and SIGINT into a question that loops ask between batches; a second signal ends the process."""

    def __init__(self, *, patience_seconds: float | None = None) -> None:
        """Args: patience_seconds: time from the first signal until the process ends with code 0; None: no limit."""
        self._asked, self._signals = False, 0
        signal.signal(signal.SIGTERM, self._ask)
        signal.signal(signal.SIGINT, self._ask)
        if patience_seconds is not None:
            # Python's own handlers wait for the main thread, which may be inside a compiled program for long; the wakeup
            # descriptor is written at once.
            self._read, write = os.pipe()
            os.set_blocking(write, False)
            signal.set_wakeup_fd(write, warn_on_full_buffer=False)
            threading.Thread(target=self._abandon, args=(patience_seconds,), name="stop", daemon=True).start()

    def _abandon(self, patience_seconds: float) -> None:
        while os.read(self._read, 1)[0] not in (signal.SIGTERM, signal.SIGINT):
            pass
        self._asked = True
        time.sleep(patience_seconds)
        os._exit(0)

    def _ask(self, number: int, frame: object) -> None:
        self._signals += 1
        if self._signals > 1:
            os._exit(128 + number)
        self._asked = True

    def __call__(self) -> bool:
        return self._asked
