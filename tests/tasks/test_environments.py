"""Environments in worker processes: answers, every way to fail, and that one which waits or hangs stops no other."""

import importlib.util
import re
import sys
import time

import pytest

from tba_jax.experiment import composition
from tba_jax.tasks.environments import Environments
from tba_jax.tasks.interface import Query
from tba_jax.tasks.tools import ToolFormat
from tests.support import tiny_run

# What a message asks for is what the step does.
PLAYED = """
import ctypes, os, time
from tba_jax.tasks.environments import EnvironmentTask
from tba_jax.tasks.tools import ToolTask


class Own(str):
    pass


class Echo:
    def __init__(self, greeting="hello"):
        self.greeting, self.tool_calls, self.errors = greeting, 0, 0

    def start(self, query):
        if query.answer == "no start":
            raise RuntimeError("not today")
        self.heard = []
        if query.answer == "clock":
            return str(time.time())
        return [{"role": "system", "content": self.greeting}, f"you are {query.answer}"]

    def step(self, message):
        name, _, argument = message.partition(" ")
        self.heard.append(message)
        if name == "sleep":
            time.sleep(float(argument))
        if name == "hang":
            while True:
                time.sleep(1)
        if name == "raise":
            raise KeyError("lost")
        if name == "die":
            os._exit(9)
        if name == "hold":  # the interpreter's lock, which it has when the file appears
            ctypes.PyDLL(None).system(f"touch {argument}; exec sleep 20".encode())
        if name == "own":
            return [{"role": Own("user"), "content": Own("mine")}], 0.0
        if name == "tool":
            self.tool_calls += 1
        if name == "return":
            return {"number": 3, "messages": (5, 1.0), "role": ([{"role": "user"}], 1.0), "nan": ("", float("nan"))}[argument]
        return (None if name == "end" else "|".join(self.heard)), 0.5


class Task(EnvironmentTask):
    environment = Echo
    alphabet = "abc"

    def episodes(self, split):
        from tba_jax.tasks.interface import Query
        return [Query("", "a"), Query("given", "b"), Query("", "no start" if split == "heldout" else "c"), Query("", "clock")]


def calculate(expression: str) -> float:
    \"\"\"Works out an expression.

    Args:
        expression: with + and -
    \"\"\"
    return sum(map(int, expression.replace("-", "+-").split("+")))


def grade(query, answer):
    return float(answer.strip() == query.answer)


class Sums(ToolTask):
    tools = (calculate,)
    grade = staticmethod(grade)

    def episodes(self, split):
        from tba_jax.tasks.interface import Query
        return [Query("1+2", "3")]


def untyped(x):
    pass


class Bare(EnvironmentTask):
    def episodes(self, split):
        return []
"""


@pytest.fixture(scope="module")
def user(tmp_path_factory):
    """The module PLAYED, from a file that is not on sys.path."""
    path = tmp_path_factory.mktemp("user") / "user_environments.py"
    path.write_text(PLAYED)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[path.stem]


@pytest.fixture(scope="module")
def environments(user):
    made = Environments(user.Echo, {"greeting": "hi"}, time_limit=20.0, concurrency=1)
    yield made
    made.close()


def start(environments, name="x"):
    session, answer = environments.start(Query("q", name))
    assert not answer.result(60).failure, answer.result()
    return session


def step(session, message):
    return session.step(message).result(60)


def test_each_response_has_an_environment_of_its_own(environments):
    session, answer = environments.start(Query("q", "first"))
    assert answer.result(60).messages == [
        {"role": "system", "content": "hi"},
        {"role": "user", "content": "you are first"},
    ]
    other = start(environments, "second")
    assert step(session, "one").messages == [{"role": "user", "content": "one"}]
    assert step(other, "other").messages == [{"role": "user", "content": "other"}]
    told = step(session, "tool two")
    assert (told.messages[0]["content"], told.reward, told.done, told.tool_calls) == ("one|tool two", 0.5, False, 1)
    assert step(session, "end").done


def test_many_that_wait_stop_no_other(environments):
    sessions = [start(environments) for _ in range(24)]
    begin = time.monotonic()
    waiting = [session.step("sleep 1") for session in sessions]
    assert step(start(environments), "now").messages and time.monotonic() - begin < 0.9
    assert all(not each.result(60).failure for each in waiting)
    assert time.monotonic() - begin < 6, "24 seconds one after the other"


@pytest.mark.parametrize(
    ("message", "failure"),
    [
        ("raise", "KeyError: 'lost'"),
        ("return number", r"step\(\) returned 3, not \(what the policy reads next or None, reward\)"),
        ("return messages", r"step\(\) returned 5, not a text, messages"),
        ("return role", r"step\(\) returned .*role.*, not a text, messages"),
        ("return nan", "the reward nan, not a finite number"),
    ],
)
def test_what_fails_is_told_and_the_others_go_on(environments, message, failure):
    session, other = start(environments), start(environments)
    assert re.search(failure, step(session, message).failure)
    assert step(other, "still").messages[0]["content"] == "still"


def test_one_that_hangs_fails_alone_and_its_worker_is_replaced(user):
    environments = Environments(user.Echo, {}, time_limit=2.0, concurrency=1)
    hanging, beside = start(environments), start(environments)
    worker = hanging._worker
    assert "it took more than time_limit=2 s" in step(hanging, "hang").failure
    hanging.close()
    assert step(beside, "still").messages[0]["content"] == "still", "it lives on in the worker of the one that hangs"
    after = start(environments)
    assert after._worker is not worker and worker._process.poll() is None
    beside.close()
    worker._process.wait(20)
    assert step(after, "new").messages
    environments.close()


