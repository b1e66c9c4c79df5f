"""How the processes of a trainer meet: what does not fit is refused by one sentence, in every process that is there."""

import json
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from tba_jax.roles import rendezvous
from tba_jax.roles.wire import Wire, find_key, proof
from tba_jax.run import processes, world
from tests.support import tiny_run
from tests.support import trainer_processes as trainers

MEETING = """
import json, sys
from pathlib import Path
from tba_jax.run import processes, world
from tba_jax.roles import rendezvous

given = json.loads(sys.argv[1])
rendezvous._versions = lambda versions=rendezvous._versions(): versions | given.get("versions", {})
limits = rendezvous.Limits(connect_seconds=given["seconds"], heartbeat_seconds=5.0)
here = world.World(process=given["process"], processes=given["processes"], coordinator=given["coordinator"])
try:
    met = rendezvous.meet(here, workdir=Path(given["workdir"]), settings=given["settings"], visible_gpus=0, limits=limits)
except ValueError as error:
    print("refused:", error)
    sys.exit(2)
except processes.PeerLost as error:
    print("lost:", error)
    sys.exit(6)
import jax
print("devices", jax.device_count(), jax.local_device_count())
if given["process"] == 0:
    met.end(7)
else:
    assert list(met.calls()) == []
    met.end()
    sys.exit(met.code)
"""


