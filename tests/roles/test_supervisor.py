"""When a role is started again, what ends a run, and how the processes of a trainer end. Shell scripts stand for roles."""

import errno
import itertools
import re
import sys
import time
from pathlib import Path

import pytest

from tba_jax.roles import placement, supervisor
from tba_jax.roles.placement import Placement
from tba_jax.roles.supervisor import RoleProcesses, Supervisor
from tba_jax.run import log_files, processes, restart
from tba_jax.storage import layout, places
from tba_jax.storage.layout import RunDir

# Stands for `python -m tba_jax.main NAME SCRIPT …`. A script asks how many lives the role has had, says that the role works at a
# step, as its status would, and ends the run.
PROGRAM = """#!/bin/sh
name=$3 script=$4
shift 4
echo "$name was here"
echo >> "$ROOT/$name.lives"
lives=$(wc -l < "$ROOT/$name.lives")
works() {
    mkdir -p "$ROOT/metrics/$name"
    echo "{\\"pid\\": $$, \\"step\\": $1, \\"figures\\": {\\"loss\\": 1}}" > "$ROOT/metrics/$name/draft"
    mv "$ROOT/metrics/$name/draft" "$ROOT/metrics/$name/status.json"
}
finish() { echo '{"step": 1}' > "$ROOT/finished.json"; }
eval "$script"
"""
STAYS = "exec sleep 600"


def dies(code: int, *, times: int) -> str:
    return f'[ $lives -gt {times} ] || {{ echo "error: code {code}"; exit {code}; }}; finish'


