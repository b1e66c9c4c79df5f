"""A role whose storage fails, or that dies, is run again; what follows from each exit code, and for how long."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tba_jax.run import restart
from tba_jax.run.restart import Lives, Verdict
from tests.support import tiny_run

# A role that notes each of its lives, and ends by the next of the codes that it is given.
ROLE = 'folder=$1; echo >> "$folder/lives"; shift; n=$(wc -l < "$folder/lives"); exit "${!n}"'


@pytest.fixture
def run(tmp_path, monkeypatch):
    """run(*command, deaths=N) runs a role in this process, whose handlers of signals come back. The folder holds a run."""
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(restart, "FIRST_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(restart, "LOOK_SECONDS", 0.01)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield lambda *command, deaths=0: restart.run([*command], workdir=str(tmp_path), deaths=deaths)
    for number, handler in before.items():
        signal.signal(number, handler)


def lives(folder: Path) -> int:
    return len((folder / "lives").read_text())


@pytest.mark.parametrize(
    "codes, deaths",
    [
        *[(codes, 0) for codes in [(0,), (3, 3, 0), (3, 4), (2,), (5,), (9,), (7, 7, 0)]],
        *[(codes, 2) for codes in [(6, 137, 0), (1, 6, 139), (6, 2, 2), (3, 2, 0), (1, 4), (134, 5), (1, 130), (6, 3, 6, 0)]],
    ],
    ids=str,
)
def test_a_role_is_run_again_as_often_as_its_codes_allow(run, tmp_path, codes, deaths, capsys):
    code = run("bash", "-c", ROLE, "role", tmp_path, *map(str, codes), deaths=deaths)
    assert code == codes[-1] and lives(tmp_path) == len(codes)
    reason = "storage failed" if codes[0] in (3, 7) else f"ended with code {codes[0]}"
    assert (f"{reason}; running the role again" in capsys.readouterr().err) == (len(codes) > 1)


@pytest.mark.parametrize("code", [1, 3])
def test_a_role_whose_storage_failed_waits_until_its_run_is_there(run, tmp_path, code, capsys):
    """One that died otherwise need not see a run: perhaps there was none yet."""
    config, seen = tmp_path / "config.json", []
    config.unlink()
    back = threading.Timer(0.2, lambda: (seen.append(lives(tmp_path)), config.write_text("{}")))
    back.start()
    assert run("bash", "-c", ROLE, "role", tmp_path, str(code), "0", deaths=1) == 0
    back.join()
    assert seen == [2 if code == 1 else 1] and ("holds no run at the moment" in capsys.readouterr().err) == (code != 1)


def test_a_run_that_stays_away_is_waited_for_as_long_as_waiting_may_help(run, tmp_path, monkeypatch):
    (tmp_path / "config.json").unlink()
    monkeypatch.setitem(restart.PATIENCE_SECONDS, 7, 0.1)
    assert run("bash", "-c", ROLE, "role", tmp_path, "7", "0") == 7 and lives(tmp_path) == 1


def test_a_role_that_is_asked_to_stop_is_not_run_again(run):
    asks = "trap 'exit 6' TERM; kill -TERM $PPID; while :; do sleep 0.02; done"
    assert run("sh", "-c", asks, deaths=9) == 6


@pytest.mark.parametrize(
    "kind, code, is_new, deaths, expected",
    [
        ("trainer", 2, True, 1, Verdict.ENDS),
        ("searcher", 2, True, 1, Verdict.ENDS),
        ("evaluator", 2, False, 20, Verdict.AGAIN),
        ("reference", 3, True, 99, Verdict.AGAIN),
        ("trainer", 4, False, 1, Verdict.ENDS),
        ("searcher", 4, True, 20, Verdict.AGAIN),
        ("searcher", 5, False, 1, Verdict.ENDS),
        ("", 4, False, 1, Verdict.ENDS),
        ("trainer", -9, False, 20, Verdict.AGAIN),
        ("trainer", -9, False, 21, Verdict.GIVEN_UP),
        ("searcher", -9, False, 21, Verdict.GIVEN_UP),
    ],
)
def test_verdicts(kind, code, is_new, deaths, expected):
    assert restart.judge(kind, code, is_new=is_new, deaths=deaths, max_restarts=20) is expected


@pytest.mark.parametrize("code, last", [(restart.STORAGE_FAILED, 7 * 86400), (restart.STORAGE_FORBIDS, 600)])
def test_storage_is_waited_for_so_long_as_waiting_may_help(code, last):
    lives = Lives("trainer", max_restarts=0)
    ends = [lives.end(code, began=at, now=at + 1.0) for at in (0.0, last - 1.0, last)]
    assert ends == [Verdict.AGAIN, Verdict.AGAIN, Verdict.ENDS] and not lives.deaths


def test_each_way_to_refuse_has_its_own_time():
    """An hour without an answer leaves the ten minutes of storage that forbids then."""
    lives, found = Lives("", max_restarts=9), []
    for code, at in [(3, 0.0), (3, 3600.0), (7, 3700.0), (7, 3800.0), (9, 3900.0), (7, 4000.0)]:
        lives.end(code, began=at, now=at + 1.0)
        found.append(lives.seconds)
    assert found == [1.0, 3601.0, 1.0, 101.0, 0.0, 1.0]
    lives.end(7, began=9000.0, now=9001.0, has_worked=True)
    assert lives.seconds == 1.0


@pytest.mark.parametrize("kind", ["trainer", "searcher"])
def test_deaths_are_counted_up_to_a_long_life_and_pauses_grow_to_a_minute_until_there_is_work(kind):
    """Of a role that joins a run, a life that did some work is as good as a long one."""
    lives = Lives(kind, max_restarts=99)

    def pauses(times: int, **end: bool) -> list[float]:
        return [(lives.end(9, began=0.0, now=1.0, **end), lives.pause)[1] for _ in range(times)]

    assert pauses(9) == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0] and lives.deaths == 9
    assert pauses(2, has_worked=True) == [0.5, 0.5] and lives.deaths == (11 if kind == "trainer" else 1)
    before = lives.deaths
    for pause in (1.0, 2.0):
        lives.end(3, began=0.0, now=1.0)
        assert lives.pause == pause and lives.deaths == before
    lives.end(9, began=0.0, now=600.0)
    assert lives.pause == 0.5 and lives.deaths == 1


@pytest.mark.parametrize("flags", [["--workdir=x"], ["true"], ["--workdir=x", "--deaths=-1", "true"]], ids=str)
def test_what_it_cannot_run_is_refused(flags, capsys):
    with pytest.raises(SystemExit, match="2"):
        restart.main(flags)
    assert len(capsys.readouterr().err.splitlines()) == 1


COUNTS = "for i in INT TERM; do trap 'echo asked' $i; done; echo ready; sleep 0.3; sleep 0.2"


def test_a_ctrl_c_of_the_terminal_asks_the_role_once(tmp_path):
    """The terminal's signal goes to a whole process group; a second one would end a role in the middle of its batch."""
    wrapper = [sys.executable, "-m", "tba_jax.run.restart", f"--workdir={tmp_path}", "bash", "-c", COUNTS]
    process = subprocess.Popen(wrapper, cwd=tiny_run.ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    os.killpg(process.pid, signal.SIGINT)
    said, _ = process.communicate(timeout=20)
    assert (process.returncode, said) == (0, "asked\n")
