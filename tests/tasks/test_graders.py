"""Grading in worker processes: a user's file, every way to fail, threads, and how workers end."""

import importlib.util
import logging
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

from tba_jax.tasks.graders import GradedTask, Graders
from tba_jax.tasks.interface import Query

# A user's file: under 40 lines, in a folder that Python does not look into.
BACKWARDS = '''
"""Say a word backwards."""

from tba_jax.tasks import data
from tba_jax.tasks.graders import GradedTask
from tba_jax.tasks.interface import Query


def reward(query: Query, response: str) -> float:
    return float(response.strip() == query.answer)


class Backwards(GradedTask):
    score_name, reward_parts, reward_version = "accuracy", ("correct",), 1
    grade = staticmethod(reward)

    def __init__(self, *, train_path: str, heldout_path: str, time_limit: float = 10.0):
        super().__init__(time_limit=time_limit, retries=0, concurrency=1)
        self._paths = {"train": train_path, "heldout": heldout_path}

    def queries(self, split: str):
        rows = data.read(self._paths[split], fields={"word": str}, setting=f"{split}_path", split=split)
        return [Query(prompt=f"{row['word']} backwards is ", answer=row["word"][::-1]) for row in rows]
'''

# What a response asks for is what the call does.
GRADES = """
import os, time
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
    if name == "orphan":  # a process that outlives the one that forked it, and holds what it held
        if os.fork() == 0:
            time.sleep(20)
            os._exit(0)
        os._exit(7)
    if name == "return":
        return {"none": None, "text": "1", "nan": float("nan"), "big": 1e39, "true": True}[argument]
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

    def graders(function=grades.grade, *, time_limit=30.0, retries=0, concurrency=2, **settings):
        made.append(Graders(function, time_limit=time_limit, retries=retries, concurrency=concurrency, **settings))
        return made[-1]

    yield graders
    for each in made:
        each.close()


def call(graders: Graders, responses: list[str]) -> list[float]:
    result = graders([Query(prompt=f"query {i}") for i in range(len(responses))], responses)
    assert result.dtype == np.float32 and result.shape == (len(responses),)
    return result.tolist()


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (ProcessLookupError, FileNotFoundError):
        return False


def wait_until_dead(pids: list[int], seconds: float) -> None:
    end = time.monotonic() + seconds
    while any(map(alive, pids)):
        assert time.monotonic() < end, f"{[pid for pid in pids if alive(pid)]} live on"
        time.sleep(0.1)


def test_a_short_file_of_a_users_is_a_task(tmp_path):
    module = load(tmp_path / "backwards.py", BACKWARDS)
    (tmp_path / "words.jsonl").write_text('{"word": "abc"}\n{"word": "x y"}\n')
    paths = {name: str(tmp_path / "words.jsonl") for name in ("train_path", "heldout_path")}
    task = module.Backwards(**paths)
    queries = task.queries("train")
    assert [query.prompt for query in queries] == ["abc backwards is ", "x y backwards is "]
    scores = task.rewards([queries[0], queries[0], queries[1]], [" cba", "abc", "y x\n"], np.ones(3, bool))
    assert scores.reward.tolist() == [1, 0, 1] and scores.parts.tolist() == [[1], [0], [1]]
    task.close()
    with pytest.raises(ValueError, match=r"Backwards has no worked examples: set model.path"):
        task.worked_examples(np.random.default_rng(0), 1)
    with pytest.raises(ValueError, match="time_limit=0 must be above 0 seconds"):
        module.Backwards(time_limit=0, **paths)
    module.Backwards.__init__ = lambda self: None
    with pytest.raises(ValueError, match=r"Backwards.__init__ must call super\(\).__init__"):
        module.Backwards().rewards(queries, ["", ""], np.ones(2, bool))
    del module.Backwards.grade
    with pytest.raises(ValueError, match=r"Backwards must set grade = staticmethod\(function\)"):
        GradedTask.__init__(module.Backwards())
    del sys.modules["backwards"]


def test_what_fails_is_nan_and_told_once(make, caplog):
    responses = ["number 0.25", "raise", "number -3", "exit", "return none", "return text", "return nan", "return big"]
    with caplog.at_level(logging.WARNING):
        result = call(make(), [*responses, "return true", "die", "number 4"])
    nan = pytest.approx(np.nan, nan_ok=True)
    assert result == [0.25, nan, -3, nan, nan, nan, nan, nan, 1, nan, 4]
    (message,) = caplog.messages
    assert message == "7 of 11 responses could not be graded: reward NaN; the first of them answers 'query 1': Odd: odd"


@pytest.mark.parametrize("slow", ["sleep 60", "spin"])
def test_what_takes_too_long_is_killed(make, caplog, slow):
    graders = make(time_limit=0.5)
    call(graders, ["number 1"] * 4)  # workers have started
    begin = time.monotonic()
    with caplog.at_level(logging.WARNING):
        result = call(graders, [slow, *["number 2"] * 6])
    assert time.monotonic() - begin < 8
    assert np.isnan(result[0]) and result[1:] == [2] * 6
    assert caplog.messages[0].endswith("the first of them answers 'query 0': it took more than time_limit=0.5 s")


def test_a_worker_that_leaves_a_process_behind_is_replaced(make, caplog):
    graders = make(concurrency=1)
    call(graders, ["number 1"])
    begin = time.monotonic()
    with caplog.at_level(logging.WARNING):
        result = call(graders, ["orphan", "number 2"])
    assert np.isnan(result[0]) and result[1] == 2
    assert caplog.messages[0].endswith("its worker process died with code 7")
    graders.close()
    assert time.monotonic() - begin < 10


def test_a_failure_is_tried_again_after_a_pause(make, tmp_path):
    graders = make(retries=1)
    call(graders, ["number 1"])
    begin = time.monotonic()
    assert call(graders, [f"once {tmp_path / 'a'}", "number 1"]) == [0.5, 1]
    assert time.monotonic() - begin > 0.5
    assert np.isnan(call(make(), [f"once {tmp_path / 'b'}"])[0])


def test_threads_get_their_own_results(make):
    graders = make(concurrency=2)
    results: dict[int, list[float]] = {}

    def work(thread: int) -> None:
        results[thread] = call(graders, [f"number {thread * 1000 + i}" for i in range(100)])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {i: [i * 1000 + j for j in range(100)] for i in range(5)}


def test_close_ends_the_workers_and_a_later_call_starts_others(make, grades):
    graders, before = make(concurrency=1), threading.active_count()
    assert call(graders, []) == [] and threading.active_count() == before, "nothing to do starts nothing"
    (pid,) = call(graders, ["pid"])
    assert alive(int(pid))
    graders.close()
    graders.close()
    assert not alive(int(pid))
    assert call(graders, ["number 1"]) == [1]
    assert call(make(grades.Holder.grade, concurrency=1), [""]) == [2]


@pytest.mark.parametrize(
    "line, sentence",
    [
        ("import nowhere_at_all", "ModuleNotFoundError: No module named 'nowhere_at_all'"),
        ("import os; os._exit(9)", "the worker processes ended; their errors are in the output above"),
    ],
)
def test_a_file_that_workers_cannot_import(tmp_path, make, caplog, line, sentence):
    guarded = f"import sys\nif 'pytest' not in sys.modules:\n    {line}\n"
    module = load(tmp_path / "broken_grades.py", guarded + "def grade(query, response):\n    return 1.0\n")
    # More than fits into a pipe, so that calls wait in all places.
    with caplog.at_level(logging.WARNING):
        assert np.isnan(call(make(module.grade), ["x" * 5000] * 300)).all()
    assert re.search(rf"300 of 300 responses could not be graded: .*: {re.escape(sentence)}", caplog.text)
    del sys.modules["broken_grades"]


def test_what_workers_could_not_find_is_refused(grades):
    settings = dict(time_limit=1.0, retries=0, concurrency=1)

    def inner(query, response):
        return 1.0

    for function in (inner, lambda query, response: 1.0):
        with pytest.raises(ValueError, match=r"the grading function .* must stand at the top level of a file"):
            Graders(function, **settings)
    exec("def typed(query, response): return 1.0", typed := {"__name__": "__console__"})
    with pytest.raises(ValueError, match="the grading function 'typed' must stand at the top level of a file"):
        Graders(typed["typed"], **settings)


def test_limits_of_settings(grades):
    good = dict(time_limit=1.0, retries=0, concurrency=1)
    for setting, value in (("time_limit", 0.0), ("time_limit", float("nan")), ("retries", -1), ("concurrency", 0)):
        with pytest.raises(ValueError, match=re.escape(f"task.x.{setting}={value} must ")):
            Graders(grades.grade, prefix="task.x.", **good | {setting: value})


# Not guarded by __name__: workers must not run it again. The function is in the file of a script, too.
PARENT = """
import sys, threading, time
from tba_jax.tasks.graders import Graders
from tba_jax.tasks.interface import Query
print("the script runs", flush=True)
{grades}
graders = Graders(grade, time_limit={limit}, retries=0, concurrency=2)
query = Query(prompt="")
pids = set()
while len(pids) < 2:
    pids |= set(graders([query] * 2, ["sleep 0.2", "pid"])[1:].tolist())
