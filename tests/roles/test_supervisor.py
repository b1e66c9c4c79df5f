"""When a role is started again, what ends a run, and that no process outlives the one that started it."""

import errno
import itertools
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tba_jax.roles import supervisor
from tba_jax.roles.placement import Placement
from tba_jax.roles.supervisor import Supervisor
from tba_jax.run import processes as processes_lib
from tba_jax.run import restart
from tba_jax.storage import layout, places
from tba_jax.storage.layout import RunDir

REPOSITORY = Path(__file__).parent.parent.parent


# A parent that starts two children on one lifeline. Each tells its process id, its cores and whether it has imported JAX.
CHILD = """
import os, subprocess, sys, time
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


def wait_until(condition, seconds: float) -> float:
    """Seconds until `condition()` holds; fails after `seconds`."""
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() - begin < seconds
        time.sleep(0.01)
    return time.monotonic() - begin


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM], ids=lambda end: end.name)
def test_children_die_with_their_parent(end):
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True, env=environment)
    children = []
    try:
        for _ in range(2):
            pid, *cores, jax_is_imported = parent.stdout.readline().split()
            children.append(int(pid))
            assert cores == [str(min(os.sched_getaffinity(0)))] and jax_is_imported == "False"
        time.sleep(0.2)
        assert parent.poll() is None and all(map(is_running, children))
        parent.send_signal(end)
        parent.wait()
        wait_until(lambda: not any(map(is_running, children)), 2.0)
    finally:
        parent.kill()
        for pid in filter(is_running, children):
            os.kill(pid, signal.SIGKILL)
        parent.stdout.close()


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel of Linux alone ends children with their parent")
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM], ids=lambda end: end.name)
def test_children_that_are_stopped_die_with_their_parent(end):
    """No thread of a stopped process runs: the kernel alone can end it."""
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True, env=environment)
    children = [int(parent.stdout.readline().split()[0]) for _ in range(2)]
    try:
        for pid in children:
            os.kill(pid, signal.SIGSTOP)
        parent.send_signal(end)
        parent.wait()
        wait_until(lambda: not any(map(is_running, children)), 2.0)
    finally:
        parent.kill()
        for pid in filter(is_running, children):
            os.kill(pid, signal.SIGKILL)
        parent.stdout.close()


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel of Linux alone ends children with their parent")
def test_a_child_whose_parent_died_before_it_held_ends(tmp_path):
    """The pipe is still open: somebody else holds its other end."""
    lifeline = processes_lib.Lifeline()
    told = lifeline.child_environment(()) | {"TBA_JAX_PARENT": "1"}
    command = [sys.executable, "-c", "import time\nfrom tba_jax.run import processes\nprocesses.hold()\ntime.sleep(60)"]
    environment = os.environ | told | {"PYTHONPATH": str(REPOSITORY)}
    child = subprocess.Popen(command, env=environment, pass_fds=lifeline.child_fds)
    try:
        assert child.wait(20) == -signal.SIGKILL
    finally:
        child.kill()
        lifeline.close()


def test_a_process_without_a_lifeline_just_runs(monkeypatch):
    monkeypatch.delenv("TBA_JAX_LIFELINE", raising=False)
    monkeypatch.delenv("TBA_JAX_CPUS", raising=False)
    cores = os.sched_getaffinity(0)
    processes_lib.hold()
    assert os.sched_getaffinity(0) == cores


# What a role does here instead of `python -m tba_jax.main`, by its first argument.
ROLE = """
import pathlib, re, sys, time
name, folder, run = sys.argv[1], pathlib.Path(sys.argv[2]), pathlib.Path(sys.argv[3])
kind = re.sub(r"^(trainer|evaluator|searcher)(-\\d)?-", "", name)
starts = len(list(folder.glob(name + "-start-*")))
(folder / f"{name}-start-{starts}").touch()
print(kind, "was here", flush=True)
if kind == "dies-once" and starts == 0:
    sys.exit(1)
if kind == "stops-once" and starts == 0:
    sys.exit(0)
if kind in ("dies-once", "stops-once"):
    (folder / "finished.json").write_text('{"step": 1}')