def start(workdir: Path, port: int, *, code: str = MEETING, **changes) -> subprocess.Popen[str]:
    given = dict(process=0, processes=2, coordinator=f"127.0.0.1:{port}", workdir=str(workdir), settings={"a": 1}, seconds=20.0)
    return subprocess.Popen(
        [sys.executable, "-c", code, json.dumps(given | changes)],
        env=tiny_run.environment(),
        cwd=tiny_run.ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def meet(workdir: Path, first: dict, second: dict) -> list[trainers.Ended]:
    port = trainers.free_port()
    return trainers.wait([start(workdir, port, **first), start(workdir, port, **({"process": 1} | second))], seconds=90)


def test_two_processes_meet_and_end_together(tmp_path):
    first, second = meet(tmp_path / "run", {}, {})
    assert (first.code, second.code) == (0, 7), first.text + second.text
    assert "devices 2 1" in first.text and "devices 2 1" in second.text
    assert not (tmp_path / "run").exists(), "the key is removed, and a meeting makes no run"


@pytest.mark.parametrize(
    "changes, told",
    [
        ({"settings": {"a": 2}}, "other settings than process 0"),
        ({"versions": {"jax": "0.1"}}, "other versions than process 0"),
        ({"processes": 3}, "--processes=3 of process 1"),
    ],
    ids=["settings", "versions", "processes"],
)
def test_processes_that_would_not_compute_the_same_are_refused_everywhere(tmp_path, changes, told):
    for each in meet(tmp_path / "run", {}, changes):
        assert each.code == 2 and told in each.text, each.text
    assert not (tmp_path / "run").exists(), "nothing is left of a meeting that failed"


def test_two_processes_of_one_number_are_refused(tmp_path):
    port = trainers.free_port()
    three = [start(tmp_path / "run", port, process=number, processes=3) for number in (0, 1, 1)]
    for each in trainers.wait(three, seconds=90):
        assert each.code == 2 and "two processes of this trainer have --process=1" in each.text, each.text


def test_the_end_of_process_0_in_the_meeting_is_no_mistake(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        process = start(tmp_path, listener.getsockname()[1], process=1)
        listener.settimeout(60)
        wire = Wire(listener.accept()[0])
        wire.send("greeting", {"id": "some", "nonce": "some", "workdir": str(tmp_path), "host": "first"})
        wire.close()
    (ended,) = trainers.wait([process], seconds=60)
    # It ends while it looks for the key, which went with process 0.
    assert ended.code == processes.PEER_LOST and "process 0 (first) of this trainer ended" in ended.text, ended.text


def test_a_process_that_ends_in_the_meeting_may_come_again(tmp_path):
    port = trainers.free_port()
    first = start(tmp_path, port, processes=3, seconds=60.0)
    given = world.World(process=1, processes=3, coordinator=f"127.0.0.1:{port}")
    limits = rendezvous.Limits(connect_seconds=60.0, heartbeat_seconds=5.0)
    wire = rendezvous._connect(given, limits)
    greeting = wire.receive().content
    key = find_key(tmp_path, greeting["id"], wire, seconds=10)
    hello = dict(process=1, processes=3, host="lost", workdir=str(tmp_path), versions=rendezvous._versions(), settings={"a": 1})
    wire.send("hello", {"hello": hello, "nonce": "n", "proof": proof(key, greeting["nonce"], hello)})
    assert wire.receive().kind == "welcome"
    wire.close()
    others = [start(tmp_path, port, process=process, processes=3, seconds=60.0) for process in (1, 2)]
    ended = trainers.wait([first, *others], seconds=90)
    assert [each.code for each in ended] == [0, 7, 7], "\n".join(each.text for each in ended)
    assert "process 1 of the trainer has ended while it waited" in ended[0].text


def test_a_coordinator_that_does_not_answer_is_told_after_the_limit(tmp_path):
    port = trainers.free_port()
    (alone,) = trainers.wait([start(tmp_path / "run", port, process=1, seconds=1.0)], seconds=60)
    assert alone.code == 2 and f"--coordinator=127.0.0.1:{port} has not answered process 1" in alone.text
    assert "trainer.connect_seconds=1" in alone.text


def test_a_process_that_does_not_come_is_told_after_the_limit(tmp_path):
    (alone,) = trainers.wait([start(tmp_path / "run", trainers.free_port(), processes=4, seconds=1.0)], seconds=60)
    assert alone.code == 2 and "process 1, 2, 3 has not come" in alone.text and not (tmp_path / "run").exists()


def test_a_port_that_is_taken_is_told(tmp_path):
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        (alone,) = trainers.wait([start(tmp_path / "run", port)], seconds=60)
    assert alone.code == 2 and f"cannot listen on port {port}" in alone.text


def test_a_workdir_that_is_not_shared_is_told_by_both(tmp_path):
    """The other process has a folder of its own in the place of the workdir, as on another host."""
    if shutil.which("unshare") is None or subprocess.run(["unshare", "--mount", "true"], check=False).returncode:
        pytest.skip("this system cannot give a process a mount of its own (unshare --mount)")
    port = trainers.free_port()
    first = start(tmp_path / "run", port)
    own = tmp_path / "own"
    own.mkdir()
    (tmp_path / "run").mkdir(exist_ok=True)
    given = dict(process=1, processes=2, coordinator=f"127.0.0.1:{port}", settings={"a": 1}, seconds=2.0)
    given |= {"workdir": str(tmp_path / "run")}
    script = f'mount --bind {own} {tmp_path / "run"} && exec "$@"'
    second = subprocess.Popen(
        ["unshare", "--mount", "sh", "-c", script, "sh", sys.executable, "-c", MEETING, json.dumps(given)],
        env=tiny_run.environment(),
        cwd=tiny_run.ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    for each in trainers.wait([first, second], seconds=90):
        assert each.code == 2 and "process 1" in each.text and "does not see trainer.key" in each.text, each.text


def test_another_run_on_the_coordinator_is_told_and_does_not_end_this_one(tmp_path):
    port = trainers.free_port()
    first = start(tmp_path / "run", port)
    stranger = start(tmp_path / "other", port, process=1, seconds=2.0)
    (ended,) = trainers.wait([stranger], seconds=90)
    assert ended.code == 2 and "another run uses this --coordinator" in ended.text, ended.text
    second = start(tmp_path / "run", port, process=1)
    assert [each.code for each in trainers.wait([first, second], seconds=90)] == [0, 7]


def test_what_is_no_trainer_is_sent_away(tmp_path):
    """HTTP, JSON, nothing, and what asks for more memory than there is."""
    port = trainers.free_port()
    first = start(tmp_path / "run", port)
    headers = [json.dumps({"kind": "hello", "content": {}, "arrays": [["a", "<f4", [1 << n]]]}).encode() for n in (50, 70)]
    sent = [b"GET / HTTP/1.1\r\n\r\n", b"\x00" * 7 + b"\x02{}", b"", *(struct.pack("!Q", len(each)) + each for each in headers)]
    while sent:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=5) as connected:
                connected.sendall(sent[-1])
            sent.pop()
        except ConnectionRefusedError:
            assert first.poll() is None, first.communicate()
    second = start(tmp_path / "run", port, process=1)
    assert [each.code for each in trainers.wait([first, second], seconds=90)] == [0, 7]


def test_a_process_without_the_key_is_not_let_in(tmp_path):
    """Who knows the protocol, and cannot read the workdir, cannot prove it."""
    port = trainers.free_port()
    first = start(tmp_path / "run", port)
    while True:
        try:
            wire = Wire(socket.create_connection(("127.0.0.1", port), timeout=5))
            break
        except ConnectionRefusedError:
            assert first.poll() is None, first.communicate()
    hello = {"process": 1, "processes": 2, "host": "x", "workdir": str(tmp_path), "versions": {}, "settings": {}}
    assert wire.receive().kind == "greeting"
    wire.send("hello", {"hello": hello, "nonce": "00", "proof": "00" * 32})
    with pytest.raises(EOFError):
        wire.receive()
    wire.close()
    second = start(tmp_path / "run", port, process=1)
    assert [each.code for each in trainers.wait([first, second], seconds=90)] == [0, 7]


def test_who_is_silent_keeps_nobody_waiting(tmp_path):
    port = trainers.free_port()
    first = start(tmp_path / "run", port)
    while True:
        try:
            silent = socket.create_connection(("127.0.0.1", port), timeout=5)
            break
        except ConnectionRefusedError:
            assert first.poll() is None, first.communicate()
    begin = time.monotonic()
    second = start(tmp_path / "run", port, process=1)
    assert [each.code for each in trainers.wait([first, second], seconds=90)] == [0, 7]
    assert time.monotonic() - begin < 15.0
    silent.close()


def test_a_process_that_comes_after_a_refusal_is_told_as_well(tmp_path):
    port = trainers.free_port()
    two = [start(tmp_path / "run", port, process=number, processes=3, settings={"a": number}) for number in (0, 1)]
    time.sleep(3.0)
    late = start(tmp_path / "run", port, process=2, processes=3)
    for each in trainers.wait([*two, late], seconds=90):
        assert each.code == 2 and "other settings than process 0" in each.text, each.text


def test_a_process_that_ends_while_jax_starts_ends_the_others_at_once(tmp_path):
    port = trainers.free_port()
    dying = "import os\n" + MEETING.replace("met = ", "rendezvous._start_jax = lambda *_: os._exit(9)\n    met = ")
    first = start(tmp_path / "run", port, seconds=60.0)
    second = start(tmp_path / "run", port, process=1, code=dying)
    begin = time.monotonic()
    ended, _ = trainers.wait([first, second], seconds=90)
    assert ended.code == processes.PEER_LOST and "process 1" in ended.text, ended.text
    assert time.monotonic() - begin < 20.0


def test_a_wire_carries_arrays_of_any_shape():
    with socket.create_server(("127.0.0.1", 0)) as server:
        here = socket.create_connection(server.getsockname())
        ends = [Wire(here), Wire(server.accept()[0])]
    arrays = {"a": np.arange(12, dtype=np.float32).reshape(3, 4).T, "b": np.zeros((0, 5), np.int64), "c": np.array(7)}
    large = {"d": np.arange(1 << 20)}
    sender = threading.Thread(target=lambda: [ends[0].send("call", {"x": [1]}, each) for each in (arrays, large)])
    sender.start()
    first, second = ends[1].receive(), ends[1].receive()
    sender.join()
    assert first.kind == "call" and first.content == {"x": [1]}
    for name, array in arrays.items():
        np.testing.assert_array_equal(first.arrays[name], array)
        assert first.arrays[name].dtype == array.dtype and first.arrays[name].flags.writeable
    np.testing.assert_array_equal(second.arrays["d"], large["d"])
    ends[0].close()
    with pytest.raises(EOFError):
        ends[1].receive()
