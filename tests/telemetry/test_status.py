"""What a role's process tells of itself, from its beginning to its end, as others read it."""

import dataclasses
import os
import threading
import time

import jax
import jax.numpy as jnp
import pytest

from tba_jax.experiment import training
from tba_jax.storage import contract, layout
from tba_jax.telemetry import status
from tba_jax.telemetry.status import Profiler, Record, Status, TimeAccount, Told, Window
from tests.support import tiny_run

pytestmark = pytest.mark.usefixtures("one_device_throughout")


@pytest.fixture(autouse=True)
def by_hand(monkeypatch):
    monkeypatch.setattr(status, "FLUSH_SECONDS", 1000.0)


def said(told: Status, folder) -> Told:
    told.flush()
    return dataclasses.replace(status.read(folder), time=0.0, pid=0)


def test_what_is_said_is_read_and_gone_with_the_next_life(tmp_path):
    told = Status(tmp_path, process={"host": "here"})
    assert said(told, tmp_path) == Told(process={"host": "here"}) and status.read(tmp_path / "nobody") == Told()
    told.waits("rows", seconds=42.0)
    told.trouble("no row has a reward")
    told.point({"reward": 0.5})
    told.step = 9
    read = said(told, tmp_path)
    assert (read.waits, read.trouble, read.step, read.figures) == ("rows", "no row has a reward", 9, {"reward": 0.5})
    assert 41 <= time.time() - read.since <= 44 and status.read(tmp_path).pid == os.getpid()
    told.close("finished")
    assert status.read(tmp_path).phase == "finished" and status.read(tmp_path).waits == ""
    assert said(Status(tmp_path, step=7), tmp_path) == Told(step=7)


@pytest.mark.parametrize(("heartbeat", "again"), [(0.02, True), (1000.0, False)])
def test_a_thread_writes_what_changes_and_that_the_process_lives(tmp_path, monkeypatch, heartbeat, again):
    monkeypatch.setattr(status, "FLUSH_SECONDS", 0.01)
    monkeypatch.setattr(status, "HEARTBEAT_SECONDS", heartbeat)
    before, deadline = {*threading.enumerate()}, time.monotonic() + 30
    told = Status(tmp_path)
    told.phase("loading")
    while not status.read(tmp_path).phase and time.monotonic() < deadline:
        time.sleep(0.01)
    written = status.read(tmp_path).time
    time.sleep(0.15)
    assert status.read(tmp_path).phase == "loading" and (status.read(tmp_path).time > written) == again
    del told
    time.sleep(0.1)
    assert not {*threading.enumerate()} - before, "it ends with what nobody closes"


DAMAGED = ('{"waits": "ro', "[]", "", "[" * 100_000, '{"time": "x"}', '{"phase": 5}', '{"waits": "w", "since": null}')
DAMAGED += ('{"done": [1]}', '{"time": 1e400}', '{"time": NaN}', '{"figures": {"a": "b"}}')


def test_a_damaged_status_says_nothing_and_storage_that_refuses_stops_nobody(tmp_path):
    for told in DAMAGED:
        (tmp_path / "status.json").write_text(told)
        assert status.read(tmp_path) == Told(), told[:40]
    Status(tmp_path / "gone").close("stopped")
    assert not (tmp_path / "gone").exists()


def test_a_compilation_is_the_phase_while_it_lasts_and_an_error_what_a_role_says_last(tmp_path, monkeypatch):
    made, phases = Record(tmp_path / "trainer"), list[str]()
    phase = Status.phase
    monkeypatch.setattr(Status, "phase", lambda self, said, **parts: (phase(self, said, **parts), phases.append(self.now)))

    def deep(x: jax.Array) -> jax.Array:
        return jnp.sin(x @ x + time.time())  # another program in each process

    jax.jit(deep)(jnp.ones((4, 4)))
    assert "compiling a program" in phases and made.status.now == ""
    made.status.step = 3
    with pytest.raises(OSError), made.told_failures():
        raise OSError(28, "No space \x1b[31mleft\nsecond line")
    told = status.read(tmp_path / "trainer")
    assert (told.phase, told.step) == (r"OSError: [Errno 28] No space \x1b[31mleft", 3)


def test_the_log_says_why_a_role_ends_also_where_storage_does_not(tmp_path, caplog):
    s = tiny_run.settings(tmp_path / "run", tiny_run.config())
    contract.join(s.run, s.config, s.experiment.contract)

    def told(run: layout.RunDir) -> str:
        training.record_of(s, "searcher-0").end(run, role="searcher")
        return f"{status.read(s.run.metrics('searcher-0')).phase}: {caplog.messages[-1]}"

    with caplog.at_level("INFO", logger="tba_jax"):
        assert told(s.run) == "stopped: stopped; the same command starts this searcher again"
        layout.write_json(s.run.finished, {"step": s.config.learner.steps})
        assert told(s.run).startswith(f"finished: the run in {s.run.root} has finished its {s.config.learner.steps} steps")
        assert told(dataclasses.replace(s.run, id="another")).startswith("stopped")  # RunIsAway


def test_a_trainer_is_traced_in_its_window_with_the_names_of_its_work_and_batches_from_its_weights_on(tmp_path, monkeypatch):
    made = Record(traces=tmp_path / "profiles" / "trainer", profile=Window(2, 2))
    account = TimeAccount(made)
    made.profiler.step(1)
    for step in range(1, 6):
        with account.measure(f"work of step {step}"):
            jax.jit(jnp.sin)(jnp.ones((8, 8))).block_until_ready()
        made.profiler.step(step)  # there were no rows for it at first
        made.profiler.step(step + 1)
    (trace,) = (file.read_bytes() for file in tmp_path.rglob("*.xplane.pb"))
    assert [f"work of step {step}".encode() in trace for step in range(1, 6)] == [False, True, True, False, False]
    calls: list[str] = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda folder, **_: calls.append("start"))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: calls.append("stop"))
    profiler, counts = Profiler(tmp_path, Window(5, 2)), []
    for policy_step in (0, 3, 6, 6, 8, 9):
        profiler.batch(policy_step)
        counts.append(len(calls))
    assert counts == [0, 0, 1, 1, 2, 2] and calls == ["start", "stop"]


def test_shares_of_time_are_those_of_the_clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    account = TimeAccount()
    for name, seconds, idle in (("wait", 1.0, 0.0), ("update", 2.0, 0.5), ("wait", 0.5, 0.0)):
        with account.measure(name):
            now[0] += seconds
        now[0] += idle
    assert account.shares() == pytest.approx({"time_wait": 1.5 / 4, "time_update": 0.5, "time_other": 0.125})
