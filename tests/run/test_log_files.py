"""Text logs that are set aside when they are large, while processes write to them."""

import contextlib
import itertools
import re
import resource
import subprocess
import sys
import time

import pytest

from tba_jax.run import log_files

# Writes numbered lines from a child too, to whatever its output is, and bounds its log meanwhile. A line is one write, so that
# lines of two processes do not mix, whatever PYTHONUNBUFFERED says. 25,000 bytes are two cuts.
PROGRAM = """
import os, subprocess, sys, time
from pathlib import Path
from tba_jax.run import log_files
log_files.LOOK_SECONDS = 0.01
log_files.keep_bounded(Path(sys.argv[1]), megabytes=0.01, keep=2)
writes = "import os, time\\nfor n in range(180): os.write(1, b'child %d %s\\\\n' % (n, b'x' * 60)); time.sleep(.001)"
child = subprocess.Popen([sys.executable, "-c", writes])
for n in range(180):
    os.write(1, b"role %d %s\\n" % (n, b"x" * 60))
    time.sleep(0.001)
child.wait()
print("error: the last words", flush=True)
"""


def run(folder, path) -> subprocess.Popen:
    path.parent.mkdir(exist_ok=True)
    with open(path, "wb") as output:
        return subprocess.Popen([sys.executable, "-c", PROGRAM, str(folder)], stdout=output, stderr=subprocess.STDOUT)


def logs_of(path) -> list:
    return sorted(path.parent.glob(f"{path.name}*"))


def test_a_log_is_bounded_while_a_role_and_its_child_write_to_it(tmp_path):
    """It is opened as a shell may, where who writes keeps its place."""
    path, sizes = tmp_path / "logs" / "trainer.log", [0]
    role = run(tmp_path / "logs", path)
    while role.poll() is None:
        with contextlib.suppress(FileNotFoundError):  # it has just moved on
            sizes += [log.stat().st_size for log in logs_of(path)]
        time.sleep(0.01)
    assert role.returncode == 0, path.read_text()
    names = {"trainer.log", "trainer.log.1", "trainer.log.2"}
    assert {log.name for log in logs_of(path)} - {"trainer.log.draft"} == names
    assert max(sizes) < 30_000, "the 25,000 bytes of the run are not in one file"
    text = "".join(each.read_text() for each in (log_files.older(path, 2), log_files.older(path, 1), path))
    assert "\0" not in text
    for who in ("role", "child"):
        numbers = [int(number) for number in re.findall(rf"^{who} (\d+) x{{60}}$", text, re.MULTILINE)]
        assert numbers == sorted(set(numbers)) and numbers[-1] == 179
        # Each of the cuts may cost what was written at that moment, many lines on a loaded machine; none is lost between two.
        assert sum(after > before + 1 for before, after in itertools.pairwise(numbers)) <= 3
    assert log_files.last_lines(path)[-1] == "error: the last words"


def test_output_that_is_no_log_of_the_run_is_left_alone(tmp_path):
    (tmp_path / "of_the_user.log").write_text("text")
    (tmp_path / "logs").mkdir()
    with open(tmp_path / "of_the_user.log") as output:
        assert log_files._log_of(output.fileno(), tmp_path / "logs") is None
        assert log_files._log_of(output.fileno(), tmp_path) == tmp_path / "of_the_user.log"


def test_older_logs_move_on_and_the_oldest_goes(tmp_path):
    path = tmp_path / "searcher-0.log"
    for number in range(5):
        path.write_text(f"{number}" * 25)
        path.chmod(0o600)
        assert log_files.rotate(path, limit=10, keep=3)
    assert path.read_text() == "" and not log_files.rotate(path, limit=10, keep=3)
    assert [log_files.older(path, number).read_text() for number in (1, 2, 3)] == ["4" * 20, "3" * 20, "2" * 20]
    assert {log.name for log in tmp_path.iterdir()} == {path.name, *(f"{path.name}.{n}" for n in (1, 2, 3))}
    assert log_files.older(path, 1).stat().st_mode & 0o777 == 0o600


def test_a_full_disk_leaves_the_log_as_it_is(tmp_path):
    path, before = tmp_path / "trainer.log", resource.getrlimit(resource.RLIMIT_FSIZE)
    path.write_text("words " * 1000)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            log_files.rotate(path, limit=5000, keep=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert path.read_text() == "words " * 1000 and logs_of(path) == [path]


def test_last_lines_are_read_from_the_end_and_from_the_log_before(tmp_path, monkeypatch):
    path = tmp_path / "trainer.log"
    log_files.older(path, 1).write_text("first\nerror: the reason\n")
    path.write_text("a thread ends\n")
    assert log_files.last_lines(path) == ["first", "error: the reason", "a thread ends"]
    monkeypatch.setattr(log_files, "TAIL_BYTES", 40)
    path.write_bytes(b"x" * 1000 + b"\nerror: \xff told\n")
    assert log_files.last_lines(path)[-1] == "error: \N{REPLACEMENT CHARACTER} told"
