"""How processes are asked to stop, how they end with their parent, and what counts as a failure of storage."""

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

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
        ("processes.StopSignal(patience_seconds=0.5)", 1_000_000_000, signal.SIGTERM, "", 0, 0.5),  # many minutes
        ("processes.stop_at_once()", 1_000_000_000, signal.SIGINT, "", processes.STOPPED, 0.0),
        ("processes.StopSignal()", 1_000_000, signal.SIGTERM, "finished, asked: True\n", 0, 0.0),
        ("processes.StopSignal(patience_seconds=60.0)", 1_000_000, signal.SIGINT, "finished, asked: True\n", 0, 0.0),
    ],
    ids=["abandoned", "at once", "finished", "finished in time"],
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
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM], ids=lambda end: end.name)
def test_children_die_with_their_parent(end):
    """One of them is stopped: no thread of it runs, and the kernel alone can end it."""
    parent = subprocess.Popen([sys.executable, "-c", PARENT], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    told = [parent.stdout.readline().split() for _ in range(2)]
    children = [int(pid) for pid, *_ in told]
    try:
        assert [each[1:] for each in told] == [[str(min(os.sched_getaffinity(0))), "False"]] * 2
        assert parent.poll() is None and all(map(is_running, children))
        os.kill(children[0], signal.SIGSTOP)
        parent.send_signal(end)
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


def test_a_process_without_a_lifeline_just_runs(monkeypatch):
    for name in ("TBA_JAX_LIFELINE", "TBA_JAX_CPUS"):
        monkeypatch.delenv(name, raising=False)
    cores = os.sched_getaffinity(0)
    processes.hold()
    assert os.sched_getaffinity(0) == cores


def raised(make) -> Exception:
    try:
        make()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def wrapped():
    try:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")
    except OSError as error:
        raise RuntimeError("the checkpoint failed") from error


def while_handled():
    try:
        raise OSError(errno.EROFS, "Read-only file system")
    except OSError:
        raise KeyError("cleaning up failed too")  # noqa: B904 (the context is what is tested)


def told_apart():
    try:
        raise OSError(errno.EROFS, "Read-only file system")
    except OSError:
        raise ValueError("bad setting") from None


def test_what_is_a_failure_of_storage():
    for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EIO, errno.ESTALE):
        assert processes.is_storage_failure(OSError(number, "x"))
    # As tensorstore words it, without a number; and as the log wraps that.
    assert processes.is_storage_failure(ValueError("RESOURCE_EXHAUSTED: writing: [OS error 28: ENOSPC No space left on device]"))
    assert processes.is_storage_failure(OSError("append of rows 0 to 15 failed: FAILED_PRECONDITION: File too large"))
    assert processes.is_storage_failure(OSError("gs://bucket/run/config.json: UNAVAILABLE: the server is away"))
    assert processes.is_storage_failure(raised(wrapped)) and processes.is_storage_failure(raised(while_handled))


def test_what_is_none():
    out_of_memory = RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 2147483648 bytes")
    for error in (
        out_of_memory,
        FileNotFoundError(errno.ENOENT, "x"),
        ValueError("bad"),
        FloatingPointError("step 3"),
        raised(told_apart),
    ):
        assert not processes.is_storage_failure(error)


def test_the_file_system_itself_refuses(tmp_path):
    """What the kernel says to a write beyond a limit, and what tensorstore makes of it."""
    program = (
        "import errno, resource, signal, sys\n"
        "import tensorstore as ts\n"
        "from tba_jax.run import processes\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n"
        "folder = sys.argv[1]\n"
        "store = ts.KvStore.open({'driver': 'file', 'path': folder + '/'}).result()\n"
        "for write in (lambda: open(folder + '/a', 'wb', buffering=0).write(b'x'), lambda: store.write('b', b'x').result()):\n"
        "    try:\n"
        "        write()\n"
        "    except Exception as error:\n"
        "        assert processes.is_storage_failure(error), error\n"
        "    else:\n"
        "        raise AssertionError('it was written')\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


CLOSED = """
import os, sys
from tba_jax.run import processes
processes.hold()
sys.stdin.read(), print("text", flush=True), print("text", file=sys.stderr, flush=True), sys.stdout.isatty()
with open(sys.argv[1], "w") as file:
    print(*(os.readlink(f"/proc/self/fd/{number}") for number in range(3)), *os.pipe(), file=file)
"""


@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"])
def test_a_closed_standard_descriptor_is_the_null_device(closed, tmp_path):
    told = tmp_path / "told"
    shell = f'exec "$@" </dev/null >/dev/null 2>/dev/null {closed}'
    subprocess.run(["sh", "-c", shell, "sh", sys.executable, "-c", CLOSED, told], cwd=ROOT, check=True)
    *streams, read, write = told.read_text().split()
    assert streams == ["/dev/null"] * 3 and min(int(read), int(write)) > 2
