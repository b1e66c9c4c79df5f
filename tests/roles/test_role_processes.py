"""The processes of a supervised role: all of a trainer's start together, and their end is one end."""

import sys
import time
import tracemalloc
from pathlib import Path

import pytest

from tba_jax.roles import placement, role_processes
from tba_jax.roles.role_processes import RoleProcesses
from tba_jax.run import log_files, processes
from tba_jax.storage.layout import RunDir

# Stands for tba_jax.main: it notes its arguments, and ends by the code that the run's folder holds for its process.
PROGRAM = """#!/bin/sh
shift 2
number=0
for each in "$@"; do case $each in --process=*) number=${each#*=};; esac; done
echo "$@" > "$RUN_ROOT/arguments-$number"
while [ ! -e "$RUN_ROOT/code-$number" ]; do sleep 0.02; done
echo "error: the words of $number"
exit "$(cat "$RUN_ROOT/code-$number")"
"""


@pytest.fixture
def start(tmp_path, monkeypatch):
    program = tmp_path / "program"
    program.write_text(PROGRAM)
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setenv("RUN_ROOT", str(tmp_path))
    lifeline, started = processes.Lifeline(), []

    def start_role(count: int) -> RoleProcesses:
        whole = placement.Placement(cpus=placement.available_cpus(), processes=count)
        started.append(RoleProcesses("trainer", ["--role=trainer"], placement.split(whole), RunDir(tmp_path), lifeline))
        return started[-1]

    yield start_role
    for each in started:
        each.end_by(time.monotonic())
    lifeline.close()


def end(root: Path, number: int, code: int) -> None:
    (root / "draft").write_text(str(code))
    (root / "draft").rename(root / f"code-{number}")


def wait(role: RoleProcesses) -> int:
    deadline = time.monotonic() + 20
    while (code := role.poll()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return code


def test_one_process_has_no_world(tmp_path, start):
    role = start(1)
    end(tmp_path, 0, 3)
    assert wait(role) == 3 and role.last_words(3) == "error: the words of 0"
    assert (tmp_path / "arguments-0").read_text() == "--role=trainer --processes=1 --process=0\n"


def test_the_last_words_of_a_large_log_that_was_just_set_aside_are_found(tmp_path, start):
    role = start(1)
    role.log.write_text("error: the words of before\n" + "y" * (1 << 20) + "\n")
    assert log_files.rotate(role.log, limit=1 << 10, keep=1)
    end(tmp_path, 0, 3)
    assert wait(role) == 3 and role.last_words(3) == "error: the words of 0"
    assert log_files.rotate(role.log, limit=1, keep=1) and role.log.read_text() == ""
    log_files.older(role.log, 1).write_text("error: the words of 0\n")
    assert role.last_words(3) == "error: the words of 0"


def test_last_words_hold_the_end_of_a_log_in_memory_alone(tmp_path, start):
    role = start(1)
    end(tmp_path, 0, 3)
    assert wait(role) == 3
    with open(role.log, "r+b") as log:
        log.truncate(1 << 26)
        log.seek(0, 2)
        log.write(b"\nerror: the words of 1\n")
    tracemalloc.start()
    try:
        assert role.last_words(3) == "error: the words of 1" and tracemalloc.get_traced_memory()[1] < 16e6
    finally:
        tracemalloc.stop()


def test_processes_share_a_coordinator(tmp_path, start):
    role = start(2)
    for number in (0, 1):
        end(tmp_path, number, 0)
    assert wait(role) == 0
    told = [(tmp_path / f"arguments-{number}").read_text().split() for number in (0, 1)]
    assert [each[-2:] for each in told] == [["--processes=2", "--process=0"], ["--processes=2", "--process=1"]]
    assert told[0][1] == told[1][1] and told[0][1].startswith("--coordinator=127.0.0.1:")


@pytest.mark.parametrize(
    "codes, expected", [((6, 3, 6), 3), ((6, 6, 6), 6), ((0, 6, 0), 6), ((4, 4, 6), 4), ((130, 130, 130), 130)], ids=str
)
def test_the_end_is_that_of_the_process_that_ended_the_others(tmp_path, start, codes, expected):
    role = start(3)
    for number, code in enumerate(codes):
        assert role.poll() is None, "it has not ended before all processes have"
        end(tmp_path, number, code)
    assert wait(role) == expected
    assert role.last_words(expected).startswith(f"error: the words of {codes.index(expected)}")


def test_a_process_that_does_not_see_the_end_of_another_is_killed(tmp_path, start, monkeypatch):
    monkeypatch.setattr(role_processes, "_END_TOGETHER_SECONDS", 0.3)
    role = start(2)
    end(tmp_path, 0, 6)
    assert wait(role) == -9


def test_cores_and_gpus_are_divided():
    whole = placement.Placement(cpus=(0, 1, 2, 3, 4), gpus=("2", "3", "5", "7"), processes=2)
    first, second = placement.split(whole)
    assert (first.cpus, second.cpus) == ((0, 1), (2, 3, 4)) and (first.gpus, second.gpus) == (("2", "3"), ("5", "7"))
    shared = placement.split(placement.Placement(cpus=(3,), processes=2))
    assert [each.cpus for each in shared] == [(3,), (3,)]
    with pytest.raises(ValueError, match=r"trainer.processes=3 does not divide the 4 GPUs"):
        placement.split(placement.Placement(cpus=(0,), gpus=("0", "1", "2", "3"), processes=3))
