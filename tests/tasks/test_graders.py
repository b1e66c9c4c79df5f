"""Grading in worker processes: a user's file, every way to fail, threads, and how workers end."""

import importlib.util
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from tba_jax.tasks import interface
from tba_jax.tasks.graders import GradedTask, Graders
from tba_jax.tasks.interface import Query
from tests.run.test_processes import is_running

# What a response asks for is what the call does.
GRADES = """
import os, sys, time
from pathlib import Path


class Odd(Exception):
    def __init__(self, one, two):  # cannot be made again from its text
        super().__init__("odd")


def grade(query, response):
    name, _, argument = response.partition(" ")
    if name == "number":
        return float(argument)
    if name == "sleep":
        return time.sleep(float(argument)) or 1.0
    if name == "slow":  # to import
        slow = {"jax", "datasets", "pyarrow", "pandas", "sympy", "math_verify", "huggingface_hub", "vaderSentiment"}
        return float(len(slow & set(sys.modules)))
    if name == "pid":
        return float(os.getpid())
    if name == "spin":  # in C, where the interpreter's lock is held
        return 9**9**9**9
    if name == "raise":
        raise Odd(1, 2)
    if name == "exit":
        raise SystemExit(3)
    if name == "die":
        os._exit(7)
    if name == "return":
        return {"none": None, "text": "1", "nan": float("nan"), "big": 1e39, "true": True}[argument]
    if name == "allocate":
        return float(len(bytearray(int(argument))))
    if name == "once":
        if Path(argument).exists():
            return 0.5
        Path(argument).touch()
        raise RuntimeError("not yet")


class Holder:
    @staticmethod
    def grade(query, response):
        return 2.0
"""


def load(path: Path, content: str):
    path.write_text(content)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def grades(tmp_path_factory):
    """The module GRADES, from a file that is not on sys.path."""
    module = load(tmp_path_factory.mktemp("user") / "user_grades.py", GRADES)
    yield module
    del sys.modules["user_grades"]


@pytest.fixture
def make(grades):
    """Makes graders that are closed at the end."""
    made = []

    def graders(function=grades.grade, *, time_limit=30.0, retries=0, concurrency=1, **settings):
        made.append(Graders(function, time_limit=time_limit, retries=retries, concurrency=concurrency, **settings))
        return made[-1]

    yield graders
    for each in made:
        each.close()


@pytest.fixture(scope="module")
def shared(grades):
    graders = Graders(grades.grade, time_limit=30.0, retries=1, concurrency=2)
    yield graders
    graders.close()


def call(graders: Graders, responses: list[str]) -> list[float]:
    result, _ = graders.graded([Query(prompt=f"query {i}") for i in range(len(responses))], responses)
    assert result.dtype == np.float32 and result.shape == (len(responses),)
    return result.tolist()


def test_a_graded_task_of_a_users_file(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"opening": "Once", "words": "cat sun"}\n')
    mention = interface.custom_class("configs/own_task.py:Mention")
    task = mention(train_path=str(tmp_path / "rows.jsonl"), heldout_path="")
    queries = list(task.queries("train")) * 3
    scores = task.rewards(queries, ["a cat in the sun", "a cat", ""], np.ones(3, bool))
    assert scores.reward.tolist() == [1, 0.5, 0] and scores.parts.tolist() == [[1], [0.5], [0]] and task.grades == 3
    task.close()
    with pytest.raises(ValueError, match=r"Mention has no worked examples: set model.path"):
        task.worked_examples(np.random.default_rng(0), 1)

    class Careless(mention):
        def __init__(self):
            pass

    with pytest.raises(ValueError, match=r"Careless.__init__ must call super\(\).__init__"):
        Careless().rewards(queries, [""] * 3, np.ones(3, bool))
    with pytest.raises(ValueError, match=r"must set grade = staticmethod\(function\)"):
        GradedTask.__init__(queries[0])


def test_what_fails_is_nan_and_told_once(make, caplog):
    responses = ["number 0.25", "raise", "number -3", "exit", "return none", "return text", "return nan", "return big"]
    graders, limited = make(concurrency=2, memory_megabytes=1024), sys.platform == "linux"
    result = call(graders, [*responses, "return true", "die", "number 4", *[f"allocate {2**31}"] * limited, f"allocate {2**20}"])
    nan = pytest.approx(np.nan, nan_ok=True)
    assert result == [0.25, nan, -3, nan, nan, nan, nan, nan, 1, nan, 4, *[nan] * limited, 2**20] and graders.grades == 5
    (message,) = caplog.messages
    assert message.endswith("responses could not be graded: reward NaN; the first of them answers 'query 1': Odd: odd")


def test_what_takes_too_long_is_killed(make, caplog):
    graders = make(time_limit=0.5, concurrency=2)
    call(graders, ["number 1"] * 4)  # workers have started
    begin = time.monotonic()
    result = call(graders, ["spin", *["number 2"] * 6])
    assert time.monotonic() - begin < 8
    assert np.isnan(result[0]) and result[1:] == [2] * 6
    assert caplog.messages[0].endswith("the first of them answers 'query 0': it took more than time_limit=0.5 s")


def test_a_failure_is_tried_again_after_a_pause(shared, tmp_path):
    begin = time.monotonic()
    assert call(shared, [f"once {tmp_path / 'a'}", "number 1"]) == [0.5, 1]
    assert time.monotonic() - begin > 0.5