if kind == "always-dies":
    sys.exit(9)
if kind == "dies-then-bad-input" and starts < 3:
    sys.exit(2 if starts else 9)
if kind == "dies-then-bad-input":
    (run / "finished.json").write_text('{"step": 1}')
if kind == "dies-after-a-while" and starts < 2:
    time.sleep(0.3)
    sys.exit(9)
if kind == "full" and starts < 2:
    sys.exit(3)
if kind in ("dies-after-a-while", "full"):
    (run / "finished.json").write_text('{"step": 1}')
if kind == "always-full":
    print("error: storage failed", flush=True)
    sys.exit(3)
if kind == "bad-input":
    print("error: bad value")
    print("RuntimeError: a thread that was left alone", flush=True)
    sys.exit(2)
if kind == "compiles":
    time.sleep(3.0)
    metrics = folder / "metrics" / kind
    metrics.mkdir(parents=True)
    (metrics / "metrics.jsonl").write_text('{"step": 2}')
    time.sleep(600)
if kind.startswith("ends-now"):
    (folder / "finished.json").write_text('{"step": 1}')
    time.sleep(2.0 if kind == "ends-later" else 0.0)
if kind in ("stays", "trainer"):
    time.sleep(600)
if kind == "works-and-dies":
    metrics = folder / "metrics" / name
    metrics.mkdir(parents=True, exist_ok=True)
    with open(metrics / "metrics.jsonl", "a") as file:
        file.write('{"step": 1}')
    sys.exit(9)
if kind.startswith("code"):  # once, or each time, or so often; the end of the run afterwards
    code, _, times = kind.removeprefix("code").partition("x")
    if starts < int(times or 1):
        print(f"error: code {code}", flush=True)
        sys.exit(int(code))
    (folder / "finished.json").write_text('{"step": 1}')