@pytest.fixture(autouse=True)
def _program(tmp_path, monkeypatch):
    program = tmp_path / "program"
    program.write_text(PROGRAM)
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setenv("ROOT", str(tmp_path))
    monkeypatch.setattr(supervisor, "_POLL_SECONDS", 0.01)
    monkeypatch.setattr(supervisor, "LOOK_AGAIN_SECONDS", 0.05)
    monkeypatch.setattr(restart, "FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(restart, "LONGEST_PAUSE_SECONDS", 0.02)


@pytest.fixture
def supervise(tmp_path):
    """Runs the scripts of roles under a supervisor; returns its exit code and how many lives each role had."""

    def run(scripts, *until, max_restarts=2, stop=lambda: False, cpus=(), run_dir=None):
        run = run_dir or RunDir(tmp_path)
        made, end = Supervisor(run, max_restarts=max_restarts, stop_seconds=5.0), time.monotonic() + 60
        roles = {name: ((name, script), Placement(cpus=cpus)) for name, script in scripts.items()}
        try:
            code = made.run(roles, until=until or list(scripts)[:1], stop=lambda: stop() or time.monotonic() > end)
        finally:
            lives = [role.life for role in made._roles if role.life is not None]
            made.close()
        assert all(life.poll() is not None for life in lives)
        files = {name: tmp_path / f"{name}.lives" for name in scripts}
        return code, {name: len(file.read_text()) if file.exists() else 0 for name, file in files.items()}

    return run


@pytest.mark.parametrize("name", ["trainer", "searcher", "evaluator"])
@pytest.mark.parametrize(
    "script, lives", [(dies(1, times=1), 2), (dies(0, times=1), 2), (dies(3, times=5), 6)], ids=["dies", "stops", "full"]
)
def test_a_role_that_ends_too_early_is_started_again(supervise, tmp_path, name, script, lives):
    """Code 0 without the end of the run is too early; storage that fails uses up no restarts."""
    assert supervise({name: script, "searcher-1": STAYS}) == (0, {name: lives, "searcher-1": 1})
    assert RunDir(tmp_path).log(name).read_text().count(f"{name} was here\n") == lives


@pytest.mark.parametrize("cpus, patience, waits", [((0,), 60.0, True), ((0,), 0.05, False), ((), 60.0, False)])
def test_a_role_starts_when_the_one_on_its_cores_is_at_work(supervise, tmp_path, monkeypatch, cpus, patience, waits):
    monkeypatch.setattr(supervisor, "STARTING_SECONDS", patience)
    scripts = {"searcher-0": f"sleep 0.5; works 0; {STAYS}", "evaluator": "finish"}
    assert supervise(scripts, "evaluator", cpus=cpus) == (0, {"searcher-0": 1, "evaluator": 1})
    assert (tmp_path / "metrics/searcher-0/status.json").exists() == waits


def test_a_role_starts_when_the_one_on_its_cores_has_ended_and_the_trainer_waits_for_nobody(supervise):
    scripts = {"searcher-0": "finish", "trainer": "finish", "searcher-1": "finish"}
    assert supervise(scripts, *scripts, cpus=(0,)) == (0, dict.fromkeys(scripts, 1))


TRAINER = {"trainer": STAYS}


@pytest.mark.parametrize(
    "scripts, code, told",
    [
        (
            {"searcher": "echo error: bad value; echo a thread; exit 2"} | TRAINER,
            2,
            r"searcher \(exit code 2\): error: bad value",
        ),
        ({"trainer": dies(4, times=9)}, 4, r"trainer \(exit code 4\): error: code 4"),
        ({"trainer": dies(9, times=9)}, 1, r".*it died 3 times, more than supervisor.max_restarts=2"),
        (
            {"searcher": dies(9, times=99), "searcher-1": dies(4, times=99)} | TRAINER,
            1,
            r".*max_restarts=2 times without .* row.*",
        ),
        ({"searcher": dies(5, times=9), "searcher-1": dies(5, times=9)} | TRAINER, 5, r"searcher\S* \(exit code 5\): .*code 5"),
        ({"searcher": dies(5, times=9), "searcher-1": dies(9, times=99)} | TRAINER, 1, r".* without making a row.*"),
    ],
    ids=["bad input", "not finite", "the trainer dies", "all searchers die", "no rewards", "one rests, the other dies"],
)
def test_what_ends_a_run(supervise, capsys, scripts, code, told):
    found, lives = supervise(scripts, "trainer")
    assert found == code and re.fullmatch(told, capsys.readouterr().err.strip())
    assert all(lives[name] == (1 if "exit 5" in script else lives[name]) for name, script in scripts.items())


@pytest.mark.parametrize("code, lives", [(9, 20), (4, 7), (2, 1)])
def test_a_searcher_that_dies_again_and_again_ends_no_run_beside_another(supervise, code, lives):
    scripts = {"searcher": dies(code, times=lives - 1), "searcher-1": STAYS}
    assert supervise(scripts) == (0, {"searcher": lives, "searcher-1": 1})


def test_bad_input_of_a_role_that_is_started_again_is_a_death(supervise):
    script = f"[ $lives != 1 ] || exit 9; {dies(2, times=3)}"
    assert supervise({"searcher": script, "searcher-1": STAYS}) == (0, {"searcher": 4, "searcher-1": 1})


def test_deaths_before_a_long_life_are_forgotten(supervise, monkeypatch):
    monkeypatch.setattr(restart, "HEALTHY_SECONDS", 0.2)
    assert supervise({"trainer": f"sleep 0.3; {dies(9, times=2)}"}, max_restarts=1) == (0, {"trainer": 3})


@pytest.mark.parametrize("works", ["the trainer", "the searcher itself"])
def test_a_run_goes_on_while_somebody_makes_rows(supervise, works):
    """The only searcher dies again and again, but the trainer learns from others, or the searcher works before it dies."""
    trainer = "n=0; while :; do n=$((n + 1)); works $n; sleep 0.02; done" if works == "the trainer" else STAYS
    searcher = dies(9, times=20) if works == "the trainer" else f"works 0; sleep 0.02; {dies(9, times=20)}"
    assert supervise({"searcher": searcher, "trainer": trainer})[1]["searcher"] == 21


def test_an_evaluator_that_keeps_dying_is_given_up_after_the_training(supervise, caplog):
    code, lives = supervise({"trainer": "finish", "evaluator": dies(9, times=99)}, "trainer", "evaluator")
    assert code == 0 and lives["evaluator"] >= 3 and "python -m tba_jax evaluate --workdir=" in caplog.text


def test_nothing_begins_in_the_place_of_a_workdir_that_is_away(supervise, tmp_path, caplog):
    """The supervisor goes on, makes no folder for logs, and starts the role that died once the workdir is back."""
    run, away, begin = RunDir(tmp_path / "run", id="f00"), tmp_path / "away", time.monotonic()
    run.root.mkdir()
    layout.write_json(run.config, {"id": "f00"})

    def stop():
        seconds = time.monotonic() - begin
        if seconds > 0.1 and run.root.exists() and not away_once:
            run.root.rename(away)
            away_once.append(True)
        if seconds > 0.8 and away.exists():
            assert not run.root.exists()
            away.rename(run.root)
        return False

    away_once: list[bool] = []
    script = f'sleep 0.3; {dies(9, times=2)}; cp "$ROOT/finished.json" "$ROOT/run/"'
    assert supervise({"trainer": script}, max_restarts=9, stop=stop, run_dir=run) == (0, {"trainer": 3})
    assert "is not there" in caplog.text and "is back" in caplog.text


def test_a_role_without_a_log_speaks_where_the_supervisor_does(supervise, tmp_path, capfd):
    RunDir(tmp_path).log("trainer").mkdir(parents=True)
    assert supervise({"trainer": dies(1, times=1)}) == (0, {"trainer": 2})
    assert capfd.readouterr().out.count("trainer was here\n") == 2


def test_a_stop_ends_all(supervise):
    asked = itertools.count()
    assert supervise({"trainer": STAYS, "searcher": STAYS}, stop=lambda: next(asked) > 3)[0] == processes.STOPPED


def test_storage_that_does_not_say_whether_the_run_has_ended_is_asked_again(supervise, monkeypatch):
    exists, asked = places.exists, []

    def answer(place):
        asked.append(place.name)
        if len(asked) == 1:
            raise OSError(errno.EIO, "Input/output error")
        return exists(place)

    monkeypatch.setattr(places, "exists", answer)
    assert supervise({"trainer": "finish"}) == (0, {"trainer": 1}) and asked == ["finished.json"] * 2


@pytest.fixture
def start(tmp_path):
    """Starts the processes of a trainer, each of which ends by the code that `end` writes for its number."""
    script = (
        'for n in "$@"; do :; done; n=${n#*=}; echo "$@" > "$ROOT/told-$n"; until [ -e "$ROOT/code-$n" ]; do sleep 0.02; done; '
        'echo "error: words of $n"; exit $(cat "$ROOT/code-$n")'
    )
    lifeline, started = processes.Lifeline(), []

    def start_role(count: int) -> RoleProcesses:
        whole = Placement(cpus=placement.available_cpus(), processes=count)
        started.append(RoleProcesses("trainer", ["trainer", script], placement.split(whole), RunDir(tmp_path), lifeline))
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
        time.sleep(0.02)
    return code


def test_processes_share_a_coordinator_and_one_has_none(tmp_path, start):
    for count in (1, 2):
        role = start(count)
        end(tmp_path, *[0] * count)
        assert wait(role) == 0
        told = [(tmp_path / f"told-{number}").read_text().split() for number in range(count)]
        assert [each[-2:] for each in told] == [[f"--processes={count}", f"--process={number}"] for number in range(count)]
    assert len(told[0]) == 3 and told[0][0] == told[1][0] and told[0][0].startswith("--coordinator=127.0.0.1:")


@pytest.mark.parametrize(
    "codes, expected", [((6, 3, 6), 3), ((6, 6), 6), ((0, 6, 0), 6), ((4, 4, 6), 4), ((130, 130), 130)], ids=str
)
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


def test_the_last_words_of_a_log_that_was_just_set_aside_are_found(tmp_path, start):
    role = start(1)
    role.log.write_text("error: words of before\n" + "y" * (1 << 20) + "\n")
    end(tmp_path, 3)
    assert wait(role) == 3 and role.last_words(3) == "error: words of 0"
    assert log_files.rotate(role.log, limit=100, keep=1) and role.log.read_text() == ""
    assert role.last_words(3) == "error: words of 0"


def test_cores_and_gpus_are_divided():
    whole = Placement(cpus=(0, 1, 2, 3, 4), gpus=("2", "3", "5", "7"), processes=2)
    first, second = placement.split(whole)
    assert (first.cpus, second.cpus) == ((0, 1), (2, 3, 4)) and (first.gpus, second.gpus) == (("2", "3"), ("5", "7"))
    assert [each.cpus for each in placement.split(Placement(cpus=(3,), processes=2))] == [(3,), (3,)]
    with pytest.raises(ValueError, match=r"trainer.processes=3 does not divide the 4 GPUs"):
        placement.split(Placement(cpus=(0,), gpus=("0", "1", "2", "3"), processes=3))