def test_threads_get_their_own_results(shared):
    results: dict[int, list[float]] = {}

    def work(thread: int) -> None:
        results[thread] = call(shared, [f"number {thread * 1000 + i}" for i in range(100)])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {i: [i * 1000 + j for j in range(100)] for i in range(5)}
    assert call(shared, ["slow"]) == [0], "workers import all tasks, and nothing that takes long"


def test_close_ends_the_workers_and_a_later_call_starts_others(make, grades):
    graders, before = make(grades.Holder.grade), threading.active_count()
    assert call(graders, []) == [] and threading.active_count() == before, "nothing to do starts nothing"
    graders = make()
    (pid,) = call(graders, ["pid"])
    assert is_running(int(pid))
    waiting: list[float] = []
    thread = threading.Thread(target=lambda: waiting.extend(call(graders, ["sleep 60", "number 1"])))
    thread.start()
    time.sleep(0.2)
    graders.close()
    graders.close()
    thread.join(10)
    assert np.isnan(waiting).all() and len(waiting) == 2, "calls that run or wait fail"
    with pytest.raises(ProcessLookupError):  # not even a zombie is left
        os.kill(int(pid), 0)
    assert call(graders, ["number 1"]) == [1]


@pytest.mark.parametrize(
    "line, sentence",
    [
        ("import nowhere_at_all", "importing it raised ModuleNotFoundError: No module named 'nowhere_at_all'"),
        ("import os; os._exit(9)", "the worker processes ended; their errors are in the output above"),
    ],
)
def test_a_file_that_workers_cannot_import(tmp_path, make, caplog, line, sentence):
    guarded = f"import sys\nif 'pytest' not in sys.modules:\n    {line}\n"
    module = load(tmp_path / "broken_grades.py", guarded + "def grade(query, response):\n    return 1.0\n")
    # More than fits into a pipe, so that calls wait in all places.
    assert np.isnan(call(make(module.grade), ["x" * 5000] * 300)).all()
    assert re.search(rf"300 of 300 responses could not be graded: .*: {re.escape(sentence)}", caplog.text)
    del sys.modules["broken_grades"]


def test_bad_settings_are_refused(grades):
    good = dict(time_limit=1.0, retries=0, concurrency=1)
    for setting, value in (("time_limit", 0.0), ("time_limit", float("nan")), ("retries", -1), ("concurrency", 0)):
        with pytest.raises(ValueError, match=re.escape(f"task.x.{setting}={value} must ")):
            Graders(grades.grade, prefix="task.x.", **good | {setting: value})

    def inner(query, response):
        return 1.0

    exec("def typed(query, response): return 1.0", typed := {"__name__": "__console__"})
    for function in (inner, lambda query, response: 1.0, typed["typed"]):  # workers could not find them
        with pytest.raises(ValueError, match=r"the grading function .* must stand at the top level of a file"):
            Graders(function, **good)


# Not guarded by __name__: workers must not run it again.
PARENT = """
import threading, time
from beside import grade
from tba_jax.run import processes
from tba_jax.tasks.graders import Graders
from tba_jax.tasks.interface import Query

print("the script runs", flush=True)
stop = processes.StopSignal()
graders = Graders(grade, time_limit=0.8, retries=0, concurrency=2)


def ask(*responses):
    return graders.graded([Query(prompt="")] * len(responses), responses)[0].tolist()


def tell_workers():
    pids = set()
    while len(pids) < 2:
        pids |= set(ask("sleep 0.2", "pid")[1:])
    print(*map(int, pids), flush=True)


tell_workers()
print(ask("sleep 0.5", "sleep 0.5"), flush=True)
while not stop():  # whichever thread the kernel gave the signal to may run after the one that got the grades
    time.sleep(0.01)
tell_workers()
threading.Thread(target=ask, args=("spin",), daemon=True).start()
time.sleep(0.2)
print("spins", flush=True)
time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells whether a process is stopped")
def test_signals_to_the_parent_and_its_workers(tmp_path):
    """A Ctrl-C reaches the parent alone, the time for which processes are stopped does not count, and workers die with a parent
    that is killed, in C code and stopped."""
    (tmp_path / "beside.py").write_text(GRADES)
    (tmp_path / "parent.py").write_text(PARENT)
    path = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent.parent)}
    command = [sys.executable, str(tmp_path / "parent.py")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True, env=path)
    assert process.stdout.readline() == "the script runs\n"
    pids = {int(pid) for pid in process.stdout.readline().split()}
    time.sleep(0.1)
    os.killpg(process.pid, signal.SIGTERM)
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for pid in (process.pid, *pids):
            os.kill(pid, number)
        time.sleep(1.2 * (number == signal.SIGSTOP))
    assert process.stdout.readline() == "[1.0, 1.0]\n"
    assert {int(pid) for pid in process.stdout.readline().split()} == pids, "no worker was replaced"
    assert process.stdout.readline() == "spins\n" and all(map(is_running, pids))
    os.kill(min(pids), signal.SIGSTOP)
    process.kill()
    process.communicate()
    end = time.monotonic() + 20
    while any(map(is_running, pids)):
        assert time.monotonic() < end, f"{[pid for pid in pids if is_running(pid)]} live on"
        time.sleep(0.05)
