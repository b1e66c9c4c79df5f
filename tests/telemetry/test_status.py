"""What a role says of itself, as others read it."""

import dataclasses
import os
import threading
import time

import pytest

from tba_jax.telemetry import status


@pytest.fixture(autouse=True)
def by_hand(monkeypatch):
    """Nothing is written but by the test."""
    monkeypatch.setattr(status, "FLUSH_SECONDS", 1000.0)


def said(told: status.Status, folder) -> status.Told:
    """What was said, whoever said it when."""
    told.flush()
    return dataclasses.replace(status.read(folder), time=0.0, pid=0)


def test_what_is_said_is_read_and_gone_with_the_next_life(tmp_path):
    told = status.Status(tmp_path, process={"host": "here"})
    assert said(told, tmp_path) == status.Told(process={"host": "here"})
    assert status.read(tmp_path / "nobody") == status.Told()
    told.waits("rows", seconds=42.0)
    told.trouble("no row has a reward")
    told.point({"reward": 0.5})
    told.step = 9
    read = said(told, tmp_path)
    assert (read.waits, read.trouble, read.step, read.figures) == ("rows", "no row has a reward", 9, {"reward": 0.5})
    assert 41 <= time.time() - read.since <= 44 and status.read(tmp_path).pid == os.getpid()
    told.waits("", seconds=0.0)
    told.close("finished")
    assert status.read(tmp_path).phase == "finished" and status.read(tmp_path).waits == ""
    status.Status(tmp_path, step=7)
    assert said(status.Status(tmp_path, step=7), tmp_path) == status.Told(step=7)


def test_a_phase_is_told_with_its_parts_and_gives_way_to_one_within_it(tmp_path, monkeypatch):
    now = [1e9]
    monkeypatch.setattr(time, "time", lambda: now[0])
    told = status.Status(tmp_path)
    told.phase("warm start", done=1, total=400)
    now[0] += 30
    told.phase("warm start", done=300, total=400)
    read = said(told, tmp_path)
    assert (read.phase, read.done, read.total, read.phase_since) == ("warm start", 300, 400, 1e9)
    with told.during("compiling the update"):
        assert (said(told, tmp_path).phase, said(told, tmp_path).total) == ("compiling the update", 0)
    read = said(told, tmp_path)
    assert (read.phase, read.done, read.total) == ("warm start", 300, 400)
    told.phase("")
    assert (said(told, tmp_path).phase, said(told, tmp_path).phase_since) == ("", 0.0)


@pytest.mark.parametrize(("heartbeat", "again"), [(0.02, True), (1000.0, False)])
def test_a_thread_writes_what_changes_and_that_the_process_lives(tmp_path, monkeypatch, heartbeat, again):
    monkeypatch.setattr(status, "FLUSH_SECONDS", 0.01)
    monkeypatch.setattr(status, "HEARTBEAT_SECONDS", heartbeat)
    before = {*threading.enumerate()}
    told, deadline = status.Status(tmp_path), time.monotonic() + 30
    told.phase("loading")
    while not status.read(tmp_path).phase and time.monotonic() < deadline:
        time.sleep(0.01)
    written = status.read(tmp_path).time
    time.sleep(0.2)
    assert status.read(tmp_path).phase == "loading" and (status.read(tmp_path).time > written) == again
    del told
    time.sleep(0.1)
    assert not {*threading.enumerate()} - before, "it ends with what nobody closes"


def test_storage_that_refuses_stops_nobody(tmp_path):
    told = status.Status(tmp_path / "gone")
    told.waits("rows", seconds=1.0)
    told.close("stopped")
    assert not (tmp_path / "gone").exists()


@pytest.mark.parametrize(
    "told",
    [
        *('{"waits": "ro', "[]", "", "null", "[" * 100_000, '{"time": "x"}', '{"phase": 5}', '{"waits": "w", "since": null}'),
        *('{"done": [1]}', '{"time": 1e400}', '{"time": 1' + "0" * 400 + "}", '{"time": NaN}', '{"figures": {"a": "b"}}'),
    ],
)
def test_a_damaged_status_says_nothing(tmp_path, told):
    (tmp_path / "status.json").write_text(told)
    assert status.read(tmp_path) == status.Told()