"""


@pytest.fixture
def roles(tmp_path, monkeypatch):
    """roles(kinds, until, …) runs a supervisor over processes of these kinds; returns (exit code, starts of each kind)."""
    popen = subprocess.Popen
    started = []

    def instead_of_main(command, **settings):
        started.append(popen([sys.executable, "-c", ROLE, *command[3:]], **settings))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", instead_of_main)

    def run(kinds, *, until, max_restarts=2, stop=lambda: False, share_cores=False, run_dir=None):
        monkeypatch.setattr(restart, "FIRST_PAUSE_SECONDS", 0.05)

        processes = Supervisor(run_dir or RunDir(tmp_path), max_restarts=max_restarts, stop_seconds=5.0)
        placement = Placement(cpus=tuple(os.sched_getaffinity(0)) if share_cores else ())
        commands = {kind: ((kind, str(tmp_path), str(run_dir.root if run_dir else tmp_path)), placement) for kind in kinds}
        try:
            code = processes.run(commands, until=until, stop=stop)
        finally:
            processes.close()
        assert all(process.poll() is not None for process in started)
        return code, {kind: len(list(tmp_path.glob(f"{kind}-start-*"))) for kind in kinds}

    return run


@pytest.mark.parametrize("kind, starts", [("dies-once", 2), ("stops-once", 2), ("full", 3)])
def test_a_role_that_ends_too_early_is_started_again(roles, tmp_path, kind, starts):
    assert roles([kind, "stays"], until=[kind]) == (0, {kind: starts, "stays": 1})
    assert RunDir(tmp_path).log(kind).read_text() == f"{kind} was here\n" * starts


@pytest.mark.parametrize("share_cores, patience, waits", [(True, 60.0, True), (True, 0.2, False), (False, 60.0, False)])
def test_a_role_starts_when_the_one_on_its_cores_is_at_work(roles, tmp_path, monkeypatch, share_cores, patience, waits):
    monkeypatch.setattr(supervisor, "STARTING_SECONDS", patience)
    kinds = ["compiles", "ends-now"]
    assert roles(kinds, until=["ends-now"], share_cores=share_cores) == (0, {"compiles": 1, "ends-now": 1})
    assert (tmp_path / "metrics" / "compiles" / "metrics.jsonl").exists() == waits


def test_a_role_starts_when_the_one_on_its_cores_has_ended(roles):
    kinds = ["ends-now-a", "ends-now-b"]
    begin = time.monotonic()
    assert roles(kinds, until=kinds, share_cores=True) == (0, {"ends-now-a": 1, "ends-now-b": 1})
    assert time.monotonic() - begin < 30.0


@pytest.mark.parametrize("kinds", [["stays", "trainer"], ["trainer", "stays"]], ids=" ".join)
def test_the_trainer_waits_for_nobody_and_nobody_for_it(roles, kinds):
    ends = iter([False] * 5)
    code, starts = roles(kinds, until=kinds, share_cores=True, stop=lambda: next(ends, True))
    assert code == processes_lib.STOPPED and starts == {"stays": 1, "trainer": 1}


def test_bad_input_at_the_first_start_ends_the_run_by_its_last_words(roles, capsys):
    assert roles(["bad-input", "stays"], until=["stays"]) == (2, {"bad-input": 1, "stays": 1})
    assert capsys.readouterr().err == "bad-input (exit code 2): error: bad value\n"


def test_a_trainer_that_keeps_dying_ends_the_run(roles, capsys):
    assert roles(["trainer-always-dies"], until=["trainer-always-dies"], max_restarts=1) == (1, {"trainer-always-dies": 2})
    assert "it died 2 times, more than supervisor.max_restarts=1" in capsys.readouterr().err


def test_deaths_before_a_long_life_are_forgotten(roles, monkeypatch):
    monkeypatch.setattr(restart, "HEALTHY_SECONDS", 0.2)
    kind = "trainer-dies-after-a-while"
    assert roles([kind], until=[kind], max_restarts=1) == (0, {kind: 3})


@pytest.mark.parametrize("name", ["trainer", "searcher", "evaluator"])
def test_storage_that_fails_uses_up_no_restarts(roles, name):
    kind = f"{name}-code3x5"
    assert roles([kind], until=[kind], max_restarts=0) == (0, {kind: 6})


@pytest.mark.parametrize("end, starts", [("always-dies", 0), ("code4x6", 7), ("code2x0", 1)])
def test_a_searcher_that_dies_again_and_again_ends_no_run(roles, end, starts):
    """Another searcher is alive meanwhile."""
    kind, others = f"searcher-{end}", ["searcher-stays", "trainer-code3x6"]
    code, started = roles([kind, *others], until=others[1:], max_restarts=2)
    assert code == 0 and started["searcher-stays"] == 1
    assert started[kind] == starts if starts else started[kind] > 3


def test_bad_input_of_a_role_that_is_started_again_is_a_death(roles, capfd):
    kind = "searcher-dies-then-bad-input"
    assert roles([kind, "searcher-stays"], until=[kind]) == (0, {kind: 4, "searcher-stays": 1})


def test_numbers_that_are_not_finite_end_the_run_of_a_trainer_alone(roles, capsys):
    assert roles(["trainer-code4", "searcher-stays"], until=["trainer-code4"])[0] == processes_lib.NOT_FINITE
    assert capsys.readouterr().err == "trainer-code4 (exit code 4): error: code 4\n"


def test_the_run_ends_when_nobody_can_make_rows(roles, capsys):
    kinds = ["trainer-stays", "searcher-always-dies", "searcher-1-always-dies"]
    code, starts = roles(kinds, until=kinds[:1], max_restarts=1)
    assert code == 1 and min(starts[kind] for kind in kinds[1:]) >= 2
    assert "all searchers died more than supervisor.max_restarts=1 times" in capsys.readouterr().err


@pytest.mark.parametrize("who", ["the trainer", "another writer"])
def test_the_run_goes_on_while_others_make_rows(roles, tmp_path, who):
    """The only searcher dies at once, again and again, but the trainer goes on, or a log grows that is not its own."""
    begin, told = time.monotonic(), itertools.count()
    grows = tmp_path / ("metrics/trainer-stays/metrics.jsonl" if who == "the trainer" else "replay/else-1/000000/manifest.ocdbt")
    register = tmp_path / "replay" / "writers" / "else-1.json"
    for file in (grows, register):
        file.parent.mkdir(parents=True)
        file.write_text("{}")

    def stop():
        grows.write_text(f"{next(told):09d}" * (1 + next(told)))
        return time.monotonic() - begin > 3.0

    code, starts = roles(["trainer-stays", "searcher-always-dies"], until=["trainer-stays"], max_restarts=1, stop=stop)
    assert code == processes_lib.STOPPED and starts["searcher-always-dies"] > 4


def test_a_searcher_that_gets_to_work_between_its_deaths_ends_no_run(roles):
    begin = time.monotonic()
    kinds = ["trainer-stays", "searcher-works-and-dies"]
    code, starts = roles(kinds, until=kinds[:1], max_restarts=1, stop=lambda: time.monotonic() - begin > 3.0)
    assert code == processes_lib.STOPPED and starts["searcher-works-and-dies"] > 4


def test_searchers_without_rewards_rest_and_the_last_ends_the_run(roles, capsys):
    kinds = ["trainer-stays", "searcher-code5", "searcher-1-code5"]
    code, starts = roles(kinds, until=kinds[:1])
    # On a loaded machine the run may end before the trainer's process has got to its first line.
    assert code == processes_lib.NO_REWARDS and {kind: starts[kind] for kind in kinds[1:]} == dict.fromkeys(kinds[1:], 1)
    assert re.fullmatch(r"searcher\S* \(exit code 5\): error: code 5\n", capsys.readouterr().err)


def test_an_evaluator_that_keeps_dying_is_given_up_after_the_training(roles, caplog):
    kinds = ["trainer-ends-now", "evaluator-always-dies"]
    assert roles(kinds, until=kinds, max_restarts=2) == (0, {"trainer-ends-now": 1, "evaluator-always-dies": 3})
    assert "python -m tba_jax evaluate --workdir=" in caplog.text


def test_nothing_begins_in_the_place_of_a_workdir_that_is_away(roles, tmp_path, caplog, monkeypatch):
    """The supervisor goes on, makes no folder for logs, and starts the role that died once the workdir is back."""
    monkeypatch.setattr(supervisor, "LOOK_AGAIN_SECONDS", 0.1)
    run, away = RunDir(tmp_path / "run", id="f00"), tmp_path / "away"
    run.root.mkdir()
    layout.write_json(run.config, {"id": "f00"})
    begin = time.monotonic()

    def stop():
        seconds = time.monotonic() - begin
        if seconds > 0.5 and run.root.exists() and not back:
            run.root.rename(away)
        if seconds > 2.5 and away.exists():
            assert not run.root.exists()
            away.rename(run.root)
            back.append(True)
        return False

    back: list[bool] = []
    kind = "trainer-dies-after-a-while"
    assert roles([kind], until=[kind], max_restarts=9, stop=stop, run_dir=run) == (0, {kind: 3})
    assert "is not there" in caplog.text and "is back" in caplog.text


def test_a_role_without_a_log_runs(roles, tmp_path, capfd):
    """Its log cannot be opened: it speaks where the supervisor does, and is started again all the same."""
    RunDir(tmp_path).log("dies-once").mkdir(parents=True)
    assert roles(["dies-once"], until=["dies-once"]) == (0, {"dies-once": 2})
    assert capfd.readouterr().out == "dies-once was here\n" * 2


def test_a_stop_ends_all(roles):
    asked = time.monotonic() + 0.5
    assert roles(["stays"], until=["stays"], stop=lambda: time.monotonic() > asked) == (130, {"stays": 1})


def test_storage_is_asked_once_a_role_and_may_fail(roles, monkeypatch):
    exists, asked = places.exists, []

    def answer(place):
        asked.append(place.name)
        if len(asked) == 1:
            raise OSError(errno.EIO, "Input/output error")
        return exists(place)

    monkeypatch.setattr(places, "exists", answer)
    monkeypatch.setattr(supervisor, "LOOK_AGAIN_SECONDS", 0.2)
    kinds = ["ends-now", "ends-later"]
    assert roles(kinds, until=kinds) == (0, {"ends-now": 1, "ends-later": 1})
    assert asked == ["finished.json"] * 3
