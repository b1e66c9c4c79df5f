"""When a role is started again, what ends a run, and how the processes of a trainer end. Nothing here runs a role."""

import collections
import contextlib
import errno
import itertools
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from tba_jax.roles import supervisor
from tba_jax.roles.gpus import Placement, available_cpus
from tba_jax.roles.supervisor import RoleProcesses, Supervisor
from tba_jax.run import processes, restart
from tba_jax.storage import layout, places
from tba_jax.storage.layout import RunDir

# What a life does at each look of the supervisor: it stays, ends by a code, ends the run, or its status has figures of a step.
STAYS, FINISHES, WORKS = itertools.repeat(None), ("finish",), "works"
lives: collections.Counter[str] = collections.Counter()
said: list[str] = []


class Life:
    """In the place of RoleProcesses: one life, which does what the next item of its role's script says."""

    log = Path("role.log")

    def __init__(self, name: str, script: Iterator[Iterable[object]], placed: object, run: RunDir, lifeline: object):
        self._name, self._run, self._events, self._code = name, run, iter(next(script)), None
        lives[name] += 1
        self.pid = lives[name]
        said.append(f"{name} starts")

    def poll(self) -> int | None:
        if self._code is None:
            match next(self._events):
                case int(code):
                    self._code = code
                case "finish":
                    layout.write_json(self._run.finished, {"step": 1})
                    self._code = 0
                case "works":
                    self._run.metrics(self._name).mkdir(parents=True, exist_ok=True)
                    status = {"pid": self.pid, "step": self.pid, "figures": {"loss": 1}}
                    layout.write_json(self._run.metrics(self._name) / "status.json", status)
                    said.append(f"{self._name} works")
        return self._code

    def last_words(self, code: int) -> str:
        return f"error: code {code}"

    def terminate(self) -> None:
        self._code = -15

    def end_by(self, deadline: float) -> None:
        assert self._code == -15 and deadline > time.monotonic()


def dies(code: int, *, times: int = 9) -> list[tuple[object, ...]]:
    return [(code,)] * times + [FINISHES]


@pytest.fixture
def supervise(tmp_path, monkeypatch):
    """Supervises roles by their scripts; returns the exit code and how many lives each role had."""
    monkeypatch.setattr(supervisor, "RoleProcesses", Life)
    for module, name in ((supervisor, "_POLL_SECONDS"), (supervisor, "LOOK_AGAIN_SECONDS"), (restart, "FIRST_PAUSE_SECONDS")):
        monkeypatch.setattr(module, name, 0.0)
    lives.clear()
    said.clear()

    def run(scripts, *until, stop=lambda: False, cpus=(), run=None):
        made, end = Supervisor(run or RunDir(tmp_path), max_restarts=2, stop_seconds=5.0), time.monotonic() + 20
        roles = {name: (iter(script), Placement(cpus=cpus)) for name, script in scripts.items()}
        with contextlib.closing(made):
            code = made.run(roles, until=until or list(scripts)[:1], stop=lambda: stop() or time.monotonic() > end)
        return code, dict(lives)

    return run


@pytest.mark.parametrize("name, code, times", [("trainer", 1, 2), ("searcher", 0, 2), ("evaluator", 3, 9)])
def test_a_role_that_ends_too_early_is_started_again(supervise, name, code, times):
    """Code 0 without the end of the run is too early; storage that fails uses up no restarts."""
    assert supervise({name: dies(code, times=times), "searcher-1": [STAYS]}) == (0, {name: times + 1, "searcher-1": 1})


@pytest.mark.parametrize("cpus, patience, waits", [((0,), 60.0, True), ((0,), 0.0, False), ((), 60.0, False)])
def test_a_role_starts_when_the_one_on_its_cores_is_at_work(supervise, monkeypatch, tmp_path, cpus, patience, waits):
    """Storage is asked for the run where a role starts or ends, not at each look while one waits."""
    monkeypatch.setattr(supervisor, "STARTING_SECONDS", patience)
    monkeypatch.setattr(supervisor.contract, "check_is_there", asked := Mock())
    searcher, run = itertools.chain([None] * 3, [WORKS], STAYS), RunDir(tmp_path, id="f00")
    assert supervise({"searcher-0": [searcher], "evaluator": [FINISHES]}, "evaluator", cpus=cpus, run=run)[0] == 0
    assert ("searcher-0 works" in said) == waits and asked.call_count == 3


def test_a_role_starts_when_the_one_on_its_cores_has_ended_and_the_trainer_waits_for_nobody(supervise):
    roles = ("searcher-0", "trainer", "searcher-1")
    assert supervise({name: [FINISHES] for name in roles}, *roles, cpus=(0,)) == (0, dict.fromkeys(roles, 1))
    assert said[:2] == ["searcher-0 starts", "trainer starts"]


TRAINER = {"trainer": [STAYS]}


@pytest.mark.parametrize(
    "scripts, code, told",
    [
        ({"searcher": dies(2)} | TRAINER, 2, "searcher (exit code 2): error: code 2\n"),
        ({"trainer": dies(4)}, 4, "trainer (exit code 4): error: code 4\n"),
        ({"trainer": [(WORKS, 9)] * 9}, 1, "it died 3 times, more than supervisor.max_restarts=2"),
        ({"searcher": dies(9), "searcher-1": dies(4)} | TRAINER, 1, "supervisor.max_restarts=2; no other sear"),
        ({"searcher": dies(5), "searcher-1": dies(5)} | TRAINER, 5, "error: code 5; no other searcher is left"),
        ({"searcher": dies(5), "searcher-1": dies(9)} | TRAINER, 1, "max_restarts=2; no other searcher is left"),
    ],
    ids=["bad input", "not finite", "the trainer dies", "all searchers die", "no rewards", "one rests, the other dies"],
)
def test_what_ends_a_run(supervise, capsys, scripts, code, told):
    assert supervise(scripts, "trainer")[0] == code and told in capsys.readouterr().err


