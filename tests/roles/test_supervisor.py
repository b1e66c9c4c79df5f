"""Where roles are placed, and that no process outlives the one that started it."""

import errno
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from configs import base
from tba_jax.roles import progress, supervisor
from tba_jax.roles.supervisor import Placement, Supervisor, place
from tba_jax.run import places
from tba_jax.run import processes as processes_lib
from tba_jax.run.layout import RunDir

REPOSITORY = Path(__file__).parent.parent.parent


def config_with(**overrides):
    config = base.get_config()
    config.update_from_flattened_dict({name.replace("__", "."): value for name, value in overrides.items()})
    return config


@pytest.mark.parametrize(
    "cpus, expected",
    [
        ([5], {"trainer": (5,), "searcher-0": (5,), "searcher-1": (5,), "evaluator": (5,)}),
        ([0, 1], {"trainer": (0,), "searcher-0": (1,), "searcher-1": (1,), "evaluator": (1,)}),
        (range(8), {"trainer": (0, 1, 2, 3), "searcher-0": (4, 6), "searcher-1": (5, 7), "evaluator": (4, 5, 6, 7)}),
    ],
)
def test_cores(cpus, expected):
    found = place(base.get_config(), cpus=cpus, gpus=())
    assert found == {name: Placement(cpus=cores) for name, cores in expected.items()}


def test_more_searchers_than_cores_take_turns():
    found = place(config_with(searchers__count=5, evaluation__enabled=False), cpus=range(4), gpus=())
    assert list(found) == ["trainer", *(f"searcher-{i}" for i in range(5))]
    assert [found[f"searcher-{i}"].cpus for i in range(5)] == [(2,), (3,), (2,), (3,), (2,)]


@pytest.mark.parametrize(
    "gpus, expected",
    [
        (["0"], {"trainer": (["0"], 0.45), "searcher-0": (["0"], 0.2), "searcher-1": (["0"], 0.2), "evaluator": (["0"], 0.1)}),
        (
            ["0", "1"],
            {"trainer": (["0"], 0.45), "searcher-0": (["1"], 0.0), "searcher-1": (["0"], 0.2), "evaluator": (["0"], 0.1)},
        ),
        (
            ["0", "1", "2", "3"],
            {"trainer": (["0", "1"], 0.0), "searcher-0": (["2"], 0.0), "searcher-1": (["3"], 0.2), "evaluator": (["3"], 0.1)},
        ),
    ],
    ids=["1", "2", "4"],
)
def test_gpus(gpus, expected):
    found = place(base.get_config(), cpus=range(8), gpus=gpus)
    assert {name: (list(p.gpus), p.memory_fraction) for name, p in found.items()} == expected
    assert {name: p.cpus for name, p in found.items()} == {
        name: p.cpus for name, p in place(base.get_config(), cpus=range(8), gpus=()).items()
    }


@pytest.mark.parametrize(
    "gpus, expected",
    [
        ("abcdefg", {"trainer": "a", "searcher-0": "de", "searcher-1": "fg", "evaluator": "bc"}),
        ("abcdef", {"trainer": "ab", "searcher-0": "cd", "searcher-1": "ef", "evaluator": "ef"}),
    ],
)
def test_searchers_whose_tasks_have_gpus_of_their_own(gpus, expected):
    rows = 5 if gpus == "abcdefg" else 2  # the trainer's, which three GPUs do not divide
    c = config_with(searchers__task_devices=1, evaluation__task_devices=1, learner__queries=1, learner__completions=rows)
    found = place(c, cpus=[0], gpus=tuple(gpus))
    assert {name: "".join(p.gpus) for name, p in found.items()} == expected


def test_too_few_gpus_for_the_models_of_tasks_are_refused():
    sentence = "searchers.task_devices=1 makes 2 GPUs for each of searchers.count=2, which with the trainer's are 5; there are 4."
    with pytest.raises(ValueError, match=re.escape(sentence)):
        place(config_with(searchers__task_devices=1), cpus=[0], gpus=tuple("abcd"))


def test_without_an_evaluator_a_searcher_has_its_gpu_alone():
    found = place(config_with(evaluation__enabled=False), cpus=[0], gpus=["a", "b", "c"])
    assert {name: p.gpus for name, p in found.items()} == {"trainer": ("a",), "searcher-0": ("b",), "searcher-1": ("c",)}
    assert {p.memory_fraction for p in found.values()} == {0.0}


