"""What processes of a trainer tell each other: calls in order, asides beside them, reports, and the end of one ends all."""

import re
import subprocess
import sys
import time

import pytest

from tba_jax.run import processes
from tests.support import tiny_run
from tests.support import trainer_processes as trainers

# Both sides without JAX' runtime, of which the group only asks the common end.
PROCESS = """
import socket, sys, time, types
import numpy as np
sys.modules["jax"] = types.SimpleNamespace(distributed=types.SimpleNamespace(shutdown=lambda: None))
from tba_jax.run import processes
from tba_jax.roles.process_group import Leader, Member
from tba_jax.roles.wire import Wire

number, port, heartbeat = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
if number == 0:
    with socket.create_server(("127.0.0.1", port)) as server:
        print("listening", flush=True)
        wires = [Wire(server.accept()[0]) for _ in range(int(sys.argv[4]))]
    numbered = {wire.receive().content["process"]: wire for wire in wires}
    group = Leader(numbered, {each: "host" for each in numbered}, heartbeat_seconds=heartbeat)
else:
    wire = Wire(socket.create_connection(("127.0.0.1", port)))
    wire.send("hello", {"process": number})
    group = Member(wire, "host", process=number, processes=int(sys.argv[4]) + 1, heartbeat_seconds=heartbeat)
    noted = []
    time.sleep(0.2)  # the leader is ahead
    group.on_aside("note", lambda text: noted.append(text))
print("ready", flush=True)
"""


def start(leader: str, *members: str, heartbeat: float = 30.0) -> list[subprocess.Popen[str]]:
    """Processes of a group. Args: leader, members: what each does once it is connected."""
    port, started = trainers.free_port(), []
    for number, code in enumerate((leader, *members)):
        command = [sys.executable, "-c", PROCESS + code, str(number), str(port), str(heartbeat), str(len(members))]
        process = subprocess.Popen(
            command, cwd=tiny_run.ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, bufsize=1
        )
        if number == 0:
            assert process.stdout is not None and process.stdout.readline() == "listening\n"
        started.append(process)
    return started


FOLLOW = """
with group.guard():
    for name, content, arrays in group.calls():
        if name == "fail":
            raise FloatingPointError("it is not finite")
        if name == "sleep":
            time.sleep(60)
        print(name, content, {key: array.tolist() for key, array in arrays.items()}, noted, flush=True)
        if name == "tell":
            group.report("told", process=number)
group.end()
sys.exit(group.code)
"""


def test_calls_come_in_order_and_all_end_with_one_code():
    leader = """
with group.guard():
    group.aside("note", text="beside")
    group.call("place", {"a": np.arange(3)})
    group.call("update", step=1)
    group.call("tell")
    print(sorted(report["process"] for report in group.reports("told")), flush=True)
group.end(7)
sys.exit(7)
"""
    first, *others = trainers.wait(start(leader, FOLLOW, FOLLOW))
    assert first.code == 7 and "[1, 2]" in first.text
    for each in others:
        lines = each.text.splitlines()
        assert each.code == 7
        assert lines[1:] == [
            "place {} {'a': [0, 1, 2]} ['beside']",
            "update {'step': 1} {} ['beside']",
            "tell {} {} ['beside']",
        ]


def test_a_failure_of_the_leader_ends_all_by_its_sentence():
    leader = "with group.guard(ValueError):\n    group.call('sleep')\n    raise FloatingPointError('step 3')"
    begin = time.monotonic()
    first, second = trainers.wait(start(leader, FOLLOW))
    assert time.monotonic() - begin < 30 and second.code == processes.NOT_FINITE and first.code in (1, second.code), second.text
    assert re.search(r"error: process 0 \(.*\) of this trainer failed: .*step 3", second.text), second.text


def test_a_failure_of_a_member_ends_all_by_its_sentence():
    leader = "group.call('fail')\ntime.sleep(60)"
    first, _, third = trainers.wait(start(leader, FOLLOW, "time.sleep(60)"))
    assert first.code == processes.NOT_FINITE and "of this trainer failed: it is not finite" in first.text
    assert third.code == processes.NOT_FINITE and "error: process 1" in third.text


def test_an_error_that_the_end_of_another_process_causes_is_told_as_that():
    """A collective fails in the main thread before the end of the connection is seen."""
    leader = "with group.guard():\n    time.sleep(0.2)\n    raise RuntimeError('Connection reset by peer')"
    first, _ = trainers.wait(start(leader, "import os\ntime.sleep(0.7)\nos._exit(9)"))
    assert first.code == processes.PEER_LOST and "error: process 1 (host) of this trainer has ended" in first.text, first.text


@pytest.mark.parametrize("killed", [0, 1])
def test_the_end_of_any_process_ends_all_at_once(killed):
    started = start("time.sleep(60)", "time.sleep(60)", "time.sleep(60)")
    with trainers.ended_at_last(started):
        for process in started:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
        started[killed].kill()
        begin = time.monotonic()
        codes = [process.wait(30) for process in started]
    assert time.monotonic() - begin < 5.0
    assert [code for number, code in enumerate(codes) if number != killed] == [processes.PEER_LOST] * 2


def test_between_two_functions_of_an_aside_nothing_is_lost():
    leader = """
group.aside("note", text="first")
group.call("next")
group.reports("off")
group.aside("note", text="second")
group.call("next")
group.end(0)
"""
    member = """
calls, again = group.calls(), []
next(calls)
group.off_aside("note")
group.report("off")
next(calls)
group.on_aside("note", lambda text: again.append(text))
print(noted, again, flush=True)
assert list(calls) == []
group.end()
"""
    _, second = trainers.wait(start(leader, member))
    assert second.code == 0 and "['first'] ['second']" in second.text, second.text


def test_a_message_that_cannot_be_taken_ends_the_processes():
    leader = "time.sleep(1)\ngroup.aside('note', wrong=1)\ntime.sleep(60)"
    first, second = trainers.wait(start(leader, "time.sleep(60)"))
    assert second.code == processes.PEER_LOST and "could not be taken (TypeError" in second.text
    assert first.code == processes.PEER_LOST
