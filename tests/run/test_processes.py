"""How processes are asked to stop and end with their parent; what is a failure of storage; their logs and their machine."""

import concurrent.futures
import contextlib
import errno
import fcntl
import itertools
import os
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tba_jax.run import processes

ROOT = Path(__file__).parent.parent.parent

# The main thread is inside one long call into C, as it is while a compiled program runs.
CALL = """
import hashlib, sys
from tba_jax.run import processes
stop = {asked}
print("ready", flush=True)
hashlib.pbkdf2_hmac("sha256", b"x", b"y", {iterations})
print("finished, asked:", stop(), flush=True)
"""


def start(program: str, **options) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True, **options)


@pytest.mark.parametrize(
    "asked, iterations, number, said, code",
    [
        ("processes.StopSignal(patience_seconds=0.1)", 1_000_000_000, signal.SIGTERM, "", 0),  # many minutes
        ("processes.stop_at_once()", 1_000_000_000, signal.SIGINT, "", processes.STOPPED),
        ("processes.StopSignal(patience_seconds=60.0)", 100_000, signal.SIGTERM, "finished, asked: True\n", 0),
    ],
    ids=["abandoned", "at once", "finished"],
)
def test_a_signal_lets_a_call_end_for_so_long_as_its_patience_lasts(asked, iterations, number, said, code):
    process = start(CALL.format(asked=asked, iterations=iterations))
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    assert process.communicate(timeout=60)[0] == said and process.returncode == code


def test_a_later_signal_ends_the_process_and_one_that_comes_at_once_does_not():
    """Slurm signals all processes of a task: a role has its request from there and from its wrapper."""
    program = "import time\nfrom tba_jax.run import processes\nprocesses.SAME_REQUEST_SECONDS = 0.5\n"
    program += "stop = processes.StopSignal()\nprint('ready', flush=True)\nwhile not stop(): time.sleep(0.01)\n"
    program += "time.sleep(0.2)\nprint('asked', flush=True)\ntime.sleep(60)"
    process = start(program)
    assert process.stdout.readline() == "ready\n"
    for _ in range(2):
        process.send_signal(signal.SIGTERM)
        time.sleep(0.05)
    assert process.stdout.readline() == "asked\n"
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
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
of_linux = pytest.mark.skipif(sys.platform != "linux", reason="the kernel of Linux alone ends children with their parent")


def is_running(pid: int) -> bool:
    """A zombie is not: nobody may be there to wait for it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@of_linux
def test_children_die_with_their_parent():
    """One of them is stopped: no thread of it runs, and the kernel alone can end it."""
    parent = start(PARENT)
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


@of_linux
def test_a_child_whose_parent_died_before_it_held_ends():
    """The pipe is still open: somebody else holds its other end."""
    lifeline = processes.Lifeline()
    environment = os.environ | lifeline.child_environment(()) | {"TBA_JAX_PARENT": "1"}
    child = start(CHILD, env=environment, pass_fds=lifeline.child_fds)
    child.communicate(timeout=20)
    assert child.returncode == -signal.SIGKILL
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
    "error, is_one",
    [
        *((OSError(number, "x"), True) for number in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.ESTALE)),
        # As tensorstore words it, without a number; and as the log wraps that.
        (ValueError("RESOURCE_EXHAUSTED: writing: [OS error 28: ENOSPC No space left on device]"), True),
        (OSError("append of rows 0 to 15 failed: FAILED_PRECONDITION: File too large"), True),
        (OSError("gs://bucket/run/config.json: UNAVAILABLE: the server is away"), True),
        *((chained(OSError(errno.EIO, "x"), RuntimeError("the checkpoint failed"), kept=kept), True) for kept in (True, None)),
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 2147483648 bytes"), False),
        (FileNotFoundError(errno.ENOENT, "x"), False),
        (chained(OSError(errno.EROFS, "Read-only file system"), ValueError("bad setting"), kept=False), False),
    ],
    ids=repr,
)
def test_what_is_a_failure_of_storage(error, is_one):
    assert processes.is_storage_failure(error) == is_one


@contextlib.contextmanager
def files_of_at_most(size: int):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


# Writes numbered lines from a child too, to whatever its output is, and bounds its log meanwhile. A line is one write, so that
# lines of two processes do not mix, whatever PYTHONUNBUFFERED says. 25,000 bytes are two cuts.
WRITES = """
import os, subprocess, sys, time
from pathlib import Path
from tba_jax.run import processes
processes.LOOK_SECONDS = 0.01
processes.keep_bounded(Path(sys.argv[1]), megabytes=0.01, keep=2)
writes = "import os, time\\nfor n in range(180): os.write(1, b'child %d %s\\\\n' % (n, b'x' * 60)); time.sleep(.001)"
child = subprocess.Popen([sys.executable, "-c", writes])
for n in range(180):
    os.write(1, b"role %d %s\\n" % (n, b"x" * 60))
    time.sleep(0.001)
