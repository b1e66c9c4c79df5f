"""How processes are asked to stop, what happens when they do not, and what counts as a failure of storage."""

import errno
import os
import signal
import subprocess
import sys
import time

import pytest

from tba_jax.run import processes

# The main thread is inside one long call into C, as it is while a compiled program runs.
PROGRAM = """
import hashlib, sys
from tba_jax.run import processes
stop = {asked}
print("ready", flush=True)
hashlib.pbkdf2_hmac("sha256", b"x", b"y", {iterations})
print("finished, asked:", stop(), flush=True)
"""


def start(asked: str, iterations: int) -> subprocess.Popen:
    """A process in its long call. Args: asked: how it asks for signals, an expression."""
    program = PROGRAM.format(asked=asked, iterations=iterations)
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("patience", [0.0, 0.5])
def test_what_takes_too_long_is_abandoned(patience):
    process = start(f"processes.StopSignal(patience_seconds={patience})", 1_000_000_000)  # many minutes
    begin = time.monotonic()
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=20)
    assert process.returncode == 0 and output == ""
    assert patience <= time.monotonic() - begin < patience + 5


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_what_has_nothing_to_keep_ends_at_once(number):
    process = start("processes.stop_at_once()", 1_000_000_000)
    process.send_signal(number)
    assert process.communicate(timeout=20) == ("", "") and process.returncode == processes.STOPPED


@pytest.mark.parametrize("patience", [None, 60.0])
def test_what_is_in_flight_is_finished(patience):
    process = start(f"processes.StopSignal(patience_seconds={patience})", 1_000_000)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0 and output == "finished, asked: True\n"


def test_a_second_signal_ends_the_process():
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import time\nfrom tba_jax.run import processes\nprocesses.StopSignal(patience_seconds=60.0)\n"
            "print('ready', flush=True)\nwhile True: time.sleep(0.01)",
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "ready\n"
    for _ in range(2):
        os.kill(process.pid, signal.SIGINT)
        time.sleep(0.3)
    process.communicate(timeout=20)
    assert process.returncode == 128 + signal.SIGINT


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


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_closed_standard_descriptor_is_the_null_device(closed, tmp_path):
    told = tmp_path / "told"
    shell = f'exec "$@" </dev/null >/dev/null 2>/dev/null {closed}'
    subprocess.run(["sh", "-c", shell, "sh", sys.executable, "-c", CLOSED, told], check=True)
    *streams, read, write = told.read_text().split()
    assert streams == ["/dev/null"] * 3 and min(int(read), int(write)) > 2
