"""The processes of a run: their exit codes, signals, end with their parent, text logs, memory and type of CPU.

On Linux the kernel kills a child when its parent dies, also a child that is stopped. Everywhere the parent holds the write end of
a pipe, from which a thread of the child reads. A role's log is an open file to which its children write as well: a large log is
copied to `<role>.log.1` and cut to nothing. Lines written between copy and cut are lost.
"""

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import os
import platform
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from tba_jax.run.restart import BAD_INPUT, FORBIDDEN, NO_REWARDS, NOT_FINITE, PEER_LOST, STOPPED, STORAGE_FAILED, STORAGE_FORBIDS

# A run that ended by one of these ends in the same way again, unless the user changes something.
FINAL_CODES = (BAD_INPUT, NOT_FINITE)
# A role that ends by one of these has printed a line "error: …" that says why.
EXPLAINED_CODES = (BAD_INPUT, STORAGE_FAILED, NOT_FINITE, NO_REWARDS, PEER_LOST, STORAGE_FORBIDS)


class BadInput(ValueError):
    """A user's mistake that shows only while a role runs. It ends the process with its sentence and the code BAD_INPUT."""


class NoRewards(RuntimeError):
    """No row has had a reward for so long that a searcher gives up: it ends with this sentence and the code NO_REWARDS."""


class PeerLost(RuntimeError):
    """Another process of the same trainer has ended: this one ends with this sentence and the code PEER_LOST."""


class RunIsAway(OSError):
    """The place of a run does not hold the run at the moment: a folder was moved, or a mount is lost. A failure of storage."""


# Full, over a quota, over a size limit, read-only, not permitted any more, broken, gone from its server.
_STORAGE_ERRORS = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM),
    *(errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.ESHUTDOWN, errno.ENODEV),
)
# Status words that object stores report instead of an errno. JAX uses RESOURCE_EXHAUSTED for memory, but never in an OSError.
_REFUSING = re.compile(r"\b(UNAVAILABLE|PERMISSION_DENIED|UNAUTHENTICATED|RESOURCE_EXHAUSTED|DEADLINE_EXCEEDED)\b")
_FORBIDDING = re.compile("|".join([r"\b(PERMISSION_DENIED|UNAUTHENTICATED)\b", *(re.escape(os.strerror(n)) for n in FORBIDDEN)]))

_LIFELINE = "TBA_JAX_LIFELINE"
_PARENT = "TBA_JAX_PARENT"
_CPUS = "TBA_JAX_CPUS"
_RUN = "TBA_JAX_RUN"
_PR_SET_PDEATHSIG = 1

LOOK_SECONDS = 10.0  # between two looks at the size of a log
SAME_REQUEST_SECONDS = 2.0  # for which further signals ask for nothing new
# The end of a log in which the last words of a role are looked for.
TAIL_BYTES = 1 << 20

# Lines of /proc/cpuinfo that say for which CPU a compiler makes programs here, on x86 and on ARM.
_CPU_LINES = (
    *("vendor_id", "cpu family", "model", "flags"),
    *("CPU implementer", "CPU architecture", "CPU variant", "CPU part", "Features"),
)


def is_storage_failure(error: BaseException) -> bool:
    """Whether storage refused or broke, told by an OSError's errno or status word, or by an errno's text in another error. The
    errors that an error was raised from, or while handling, count as well."""
    return any(map(_refuses, _causes(error)))


def _refuses(error: BaseException) -> bool:
    if isinstance(error, OSError) and (error.errno in _STORAGE_ERRORS or _REFUSING.search(str(error))):
        return True
    return isinstance(error, RunIsAway) or any(os.strerror(number) in str(error) for number in _STORAGE_ERRORS)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """An error, and those that it was raised from or while handling."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)


def exit_code(error: BaseException) -> int:
    """The exit code of a role that an error ends. A ValueError is a mistake of the user only where a role begins."""
    if is_storage_failure(error):
        return STORAGE_FORBIDS if any(_FORBIDDING.search(str(cause)) for cause in _causes(error)) else STORAGE_FAILED
    if isinstance(error, KeyboardInterrupt):
        return STOPPED
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    if missing_package(error):
        return BAD_INPUT
    codes = {BadInput: BAD_INPUT, FloatingPointError: NOT_FINITE, NoRewards: NO_REWARDS, PeerLost: PEER_LOST}
    return next((code for kind, code in codes.items() if isinstance(error, kind)), 1)


def missing_package(error: BaseException) -> str:
    """The sentence about a package that an import did not find, "" for any other error."""
    package = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if package in ("", "tba_jax"):
        return ""
    return (
        f"the package {package!r} is not installed in the environment of {sys.executable}: `{sys.executable} -m pip install -r "
        "requirements.txt` installs what tba_jax needs, and what a task or reward of your own imports is to be installed likewise"
    )


class Lifeline:
    """The parent's end of the pipe. Keep the object as long as children may live."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()

    @property
    def child_fds(self) -> tuple[int, ...]:
        """File descriptors to pass on to a child (subprocess' pass_fds)."""
        return (self._read,)

    def child_environment(self, cpus: tuple[int, ...], *, run_id: str = "") -> dict[str, str]:
        """Environment of a child that is to run on these CPU cores. run_id: of the run that it must find, see `expected_run`."""
        told = {_LIFELINE: str(self._read), _PARENT: str(os.getpid()), _CPUS: ",".join(map(str, cpus))}
        return told | ({_RUN: run_id} if run_id else {})

    def close(self) -> None:
        os.close(self._write)
        os.close(self._read)


