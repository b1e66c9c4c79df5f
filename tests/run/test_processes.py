"""How processes are asked to stop, how they end with their parent, and what counts as a failure of storage."""

import errno
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tensorstore as ts

from tba_jax.run import processes

ROOT = Path(__file__).parent.parent.parent

# The main thread is inside one long call into C, as it is while a compiled program runs.
PROGRAM = """
import hashlib, sys
from tba_jax.run import processes
stop = {asked}
print("ready", flush=True)
hashlib.pbkdf2_hmac("sha256", b"x", b"y", {iterations})
print("finished, asked:", stop(), flush=True)
"""


@pytest.mark.parametrize(
    "asked, iterations, number, said, code, least",
    [
        ("processes.StopSignal(patience_seconds=0.2)", 1_000_000_000, signal.SIGTERM, "", 0, 0.2),  # many minutes
        ("processes.stop_at_once()", 1_000_000_000, signal.SIGINT, "", processes.STOPPED, 0.0),
        ("processes.StopSignal(patience_seconds=60.0)", 200_000, signal.SIGTERM, "finished, asked: True\n", 0, 0.0),
    ],
    ids=["abandoned", "at once", "finished"],
)
def test_a_signal_lets_a_call_end_for_so_long_as_its_patience_lasts(asked, iterations, number, said, code, least):
    program = PROGRAM.format(asked=asked, iterations=iterations)
    process = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    begin = time.monotonic()
    process.send_signal(number)
    assert process.communicate(timeout=60)[0] == said and process.returncode == code
    assert least <= time.monotonic() - begin < least + 20


def test_a_second_signal_ends_the_process():
    program = "import time\nfrom tba_jax.run import processes\nstop = processes.StopSignal(patience_seconds=60.0)\n"
    program += "print('ready', flush=True)\nwhile not stop(): time.sleep(0.01)\nprint('asked', flush=True)\ntime.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    for said in ("ready\n", "asked\n"):
        assert process.stdout.readline() == said
        os.kill(process.pid, signal.SIGINT)
    process.communicate(timeout=20)
    assert process.returncode == 128 + signal.SIGINT


# A parent that starts two children on one lifeline. Each tells its process id, its cores and whether it has imported JAX.
CHILD = """
import os, sys, time
from tba_jax.run import processes
processes.hold()
print(os.getpid(), *sorted(os.sched_getaffinity(0)), "jax" in sys.modules, flush=True)
time.sleep(600)
"""
PARENT = f"""
import os, subprocess, sys, time
from tba_jax.run.processes import Lifeline
line, core = Lifeline(), min(os.sched_getaffinity(0))
for _ in range(2):
    subprocess.Popen([sys.executable, "-c", {CHILD!r}], env=os.environ | line.child_environment((core,)), pass_fds=line.child_fds,
                     start_new_session=True)
time.sleep(600)
"""


def is_running(pid: int) -> bool:
    """A zombie is not: nobody may be there to wait for it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel of Linux alone ends children with their parent")
def test_children_die_with_their_parent():
    """One of them is stopped: no thread of it runs, and the kernel alone can end it."""
    parent = subprocess.Popen([sys.executable, "-c", PARENT], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    told = [parent.stdout.readline().split() for _ in range(2)]
    children = [int(pid) for pid, *_ in told]
    try:
        assert [each[1:] for each in told] == [[str(min(os.sched_getaffinity(0))), "False"]] * 2
        assert parent.poll() is None and all(map(is_running, children))
        os.kill(children[0], signal.SIGSTOP)
        parent.kill()
        parent.wait()
        deadline = time.monotonic() + 5.0
        while any(map(is_running, children)):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        parent.kill()
        for pid in filter(is_running, children):
            os.kill(pid, signal.SIGKILL)
        parent.stdout.close()


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel of Linux alone ends children with their parent")
def test_a_child_whose_parent_died_before_it_held_ends():
    """The pipe is still open: somebody else holds its other end."""
    lifeline = processes.Lifeline()
    environment = os.environ | lifeline.child_environment(()) | {"TBA_JAX_PARENT": "1"}
    command = [sys.executable, "-c", "import time\nfrom tba_jax.run import processes\nprocesses.hold()\ntime.sleep(60)"]
    child = subprocess.Popen(command, cwd=ROOT, env=environment, pass_fds=lifeline.child_fds)
    try:
        assert child.wait(20) == -signal.SIGKILL
    finally:
        child.kill()
        lifeline.close()


def chained(cause: OSError, error: Exception, *, kept: bool | None) -> Exception:
    """`error` as raised while `cause` is handled. Args: kept: True: from it, None: without a word, False: from None."""
    try:
        try:
            raise cause
        except OSError:
            if kept is None:
                raise error  # noqa: B904 (the context is what is tested)
            raise error from (cause if kept else None)
    except Exception as raised:
        return raised


@pytest.mark.parametrize(
    "error",
    [
        *(OSError(number, "x") for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.ESTALE)),
        # As tensorstore words it, without a number; and as the log wraps that.
        ValueError("RESOURCE_EXHAUSTED: writing: [OS error 28: ENOSPC No space left on device]"),
        OSError("append of rows 0 to 15 failed: FAILED_PRECONDITION: File too large"),
        OSError("gs://bucket/run/config.json: UNAVAILABLE: the server is away"),
        *(chained(OSError(errno.EIO, "x"), RuntimeError("the checkpoint failed"), kept=kept) for kept in (True, None)),
    ],
    ids=repr,
)
def test_what_is_a_failure_of_storage(error):
    assert processes.is_storage_failure(error)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 2147483648 bytes"),
        FileNotFoundError(errno.ENOENT, "x"),
        chained(OSError(errno.EROFS, "Read-only file system"), ValueError("bad setting"), kept=False),
    ],
    ids=repr,
)
def test_what_is_none(error):
    assert not processes.is_storage_failure(error)


def test_the_file_system_itself_refuses(tmp_path):
    """What the kernel says to a write beyond a limit, and what tensorstore makes of it."""
    store = ts.KvStore.open({"driver": "file", "path": f"{tmp_path}/"}).result()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        with pytest.raises(OSError, match="File too large") as plain, open(tmp_path / "a", "wb", buffering=0) as file:
            file.write(b"x")
        with pytest.raises(ValueError, match="File too large") as stored:
            store.write("b", b"x").result()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert processes.is_storage_failure(plain.value) and processes.is_storage_failure(stored.value)
