"""A role whose storage fails, or that dies, is run again; what follows from each exit code, and for how long."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tba_jax.run import restart
from tba_jax.run.restart import Verdict

ROOT = Path(__file__).parent.parent.parent
# A role that notes each of its lives, and ends by the next of the codes that it is given.
ROLE = 'folder=$1; echo >> "$folder/lives"; shift; n=$(wc -l < "$folder/lives"); exit "${!n}"'


def start(workdir: Path, *command: str, deaths: int) -> subprocess.Popen:
    wrapper = [sys.executable, "-m", "tba_jax.run.restart", f"--workdir={workdir}", f"--deaths={deaths}"]
    return subprocess.Popen([*wrapper, *command], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def again(workdir: Path, *codes: int, deaths: int = 0) -> subprocess.Popen:
    return start(workdir, "bash", "-c", ROLE, "role", str(workdir), *map(str, codes), deaths=deaths)


@pytest.mark.parametrize("codes", [(0,), (3, 3, 0), (3, 4), (2,), (5,), (9,), (7, 7, 0)], ids=str)
def test_a_role_is_run_again_as_long_as_its_storage_fails(tmp_path, codes):
    (tmp_path / "config.json").write_text("{}")
    process = again(tmp_path, *codes)
    process.communicate(timeout=30)
    assert process.returncode == codes[-1] and len((tmp_path / "lives").read_text()) == len(codes)


@pytest.mark.parametrize(
    "codes", [(6, 137, 0), (1, 6, 139), (6, 2, 0), (6, 2, 2), (3, 2, 0), (1, 4), (134, 5), (1, 130), (6, 3, 6, 0)], ids=str
)
def test_a_role_that_dies_is_run_again_so_often_as_it_is_told(tmp_path, codes):
    (tmp_path / "config.json").write_text("{}")
    process = again(tmp_path, *codes, deaths=2)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == codes[-1] and len((tmp_path / "lives").read_text()) == len(codes)
    reason = "storage failed" if codes[0] == 3 else f"ended with code {codes[0]}"
    assert f"{reason}; running the role again" in errors


def test_bad_input_of_the_first_life_is_the_end(tmp_path):
    process = again(tmp_path, 2, 0, deaths=2)
    process.communicate(timeout=30)
    assert process.returncode == 2


def test_a_role_that_died_before_there_was_a_run_need_not_see_one(tmp_path):
    process = again(tmp_path, 1, 0, deaths=1)
    process.communicate(timeout=30)
    assert process.returncode == 0


@pytest.mark.parametrize("code", [3, 7])
def test_a_role_is_not_run_again_before_its_run_is_there(tmp_path, code):
    process = again(tmp_path, code, 0)
    time.sleep(1.0)
    assert process.poll() is None and (tmp_path / "lives").read_text() == "\n"
    (tmp_path / "config.json").write_text("{}")
    _, errors = process.communicate(timeout=70)
    assert process.returncode == 0 and "holds no run at the moment" in errors


@pytest.mark.parametrize("code", [3, 6])
def test_a_role_that_is_asked_to_stop_is_not_run_again(tmp_path, code):
    waits = f"trap 'exit {code}' TERM; echo ready; while :; do sleep 0.1; done"
    process = start(tmp_path, "bash", "-c", waits, deaths=9)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=20)
    assert process.returncode == code


def test_pauses_grow_to_a_minute():
    assert [restart.pause_seconds(n) for n in (1, 2, 3, 8, 9, 1000)] == [0.5, 1.0, 2.0, 60.0, 60.0, 60.0]


@pytest.mark.parametrize(
    "kind, code, is_new, deaths, expected",
    [
        ("trainer", 2, True, 1, Verdict.ENDS),
        ("searcher", 2, True, 1, Verdict.ENDS),
        ("trainer", 2, False, 1, Verdict.AGAIN),
        ("evaluator", 2, False, 99, Verdict.AGAIN),
        ("trainer", 3, True, 99, Verdict.AGAIN_UNCOUNTED),
        ("reference", 3, True, 99, Verdict.AGAIN_UNCOUNTED),
        ("trainer", 4, False, 1, Verdict.ENDS),
        ("searcher", 4, True, 99, Verdict.AGAIN),
        ("searcher", 5, False, 1, Verdict.ENDS),
        ("", 4, False, 1, Verdict.ENDS),
        ("trainer", -9, False, 20, Verdict.AGAIN),
        ("trainer", -9, False, 21, Verdict.ENDS),
        ("searcher", -9, False, 999, Verdict.AGAIN),
    ],
)
def test_verdicts(kind, code, is_new, deaths, expected):
    assert restart.judge(kind, code, is_new=is_new, deaths=deaths, max_restarts=20) is expected


@pytest.mark.parametrize("code, last", [(restart.STORAGE_FAILED, 7 * 86400), (restart.STORAGE_FORBIDS, 600)])
def test_storage_is_waited_for_so_long_as_waiting_may_help(code, last):
    for kind in ("trainer", "searcher", "evaluator"):
        verdicts = [restart.judge(kind, code, is_new=True, deaths=99, max_restarts=0, seconds=last + more) for more in (0, 1)]
        assert verdicts == [Verdict.AGAIN_UNCOUNTED, Verdict.ENDS]


@pytest.mark.parametrize(
    "flags", [["--workdir=x"], ["true"], ["--workdir=x", "--deaths=-1", "true"], ["--patience=3", "true"]], ids=str
)
def test_what_it_cannot_run_is_refused(flags, capsys):
    with pytest.raises(SystemExit, match="2"):
        restart.main(flags)
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_each_way_to_refuse_has_its_own_time():
    """An hour without an answer leaves the ten minutes of storage that forbids then."""
    refusals = restart.Refusals()
    codes = [(3, 0.0), (3, 3600.0), (7, 3700.0), (7, 3800.0), (9, 3900.0), (7, 4000.0)]
    assert [refusals.seconds(code, began=at, now=at + 1.0) for code, at in codes] == [1.0, 3601.0, 1.0, 101.0, 0.0, 1.0]
    refusals.forget()
    assert refusals.seconds(7, began=9000.0, now=9001.0) == 1.0


COUNTS_SIGNALS = """
import signal, time
seen = []
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, frame: seen.append(number))
print("ready", flush=True)
while not seen:
    time.sleep(0.05)
time.sleep(1.0)
print(len(seen), flush=True)
"""


def test_a_ctrl_c_of_the_terminal_asks_the_role_once(tmp_path):
    """The terminal's signal goes to a whole process group; a second one would end a role in the middle of its batch."""
    wrapper = [sys.executable, "-m", "tba_jax.run.restart", f"--workdir={tmp_path}", sys.executable, "-c", COUNTS_SIGNALS]
    process = subprocess.Popen(wrapper, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    os.killpg(process.pid, signal.SIGINT)
    said, _ = process.communicate(timeout=20)
    assert (process.returncode, said) == (0, "1\n")