def hold() -> None:
    """Called first in a process: a child moves to the cores that its parent chose, and dies by SIGKILL when that is gone."""
    _open_standard_streams()
    cpus = os.environ.pop(_CPUS, "")
    if cpus and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {int(cpu) for cpu in cpus.split(",")})
    read, parent = os.environ.pop(_LIFELINE, ""), os.environ.pop(_PARENT, "")
    if read:
        die_with(int(read), parent=int(parent))


def _open_standard_streams() -> None:
    """Opens the null device as each standard stream that is closed: a pipe of ours would get its number, and a child take it."""
    while (opened := os.open(os.devnull, os.O_RDWR)) <= 2:  # the lowest number that is free
        os.set_inheritable(opened, True)
    os.close(opened)
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            mode = "r" if name == "stdin" else "w"
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8", errors="backslashreplace"))  # noqa: SIM115 (to the end)


@contextlib.contextmanager
def to_the_end() -> Iterator[None]:
    """What a process does from its start to its end: Ctrl-C ends it by one word wherever no role waits for it."""
    try:
        yield
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        sys.exit(STOPPED)
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback while Python ends


def expected_run() -> str:
    """The id of the run that the parent of this process supervises, and that this one must find; "" without such a parent."""
    return os.environ.get(_RUN, "")


def die_with(read: int, *, parent: int) -> None:
    """Called in a child, which then dies by SIGKILL when its parent does, or once every write end of the pipe `read` is closed.

    Args: parent: its process id. The thread of the parent that started the child must live as long as the parent.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it died before the kernel was asked
            os.kill(os.getpid(), signal.SIGKILL)

    def await_the_end() -> None:
        with contextlib.suppress(OSError):
            os.read(read, 1)  # blocks until the last write end is closed
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=await_the_end, name="lifeline", daemon=True).start()


def stop_at_once() -> None:
    """From now on SIGTERM and SIGINT end this process with the code STOPPED, also while its main thread is inside a compiler. To
    be called after libtpu was loaded, which answers SIGTERM by a stack trace."""
    StopSignal(patience_seconds=0, code=STOPPED)


class StopSignal:
    """Turns SIGTERM and SIGINT into a question that loops ask between batches. A later signal ends the process; one that comes at
    once is the same request, which a launcher sent to a role and to its wrapper."""

    def __init__(self, *, patience_seconds: float | None = None, code: int = 0) -> None:
        """Args: patience_seconds: time from the first signal until the process ends with `code`; None: no limit."""
        self._asked, self._first = False, 0.0
        signal.signal(signal.SIGTERM, self._ask)
        signal.signal(signal.SIGINT, self._ask)
        if patience_seconds is not None:
            # Python's own handlers wait for the main thread, which may be inside a compiled program for long; the wakeup
            # descriptor is written at once.
            self._read, write = os.pipe()
            os.set_blocking(write, False)
            signal.set_wakeup_fd(write, warn_on_full_buffer=False)
            threading.Thread(target=self._abandon, args=(patience_seconds, code), name="stop", daemon=True).start()

    def _abandon(self, patience_seconds: float, code: int) -> None:
        while os.read(self._read, 1)[0] not in (signal.SIGTERM, signal.SIGINT):
            pass
        self._asked = True
        time.sleep(patience_seconds)
        os._exit(code)

    def _ask(self, number: int, frame: object) -> None:
        self._first = self._first or time.monotonic()
        if time.monotonic() - self._first > SAME_REQUEST_SECONDS:
            os._exit(128 + number)
        self._asked = True

    def __call__(self) -> bool:
        return self._asked


def keep_bounded(folder: Path, *, megabytes: float, keep: int) -> None:
    """Bounds the logs of this process from now on, in a thread; output that is not a log of the run in `folder` is left alone.

    Args: megabytes: the size above which a log is set aside; keep: how many older logs stay beside it, at least 1.
    """
    logs = {path for descriptor in (1, 2) if (path := _log_of(descriptor, folder)) is not None}

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
    draft = path.with_name(f"{path.name}.draft")
    with open(path, "rb+") as log:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(log, fcntl.LOCK_EX)  # of two roles with one log, the second finds it cut
        if (size := log.seek(0, os.SEEK_END)) <= limit:
            return False
        log.seek(max(0, size - 2 * limit))
        try:
            with open(draft, "wb") as copy:
                shutil.copyfileobj(log, copy, 1 << 20)
            shutil.copymode(path, draft)
        except OSError:
            draft.unlink(missing_ok=True)
            raise
        for number in range(keep - 1, 0, -1):
            with contextlib.suppress(FileNotFoundError):
                older(path, number).replace(older(path, number + 1))
        draft.replace(older(path, 1))
        log.truncate(0)
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


def memory(*, groups: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes of memory that this process may take: of the machine, or of one of its control groups (Linux, versions 1 and 2) where
    that is less."""
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for line in groups.read_text().splitlines() if groups.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        base, name = (root / "memory", "memory.limit_in_bytes") if controllers else (root, "memory.max")
        group = base / path.lstrip("/")
        for folder in (group, *group.parents):
            if (
                folder.is_relative_to(base)
                and (folder / name).is_file()
                and (text := (folder / name).read_text().strip()) != "max"
            ):
                found.append(int(text))
    return min(found)


def cpu_type(*, list_file: Path = Path("/proc/cpuinfo")) -> str:
    """A name of the CPU's model and instructions, such as "x86_64-0f3a9c51": programs compiled for one may not run on others."""
    try:
        lines = {line.strip() for line in list_file.read_text().splitlines() if line.partition(":")[0].strip() in _CPU_LINES}
    except OSError:
        lines = {platform.processor()}
    return f"{platform.machine()}-{hashlib.blake2b(repr(sorted(lines)).encode(), digest_size=4).hexdigest()}"
