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

# A role that notes each of its lives, and ends by the next of the codes that it is given; "done" ends the run.
ROLE = 'folder=$1; echo >> "$folder/lives"; shift 2; n=$(wc -l < "$folder/lives"); code="${!n}"; '
ROLE += '[[ $code != *done ]] || touch "$folder/finished.json"; exit "${code%done}"'


@pytest.fixture
def run(tmp_path, monkeypatch):
    """run(*command, deaths=N, pod=True) runs a role in this process. The folder holds a run."""
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(restart, "FIRST_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(restart, "LOOK_SECONDS", 0.01)

    def start(*command, deaths=0, pod=False) -> int:
        given = [f"--workdir={tmp_path}", f"--deaths={deaths}", f"--end={tmp_path / 'end'}", *["--pod"] * pod]
        return restart.main([*given, *command])

    return start


def role(folder: Path, *codes: object, kind: str = "trainer") -> list[str]:
    return ["bash", "-c", ROLE, "role", str(folder), f"--role={kind}", *map(str, codes)]


def lives(folder: Path) -> int:
    return len((folder / "lives").read_text())


def ends(folder: Path) -> list[str]:
    """What the wrapper said to a launcher that sees one code for several processes."""
    return [path.read_text().strip() for path in folder.glob("end.*")]


@pytest.mark.parametrize(
    "kind, pod, deaths, codes, expected",
    [
        *[("trainer", False, 0, codes, codes[-1]) for codes in [(0,), (3, 3, 0), (3, 4), (2,), (5,), (9,), (7, 7, 0)]],
        *[("trainer", False, 2, codes, codes[-1]) for codes in [(1, 6, 139), (6, 2, 2), (6, 3, 6, 0)]],
        ("trainer", True, 0, (3, 6), 6),  # another pod takes the place of this one
        ("trainer", True, 0, (2,), 1),  # of a run that exists: it may pass
        ("searcher", True, 0, (5,), 0),  # rests
        ("evaluator", True, 1, ("1done", 1), 0),  # after the training
    ],
    ids=str,
)
def test_a_role_is_run_again_as_often_as_its_codes_allow(run, tmp_path, kind, pod, deaths, codes, expected, capsys):
    assert run(*role(tmp_path, *codes, kind=kind), deaths=deaths, pod=pod) == expected and lives(tmp_path) == len(codes)
    reason = "storage failed" if codes[0] in (3, 7) else f"ended with code {codes[0]}".removesuffix("done")
    assert (f"{reason}; running the role again" in capsys.readouterr().err) == (len(codes) > 1)
    assert ends(tmp_path) == [f"code {codes[-1]}"] * bool(codes[-1])


@pytest.mark.parametrize(
    ("flags", "variables", "process"),
    [
        (["--role=trainer", "--coordinator=a:1", "--processes=2", "--process=1"], {}, 1),
        (["--role=trainer"], {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}, 3),
        (["--role=trainer", "--coordinator=a:1"], {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}, 3),
        (["--role=trainer", "--processes=1"], {}, None),
        (["--role=searcher", "--processes=2"], {}, None),
    ],
    ids=str,
)
def test_a_process_that_jax_ended_is_run_again_with_one_sentence(run, tmp_path, monkeypatch, capsys, flags, variables, process):
    """A trainer of one process that aborts has died by itself."""
    sizes = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
    for name, value in (variables | (sizes if variables else {})).items():
        monkeypatch.setenv(name, value)
    assert run("bash", "-c", "kill -ABRT $$", "role", *flags) == (134 if process is None else restart.PEER_LOST)
    said = capsys.readouterr().err
    assert (f"process {process} of this trainer was ended by JAX" in said) == (process is not None)


@pytest.mark.parametrize("mode, kept", [(None, True), (0o700, True), (0o777, False)], ids=str)
def test_compiled_programs_lie_in_a_folder_of_this_user_alone(run, tmp_path, monkeypatch, mode, kept):
    """Roles execute them."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    folder = tmp_path / f"tba_jax-{os.getuid()}-programs"
    if mode is not None:
        folder.mkdir()
        folder.chmod(mode)
    say = ["bash", "-c", f'echo "$JAX_COMPILATION_CACHE_DIR" > {tmp_path}/told']
    assert run(*say) == 0 and (tmp_path / "told").read_text() == (f"{folder}\n" if kept else "\n")
    assert folder.stat().st_mode & 0o777 == (mode or 0o700)
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "/elsewhere")
    assert run(*say) == 0 and (tmp_path / "told").read_text() == "/elsewhere\n"


@pytest.mark.parametrize("code", [1, 3])
def test_a_role_whose_storage_failed_waits_until_its_run_is_there(run, tmp_path, code, capsys):
    config, seen = tmp_path / "config.json", []
    config.unlink()
    back = threading.Timer(0.1, lambda: (seen.append(lives(tmp_path)), config.write_text("{}")))
    back.start()
    assert run(*role(tmp_path, code, 0), deaths=1) == 0
    back.join()
    assert seen == [2 if code == 1 else 1] and ("holds no run at the moment" in capsys.readouterr().err) == (code != 1)


def test_a_run_that_stays_away_is_waited_for_as_long_as_waiting_may_help(run, tmp_path, monkeypatch):
    (tmp_path / "config.json").unlink()
    monkeypatch.setitem(restart.PATIENCE_SECONDS, 7, 0.1)
    assert run(*role(tmp_path, 7, 0)) == 7 and lives(tmp_path) == 1


@pytest.mark.parametrize("pod", [False, True])
def test_a_role_that_is_asked_to_stop_is_not_run_again(run, tmp_path, pod):
    asks = "trap 'exit 0' TERM; kill -TERM $PPID; while :; do sleep 0.02; done"
    assert run("sh", "-c", asks, deaths=9, pod=pod) == (143 if pod else 0), "another pod takes the place of one that is not done"
    assert (
        ends(tmp_path) == ["stopped"] and run("sh", "-c", asks.replace("exit 0", "exit 4")) == 4 and ends(tmp_path) == ["stopped"]
    )
    assert run("sh", "-c", "exit 130", pod=pod) == 0 and ends(tmp_path) == ["stopped"], "asked by another process of its trainer"


@pytest.mark.parametrize(
    ("role", "code", "state", "expected"),
    [
        ("trainer", 2, {"is_new": True}, 2),
        ("trainer", 2, {}, 1),
        *[("trainer", code, {"asked": True}, 143) for code in (0, 130, 2)],
        *[("trainer", code, {"asked": True}, code) for code in (3, 4, 6)],
        *[("trainer", code, {}, code) for code in (0, 4, 6, 7, 130)],
        ("searcher", 7, {}, 7),
        ("evaluator", 9, {"is_finished": True}, 0),
        ("evaluator", 9, {"is_finished": True, "asked": True}, 9),
    ],
)
def test_what_a_pod_ends_with(role, code, state, expected):
    nothing = {"asked": False, "is_new": False, "is_finished": False}
    assert restart.pod_code(code, role=role, **nothing | state) == expected


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
        ("searcher", -9, False, 21, Verdict.GIVEN_UP),
    ],
)
def test_verdicts(kind, code, is_new, deaths, expected):
    lives = Lives(kind, max_restarts=20)
    if not is_new:
        lives.end(9, began=0.0, now=1.0)
    lives.deaths = deaths - 1
    assert lives.end(code, began=0.0, now=1.0) is expected


def test_each_way_of_storage_to_refuse_is_waited_for_so_long_as_waiting_may_help():
    """An hour without an answer leaves the ten minutes of storage that forbids then."""
    for code, last in ((restart.STORAGE_FAILED, 7 * 86400.0), (restart.STORAGE_FORBIDS, 600.0)):
        lives = Lives("trainer", max_restarts=0)
        ends = [lives.end(code, began=at, now=at + 1.0) for at in (0.0, last - 1.0, last)]
        assert ends == [Verdict.AGAIN, Verdict.AGAIN, Verdict.ENDS] and not lives.deaths
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


def test_a_ctrl_c_of_the_terminal_asks_the_role_once(tmp_path):
    """The terminal's signal goes to a whole process group; a second one would end a role in the middle of its batch."""
    counts = "for i in INT TERM; do trap 'echo asked' $i; done; echo ready; sleep 0.2; sleep 0.1"
    wrapper = [sys.executable, "-m", "tba_jax.run.restart", f"--workdir={tmp_path}", "bash", "-c", counts]
    process = subprocess.Popen(wrapper, cwd=tiny_run.ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    os.killpg(process.pid, signal.SIGINT)
    said, _ = process.communicate(timeout=20)
    assert (process.returncode, said) == (0, "asked\n")