child.wait()
print("error: the last words", flush=True)
"""


def test_a_log_is_bounded_while_a_role_and_its_child_write_to_it(tmp_path):
    path = tmp_path / "trainer.log"
    with open(path, "wb") as output:
        command = [sys.executable, "-c", WRITES, str(tmp_path)]
        assert subprocess.run(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, check=False).returncode == 0
    logs = [processes.older(path, 2), processes.older(path, 1), path]
    assert {log.name for log in tmp_path.iterdir()} - {"trainer.log.draft"} == {log.name for log in logs}
    assert max(log.stat().st_size for log in logs) < 20_000, "the 25,000 bytes of the run are not in one file"
    text = "".join(log.read_text() for log in logs)
    assert "\0" not in text
    for who in ("role", "child"):
        numbers = [int(number) for number in re.findall(rf"^{who} (\d+) x{{60}}$", text, re.MULTILINE)]
        assert numbers == sorted(set(numbers)) and numbers[-1] == 179
        # Each of the cuts may cost what was written at that moment, many lines on a loaded machine; none is lost between two.
        assert sum(after > before + 1 for before, after in itertools.pairwise(numbers)) <= 3
    assert processes.last_lines(path)[-1] == "error: the last words"


def test_older_logs_move_on_the_oldest_goes_and_a_full_disk_changes_nothing(tmp_path):
    path = tmp_path / "searcher-0.log"
    for number in range(5):
        path.write_text(f"{number}" * 25)
        path.chmod(0o600)
        assert processes.rotate(path, limit=10, keep=3)
    assert path.read_text() == "" and not processes.rotate(path, limit=10, keep=3)
    assert [processes.older(path, number).read_text() for number in (1, 2, 3)] == ["4" * 20, "3" * 20, "2" * 20]
    assert processes.older(path, 1).stat().st_mode & 0o777 == 0o600
    path.write_text("words " * 1000)
    with files_of_at_most(1000), pytest.raises(OSError, match="File too large"):
        processes.rotate(path, limit=5000, keep=3)
    assert path.read_text() == "words " * 1000
    assert {log.name for log in tmp_path.iterdir()} == {path.name, *(f"{path.name}.{n}" for n in (1, 2, 3))}


def test_of_two_roles_with_one_log_one_sets_it_aside(tmp_path):
    path = tmp_path / "searchers.log"
    path.write_text("words " * 10)
    with open(path, "rb+") as other, concurrent.futures.ThreadPoolExecutor() as threads:
        fcntl.flock(other, fcntl.LOCK_EX)
        second = threads.submit(processes.rotate, path, limit=10, keep=3)
        assert not concurrent.futures.wait([second], timeout=0.2).done
        other.truncate(0)
        fcntl.flock(other, fcntl.LOCK_UN)
        assert second.result() is False and [*tmp_path.iterdir()] == [path]


def test_last_lines_are_read_from_the_end_and_from_the_log_before(tmp_path, monkeypatch):
    path = tmp_path / "trainer.log"
    processes.older(path, 1).write_text("first\nerror: the reason\n")
    path.write_text("a thread ends\n")
    assert processes.last_lines(path) == ["first", "error: the reason", "a thread ends"]
    monkeypatch.setattr(processes, "TAIL_BYTES", 40)
    path.write_bytes(b"x" * 1000 + b"\nerror: \xff told\n")
    assert processes.last_lines(path)[-1] == "error: \N{REPLACEMENT CHARACTER} told"


@pytest.mark.parametrize(
    "groups, file, is_ours",
    [
        ("0::/job/step\n", "job/memory.max", True),
        ("0::/job/step\n", "job/step/memory.max", True),
        ("4:cpu:/x\n7:memory:/job\n", "memory/job/memory.limit_in_bytes", True),
        ("4:cpu:/job\n", "memory/job/memory.limit_in_bytes", False),
    ],
)
def test_memory_is_that_of_the_machine_or_of_a_control_group(groups, file, is_ours, tmp_path):
    (tmp_path / "cgroup").write_text(groups)
    path, whole = tmp_path / "fs" / file, processes.memory()
    path.parent.mkdir(parents=True)
    for text, expected in ((f"{5 << 20}\n", 5 << 20 if is_ours else whole), ("max\n", whole)):
        path.write_text(text)
        assert processes.memory(groups=tmp_path / "cgroup", root=tmp_path / "fs") == expected


def test_a_type_of_cpu_is_its_model_and_its_instructions(tmp_path):
    def named(lines: str) -> str:
        (tmp_path / "cpuinfo").write_text(lines)
        return processes.cpu_type(list_file=tmp_path / "cpuinfo")

    new = named("model\t\t: 143\nflags\t\t: avx2 avx512f\ncpu MHz\t\t: 2100.0")
    assert new == named("model\t\t: 143\nflags\t\t: avx2 avx512f\ncpu MHz\t\t: 900.0")
    assert len({new, *map(named, ("model: 143\nflags: avx2", "model: 85\nflags: avx2", "Features: asimd"))}) == 4