@pytest.mark.parametrize("name, code, count", [("searcher", 9, 3), ("searcher", 4, 3), ("searcher", 5, 1), ("evaluator", 9, 3)])
def test_a_searcher_or_evaluator_that_is_given_up_ends_no_run_beside_another(supervise, name, code, count, caplog):
    scripts = {"searcher-1": [itertools.chain([None] * 99, ["finish"])], name: dies(code)}
    assert supervise(scripts, *scripts) == (0, {name: count, "searcher-1": 1})
    assert "it is not started again" in caplog.text
    assert ("python -m tba_jax evaluate --workdir=" in caplog.text) == (name == "evaluator")


def test_a_life_with_work_and_a_later_bad_input_are_no_end(supervise):
    assert supervise({"searcher": [*[(WORKS, 9)] * 20, FINISHES]} | TRAINER) == (0, {"searcher": 21, "trainer": 1})
    lives.clear()
    assert supervise({"searcher": [(9,), (2,), FINISHES], "searcher-1": [STAYS]}) == (0, {"searcher": 3, "searcher-1": 1})


def test_nothing_begins_in_the_place_of_a_workdir_that_is_away(supervise, tmp_path, caplog):
    run, away = RunDir(tmp_path / "run", id="f00"), tmp_path / "away"
    run.root.mkdir()
    layout.write_json(run.config, {"id": "f00"})
    looks = itertools.count()

    def stop():
        if (look := next(looks)) == 5:
            run.root.rename(away)
        elif look == 50:
            assert not run.root.exists() and lives["trainer"] == 1
            away.rename(run.root)
        return False

    trainer = [itertools.chain([None] * 9, [9]), FINISHES]
    assert supervise({"trainer": trainer}, stop=stop, run=run) == (0, {"trainer": 2})
    assert "is not there" in caplog.text and "is back" in caplog.text


def test_a_stop_ends_all(supervise):
    asked = itertools.count()
    assert supervise({"trainer": [STAYS], "searcher": [STAYS]}, stop=lambda: next(asked) > 3)[0] == processes.STOPPED


def test_storage_that_does_not_say_whether_the_run_has_ended_is_asked_again(supervise, monkeypatch):
    exists, answers = places.exists, iter([OSError(errno.EIO, "Input/output error")])

    def answer(place):
        for error in answers:
            raise error
        return exists(place)

    monkeypatch.setattr(places, "exists", answer)
    assert supervise({"trainer": [FINISHES]}) == (0, {"trainer": 1}) and not [*answers]


# Stands for `python -m tba_jax.main …`: a process that ends by the code that `end` writes for its number.
PROGRAM = """#!/bin/sh
for n in "$@"; do :; done
n=${n#*=}
echo "$@" > "$ROOT/told-$n"
until [ -e "$ROOT/code-$n" ]; do sleep 0.01; done
echo "error: words of $n"
exit $(cat "$ROOT/code-$n")
"""


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Starts the processes of a trainer."""
    program = tmp_path / "program"
    program.write_text(PROGRAM)
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setenv("ROOT", str(tmp_path))
    lifeline, started = processes.Lifeline(), []

    def start_role(count: int) -> RoleProcesses:
        whole = Placement(cpus=available_cpus(), processes=count)
        started.append(RoleProcesses("trainer", ["trainer"], whole, RunDir(tmp_path), lifeline))
        return started[-1]

    yield start_role
    for each in started:
        each.end_by(time.monotonic())
    lifeline.close()


def end(root: Path, *codes: int) -> None:
    for number, code in enumerate(codes):
        (root / "draft").write_text(str(code))
        (root / "draft").rename(root / f"code-{number}")


def wait(role: RoleProcesses) -> int:
    deadline = time.monotonic() + 20
    while (code := role.poll()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return code


def test_processes_share_a_coordinator_and_one_has_none(tmp_path, start):
    for count in (1, 2):
        role = start(count)
        end(tmp_path, *[0] * count)
        assert wait(role) == 0
        told = [(tmp_path / f"told-{number}").read_text().split() for number in range(count)]
        assert [each[-2:] for each in told] == [[f"--processes={count}", f"--process={number}"] for number in range(count)]
    assert told[0][-3] == told[1][-3] and told[0][-3].startswith("--coordinator=127.0.0.1:")


@pytest.mark.parametrize("codes, expected", [((6, 3, 6), 3), ((0, 6, 0), 6)], ids=str)
def test_the_end_is_that_of_the_process_that_ended_the_others(tmp_path, start, codes, expected):
    role = start(len(codes))
    end(tmp_path, *codes[:-1])
    assert role.poll() is None, "it has not ended before all processes have"
    end(tmp_path, *codes)
    assert wait(role) == expected and role.last_words(expected) == f"error: words of {codes.index(expected)}"


def test_a_process_that_does_not_see_the_end_of_another_is_killed(tmp_path, start, monkeypatch):
    monkeypatch.setattr(supervisor, "END_TOGETHER_SECONDS", 0.1)
    role = start(2)
    end(tmp_path, 6)
    assert wait(role) == -9
