"""How the processes of a trainer meet: what does not fit is refused by one sentence, in every process that is there.

Threads stand for the processes, and JAX is not started among them; tests/whole_runs/test_trainer_processes.py starts some.
"""

import contextlib
import json
import socket
import struct
import threading
import time
from concurrent.futures import Future

import numpy as np
import pytest

from tba_jax.roles import rendezvous
from tba_jax.roles import wire as wire_lib
from tba_jax.roles.wire import Wire
from tba_jax.run.world import World
from tests.support import trainer_processes as trainers


class Met:
    def __init__(self, *_, **__):
        pass

    def guard(self, *_) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


@pytest.fixture
def meets(tmp_path, monkeypatch):
    """meets(…) lets a process come to the meeting, in a thread; returns the future of its group. meets.port: of process 0."""
    for name in ("Leader", "Member"):
        monkeypatch.setattr(rendezvous, name, Met)
    monkeypatch.setattr(rendezvous, "_start_jax", lambda *_: None)
    monkeypatch.setattr(rendezvous, "_REFUSE_SECONDS", 0.2)
    monkeypatch.setattr(wire_lib, "TRY_AGAIN_SECONDS", 0.02)
    monkeypatch.setattr(rendezvous, "_versions", lambda: {"jax": getattr(threading.current_thread(), "version", "1")})

    def meet(process=0, *, processes=2, workdir=tmp_path / "run", settings=None, version="1", seconds=20.0) -> Future:
        here = World(process=process, processes=processes, coordinator=f"127.0.0.1:{meet.port}")
        limits, found = rendezvous.Limits(connect_seconds=seconds, heartbeat_seconds=5.0), Future()
        given = dict(workdir=workdir, settings=settings or {"a": 1}, visible_gpus=0, limits=limits)

        def come() -> None:
            try:
                found.set_result(rendezvous.meet(here, **given))
            except Exception as error:
                found.set_exception(error)

        thread = threading.Thread(target=come, daemon=True)
        thread.version = version
        thread.start()
        return found

    meet.port = trainers.free_port()
    return meet


def refused(*futures: Future) -> list[str]:
    """The sentences by which processes are refused."""
    errors = [future.exception(timeout=30) for future in futures]
    assert all(isinstance(error, ValueError) for error in errors), errors
    return [str(error) for error in errors]


def met(*futures: Future) -> bool:
    return all(isinstance(future.result(timeout=30), Met) for future in futures)


def connected(port: int) -> socket.socket:
    """A connection to process 0, which may not listen yet."""
    while True:
        with contextlib.suppress(ConnectionRefusedError):
            return socket.create_connection(("127.0.0.1", port), timeout=5)
        time.sleep(0.02)


@pytest.mark.parametrize(
    "changes, told",
    [
        ({"settings": {"a": 2}}, "other settings than process 0"),
        ({"version": "0.1"}, "other versions than process 0"),
        ({"processes": 3}, "--processes=3 of process 1"),
    ],
    ids=["settings", "versions", "processes"],
)
def test_processes_that_would_not_compute_the_same_are_refused_everywhere(tmp_path, meets, changes, told):
    assert all(told in each for each in refused(meets(0), meets(1, **changes)))
    assert not (tmp_path / "run").exists(), "nothing is left of a meeting that failed"


def test_who_does_not_answer_or_come_is_told_after_the_limit(tmp_path, meets):
    (told,) = refused(meets(1, seconds=0.3))
    assert f"--coordinator=127.0.0.1:{meets.port} has not answered process 1" in told and "trainer.connect_seconds=0.3" in told
    (told,) = refused(meets(0, processes=4, seconds=0.3))
    assert "process 1, 2, 3 has not come" in told and not (tmp_path / "run").exists()


def test_a_workdir_that_is_not_shared_is_told_by_both(meets, monkeypatch):
    """The other process has a folder of its own in the place of the workdir, as on another host."""
    monkeypatch.setattr(wire_lib, "find_key", lambda *_, **__: None)
    assert all("process 1" in each and "does not see trainer.key" in each for each in refused(meets(0), meets(1)))


def test_another_run_on_the_coordinator_is_told_and_does_not_end_this_one(tmp_path, meets):
    first = meets(0)
    assert "another run uses this --coordinator" in refused(meets(1, workdir=tmp_path / "other", seconds=0.4))[0]
    assert met(first, meets(1))


def test_what_is_no_trainer_is_sent_away(meets):
    """HTTP, JSON, nothing, silence, and what asks for more memory than there is."""
    first = meets(0)
    headers = [json.dumps({"kind": "hello", "content": {}, "arrays": [["a", "<f4", [1 << n]]]}).encode() for n in (50, 70)]
    sent = [b"GET / HTTP/1.1\r\n\r\n", b"\x00" * 7 + b"\x02{}", b"", *(struct.pack("!Q", len(each)) + each for each in headers)]
    silent = connected(meets.port)
    for each in sent:
        with connected(meets.port) as other:
            other.sendall(each)
    assert met(first, meets(1))
    silent.close()


def test_a_process_without_the_key_is_not_let_in(tmp_path, meets):
    """Who knows the protocol, and cannot read the workdir, cannot prove it."""
    first, wire = meets(0), Wire(connected(meets.port))
    hello = {"process": 1, "processes": 2, "host": "x", "workdir": str(tmp_path), "versions": {}, "settings": {}}
    assert wire.receive().kind == "greeting"
    wire.send("hello", {"hello": hello, "nonce": "00", "proof": "00" * 32})
    with pytest.raises(EOFError):
        wire.receive()
    wire.close()
    assert met(first, meets(1))


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