def test_one_that_holds_the_lock_fails_its_worker_and_nobody_waits(user, tmp_path):
    environments = Environments(user.Echo, {}, time_limit=2.0, concurrency=1, prefix="task.x.")
    holding, *others = (start(environments) for _ in range(60))
    waiting = [holding.step(f"hold {tmp_path / 'held'}")]
    while not (tmp_path / "held").exists():
        assert not waiting[0].done()
        time.sleep(0.01)
    begin = time.monotonic()
    waiting += [each.step("x" * 8192) for each in others]
    assert time.monotonic() - begin < 1, "the pipe is full, and whoever asks does not wait for it"
    assert {each.result(30).failure for each in waiting} == {"it took more than task.x.time_limit=2 s"}
    assert step(start(environments), "new").messages
    environments.close()


def test_what_a_class_of_the_file_says_is_plain(environments):
    (said,) = step(start(environments), "own").messages
    assert said == {"role": "user", "content": "mine"} and {type(each) for each in said.values()} == {str}


def test_a_worker_that_dies_fails_its_environments_and_is_replaced(user):
    environments = Environments(user.Echo, {}, time_limit=20.0, concurrency=1)
    dying, beside = start(environments), start(environments)
    waiting = beside.step("sleep 30")
    assert step(dying, "die").failure == waiting.result(60).failure == "its worker process died with code 9"
    assert step(beside, "more").failure
    assert step(start(environments), "new").messages
    environments.close()


def test_a_task_has_its_prompts_from_start(user):
    task = user.Task(settings={"greeting": "welcome"})
    *known, clock = task.queries("train")
    assert known == [Query("welcome\n\nyou are a", "a"), Query("given", "b"), Query("welcome\n\nyou are c", "c")]
    answers = [task.environments.start(query)[1].result(60) for query in (*known, clock)]
    assert [each.failure for each in answers[:-1]] == ["", "", ""]
    assert "start() says another thing than when it gave the prompt" in answers[-1].failure
    with pytest.raises(ValueError, match=r"the environment of Task does not start with .*no start.*RuntimeError: not today"):
        task.queries("heldout")
    task.close()


@pytest.mark.parametrize("settings", [{"time_limit": 0.0}, {"time_limit": float("inf")}, {"concurrency": 0}], ids=str)
def test_bad_settings_are_refused(user, settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        user.Task(**settings)
    with pytest.raises(ValueError, match="Bare must set environment to a class"):
        user.Bare()


def test_tools_are_called_and_what_cannot_be_read_comes_back(user):
    task = user.Sums()
    assert task.schemas[0]["function"]["parameters"]["required"] == ["expression"]
    task.use(ToolFormat(before="<call>", name="name", arguments="arguments"))
    session, started = task.environments.start(task.queries("train")[0])
    assert not started.result(60).failure

    def said(message):
        answer = step(session, message)
        assert not answer.failure and {each["role"] for each in answer.messages} <= {"tool"}
        return [each["content"] for each in answer.messages], answer.tool_calls, answer.errors, answer.done, answer.reward

    call = '<call>{"name": "calculate", "arguments": {"expression": "%s"}}</call>'
    assert said(call % "1+2" + call % "2-5") == (["3", "-3"], 2, 0, False, 0.0)
    for wrong, told in (
        (call % "1+", "error: ValueError: invalid literal"),
        ("<call>{", "error: the call of a tool is not valid JSON"),
        (call.replace("calculate", "search"), "error: ValueError: there is no tool 'search'; there are calculate"),
        (call.replace("expression", "text"), "error: TypeError: missing a required argument: 'expression'"),
    ):
        (text,), *_, errors, done, _ = said(wrong)
        assert text.startswith(told) and not done
    assert errors == 4 and said(" 3 ") == ([], 5, 4, True, 1.0)
    task.close()


@pytest.mark.parametrize(
    ("tools", "sentence"),
    [
        (["untyped"], "the tool untyped needs type hints, and a docstring"),
        (["calculate", "calculate"], "two tools have the name 'calculate'"),
        ([], r"Other must set tools = \(function, …\) and grade"),
    ],
    ids=str,
)
def test_tools_without_a_schema_are_refused(user, tools, sentence):
    other = type("Other", (user.Sums,), {"tools": tuple(getattr(user, name) for name in tools)})
    with pytest.raises(ValueError, match=sentence):
        other()
    with pytest.raises(ValueError, match=r"the tool '<lambda>' must have a name"):
        type("Other", (user.Sums,), {"tools": (lambda: 3,)})()


def test_an_environment_must_stand_at_the_top_of_a_file():
    class Local:
        pass

    with pytest.raises(ValueError, match=r"the environment .*Local.* must stand at the top level of a file"):
        Environments(Local, {}, time_limit=1.0, concurrency=1)


def test_the_example_of_the_page_is_an_environment(tmp_path):
    """docs/environments.md: its file, and the command below it."""
    page = (tiny_run.ROOT / "docs" / "environments.md").read_text()
    file = tmp_path / "guess.py"
    file.write_text(page.split("```python\n")[1].split("```")[0])
    config = tiny_run.config(
        task__name=f"{file}:Task", task__prompt_length=10, task__response_length=24, task__stop_strings=("\n",)
    )
    built = composition.build(config)
    assert built.contract.turns == 4 and len(built.queries["heldout"]) == 100
    environments = built.task.environments
    session, started = environments.start(built.queries["train"][7].query)
    assert not started.result(60).failure
    assert step(session, "x\n").messages[0]["content"] == "no, try again\n"
    last = step(session, "7\n")
    assert (last.done, last.reward, last.errors) == (True, 1.0, 1)
    environments.close()