print(*map(int, pids), flush=True)
"""


def start(tmp_path, rest: str, *, limit: float) -> tuple[subprocess.Popen, list[int]]:
    # The file of the functions stands beside the script, which Python looks into.
    (tmp_path / "beside.py").write_text(GRADES)
    (tmp_path / "parent.py").write_text(PARENT.format(grades="from beside import grade", limit=limit) + rest)
    process = subprocess.Popen(
        [sys.executable, str(tmp_path / "parent.py")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent.parent)},
    )
    assert process.stdout.readline() == "the script runs\n"
    return process, [int(pid) for pid in process.stdout.readline().split()]


def test_workers_die_with_a_parent_that_is_killed(tmp_path):
    rest = "threading.Thread(target=graders, args=([query], ['spin'])).start()\ntime.sleep(0.5)\nprint('spins', flush=True)\n"
    process, pids = start(tmp_path, rest + "time.sleep(60)\n", limit=1.0)
    assert process.stdout.readline() == "spins\n" and all(map(alive, pids))
    os.kill(pids[0], signal.SIGSTOP)  # a stopped worker dies as well: the kernel kills it
    process.kill()
    process.wait()
    wait_until_dead(pids, 20)
    process.communicate()


def test_a_signal_to_the_group_reaches_the_parent_alone(tmp_path):
    rest = (
        "from tba_jax.run import processes\n"
        "stop = processes.StopSignal()\n"
        "print('ready', flush=True)\n"
        "print(graders([query] * 3, ['sleep 1.5', 'number 2', 'sleep 1.5']).tolist(), stop(), flush=True)\n"
        "graders.close()\n"
    )
    process, pids = start(tmp_path, rest, limit=30.0)
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.5)
    os.killpg(process.pid, signal.SIGTERM)
    output, errors = process.communicate(timeout=30)
    assert output == "[1.0, 2.0, 1.0] True\n" and errors == "" and process.returncode == 0
    wait_until_dead(pids, 5)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells whether a process is stopped")
def test_the_time_for_which_a_process_is_stopped_does_not_count(tmp_path):
    """Searcher and graders stop for 4 s, the limit is 2 s, a grade takes 1 s; then a call that takes too long has no grade."""
    rest = (
        "print(graders([query] * 2, ['sleep 1', 'sleep 1']).tolist(), flush=True)\n"
        "print(*{int(pid) for _ in range(3) for pid in graders([query] * 2, ['sleep 0.3', 'pid'])[1:]}, flush=True)\n"
        "print(graders([query] * 2, ['sleep 60', 'number 2']).tolist(), flush=True)\n"
        "graders.close()\n"
    )
    process, pids = start(tmp_path, rest, limit=2.0)
    time.sleep(0.5)
    stopped = [process.pid, *pids]
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(4)
    for pid in stopped:
        os.kill(pid, signal.SIGCONT)
    assert process.stdout.readline() == "[1.0, 1.0]\n"
    assert {int(pid) for pid in process.stdout.readline().split()} <= set(pids), "no worker was replaced"
    assert process.stdout.readline() == "[nan, 2.0]\n"
    process.communicate(timeout=30)
    wait_until_dead(pids, 5)


def test_a_wall_clock_that_steps_ends_no_call(make, monkeypatch):
    """Each look at it steps by an hour."""
    steps = iter(range(0, 3600 * 10**6, 3600))
    monkeypatch.setattr(time, "time", lambda: 1.8e9 + next(steps))
    assert call(make(time_limit=3.0), ["sleep 1", "sleep 1"]) == [1, 1]


def test_memory_may_be_limited(tmp_path, make):
    if sys.platform != "linux":
        pytest.skip("the limit on memory is Linux' alone")
    module = load(tmp_path / "hungry_grades.py", "def grade(query, response):\n    return float(len(bytearray(int(response))))\n")
    result = call(make(module.grade, concurrency=1, memory_megabytes=1024), [str(2**20), str(2**31), str(2**10)])
    assert result[0] == 2**20 and np.isnan(result[1]) and result[2] == 2**10
    del sys.modules["hungry_grades"]
