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
import os, socket, sys, time, types
import numpy as np
sys.modules["jax"] = types.SimpleNamespace(distributed=types.SimpleNamespace(shutdown=lambda: None))
from tba_jax.roles import process_group
from tba_jax.roles.process_group import Leader, Member
from tba_jax.roles.wire import Wire

process_group._END_SECONDS = process_group._LAST_WORDS_SECONDS = 0.5
number, port = int(sys.argv[1]), int(sys.argv[2])
if number == 0:
    with socket.create_server(("127.0.0.1", port)) as server:
        print("listening", flush=True)
        wires = [Wire(server.accept()[0]) for _ in range(int(sys.argv[3]))]
    numbered = {wire.receive().content["process"]: wire for wire in wires}
    group = Leader(numbered, {each: "host" for each in numbered}, heartbeat_seconds=30.0)
else:
    wire = Wire(socket.create_connection(("127.0.0.1", port)))
    wire.send("hello", {"process": number})
    group = Member(wire, "host", process=number, processes=int(sys.argv[3]) + 1, heartbeat_seconds=30.0)
    noted = []
    time.sleep(0.1)  # the leader is ahead
    group.on_aside("note", lambda text: noted.append(text))
print("ready", flush=True)
"""


def start(leader: str, *members: str) -> list[subprocess.Popen[str]]:
    """Processes of a group. Args: leader, members: what each does once it is connected."""
    port, started = trainers.free_port(), []
    for number, code in enumerate((leader, *members)):
        command = [sys.executable, "-c", PROCESS + code, str(number), str(port), str(len(members))]
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
        print(name, content, {key: array.tolist() for key, array in arrays.items()}, noted, flush=True)
        if name == "tell":
            group.off_aside("note")
            group.report("told", process=number)
        if name == "next":
            group.on_aside("note", lambda text: noted.append(text))
group.end()
sys.exit(group.code)
"""


def test_calls_and_asides_come_in_order_and_all_end_with_one_code():
    leader = """
with group.guard():
    group.aside("note", text="beside")
    group.call("place", {"a": np.arange(3)})
    group.call("tell")
    print([report["process"] for report in group.reports("told")], flush=True)
    group.aside("note", text="later")
    group.call("next")
    group.call("update", step=1)
group.end(7)
sys.exit(7)
"""
    first, second = trainers.wait(start(leader, FOLLOW))
    assert first.code == second.code == 7 and "[1]" in first.text
    expected = ["place {} {'a': [0, 1, 2]} ['beside']", "tell {} {} ['beside']", "next {} {} ['beside']"]
    assert second.text.splitlines()[1:] == [*expected, "update {'step': 1} {} ['beside', 'later']"]


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failure_of_one_ends_all_by_its_sentence(failing):
    fails = "with group.guard(ValueError):\n    raise FloatingPointError('it is not finite')"
    leader = fails if failing == 0 else "group.call('fail')\ntime.sleep(60)"
    ended = trainers.wait(start(leader, FOLLOW, "time.sleep(60)"))
    for number, each in enumerate(ended):
        assert each.code in (processes.NOT_FINITE, 1 if number == failing else processes.NOT_FINITE), each.text
        assert re.search(r"of this trainer failed: it is not finite", each.text) or number == failing


def test_an_error_that_the_end_of_another_process_causes_is_told_as_that():
    """A collective fails in the main thread before the end of the connection is seen."""
    leader = "with group.guard():\n    time.sleep(0.1)\n    raise RuntimeError('Connection reset by peer')"
    first, _ = trainers.wait(start(leader, "time.sleep(0.2)\nos._exit(9)"))
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