def test_memory_fractions_that_exceed_a_shared_gpu_are_refused():
    sentence = "trainer, searcher-0, searcher-1, evaluator share GPU 0 and would take 1.05 of its memory, at most 0.95 is allowed"
    with pytest.raises(ValueError, match=re.escape(sentence)):
        place(config_with(learner__memory_fraction=0.55), cpus=[0], gpus=["0"])
    with pytest.raises(ValueError, match=r"searcher-1, evaluator share GPU 2 .* lower learner.memory_fraction"):
        place(config_with(searchers__memory_fraction=0.9), cpus=[0], gpus=["0", "1", "2"])
    # Alone on its GPU a role may have any fraction.
    place(config_with(learner__memory_fraction=1.0), cpus=[0], gpus=["0", "1", "2"])


@pytest.mark.parametrize(
    "environment, expected",
    [
        ({"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "0,1"}, ()),
        ({"CUDA_VISIBLE_DEVICES": "3,GPU-12ab"}, ("3", "GPU-12ab")),
        ({"CUDA_VISIBLE_DEVICES": ""}, ()),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, ()),
        ({"PATH": ""}, ()),
    ],
    ids=str,
)
def test_gpus_that_may_be_handed_out(monkeypatch, environment, expected):
    for name in ("JAX_PLATFORMS", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert supervisor.visible_gpus() == expected


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


def test_a_process_without_a_lifeline_just_runs(monkeypatch):
    monkeypatch.delenv("TBA_JAX_LIFELINE", raising=False)
    monkeypatch.delenv("TBA_JAX_CPUS", raising=False)
    cores = os.sched_getaffinity(0)
    processes_lib.hold()
    assert os.sched_getaffinity(0) == cores


# What a role does here instead of `python -m tba_jax.main`, by its first argument.
ROLE = """
import pathlib, sys, time
kind, folder = sys.argv[1], pathlib.Path(sys.argv[2])
starts = len(list(folder.glob(kind + "-*")))
(folder / f"{kind}-{starts}").touch()
print(kind, "was here", flush=True)
if kind == "dies-once" and starts == 0:
    sys.exit(1)
if kind == "stops-once" and starts == 0:
    sys.exit(0)
if kind in ("dies-once", "stops-once"):
    (folder / "finished.json").write_text('{"step": 1}')
if kind == "always-dies":
    sys.exit(7)
if kind == "dies-after-a-while" and starts < 2:
    time.sleep(0.3)
    sys.exit(7)
if kind == "full" and starts < 2:
    sys.exit(3)
if kind in ("dies-after-a-while", "full"):
    (folder / "finished.json").write_text('{"step": 1}')
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
if kind == "stays":
    time.sleep(600)
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

    def run(kinds, *, until, max_restarts=2, stop=lambda: False, share_cores=False):
        processes = Supervisor(RunDir(tmp_path), max_restarts=max_restarts, stop_seconds=5.0)
        placement = Placement(cpus=tuple(os.sched_getaffinity(0)) if share_cores else ())
        commands = {kind: ((kind, str(tmp_path)), placement) for kind in kinds}
        try:
            code = processes.run(commands, until=until, progress=lambda: None, stop=stop)
        finally:
            processes.close()
        assert all(process.poll() is not None for process in started)
        return code, {kind: len(list(tmp_path.glob(f"{kind}-*"))) for kind in kinds}

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


def test_bad_input_ends_the_run_by_its_last_words(roles, capsys):
    assert roles(["bad-input", "stays"], until=["stays"]) == (2, {"bad-input": 1, "stays": 1})
    assert capsys.readouterr().err == "bad-input (exit code 2): error: bad value\n"


@pytest.mark.parametrize(
    "kind, code, words",
    [
        ("always-dies", 1, "it died 2 times, more than supervisor.max_restarts=1"),
        ("always-full", 3, "always-full (exit code 3): error: storage failed; it died 2 times"),
    ],
)
def test_a_role_that_keeps_dying_ends_the_run(roles, capsys, kind, code, words):
    assert roles([kind], until=[kind], max_restarts=1) == (code, {kind: 2})
    assert words in capsys.readouterr().err


def test_deaths_before_a_long_life_are_forgotten(roles, monkeypatch):
    monkeypatch.setattr(supervisor, "HEALTHY_SECONDS", 0.2)
    kind = "dies-after-a-while"
    assert roles([kind], until=[kind], max_restarts=1) == (0, {kind: 3})


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


def test_silent_storage_costs_the_line_of_progress_alone(tmp_path, monkeypatch, capsys):
    def refuse(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(places, "exists", refuse)
    progress.Progress(RunDir(tmp_path), steps=3, searchers=1, warm_start_steps=0)()
    assert "storage does not answer: [Errno 5] Input/output error" in capsys.readouterr().out
