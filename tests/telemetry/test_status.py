"""What a role says of itself, as others read it."""

import dataclasses
import os
import time

import pytest

from tba_jax.telemetry import status


def said(folder) -> status.Told:
    """What was said, whoever said it when."""
    return dataclasses.replace(status.read(folder), time=0.0, pid=0)


def test_what_is_said_is_read_and_gone_with_the_next_life(tmp_path):
    told = status.Status(tmp_path, process={"host": "here"})
    assert said(tmp_path) == status.Told(process={"host": "here"})
    assert status.read(tmp_path / "nobody") == status.Told()
    told.waits("rows", seconds=42.0)
    told.trouble("no row has a reward")
    read = status.read(tmp_path)
    assert (read.waits, read.trouble, read.pid) == ("rows", "no row has a reward", os.getpid()) and 41 <= read.seconds <= 44
    told.waits("", seconds=0.0)
    told.trouble("")
    assert said(tmp_path) == status.Told(process={"host": "here"})
    told.phase("compiling the update")
    status.Status(tmp_path, step=7)
    assert said(tmp_path) == status.Told(step=7)


def test_what_changes_all_the_time_is_written_now_and_then(tmp_path):
    began = now = time.time()
    told = status.Status(tmp_path, clock=lambda: now)
    told.waits("rows, 1 s", seconds=1.0)
    told.waits("rows, 2 s", seconds=2.0)
    assert status.read(tmp_path).waits == "rows, 1 s" and status.read(tmp_path).time >= began
    now += status.REWRITE_SECONDS
    told.point({"reward": 0.5})
    told.step = 9
    told.waits("rows, 5 s", seconds=5.0)
    read = status.read(tmp_path)
    assert (read.waits, read.step, read.figures) == ("rows, 5 s", 9, {"reward": 0.5})
    now += status.REWRITE_SECONDS
    told.flush()
    assert status.read(tmp_path).time < now, "nothing has changed"
    now += status.HEARTBEAT_SECONDS
    told.flush()
    assert status.read(tmp_path).time == now


def test_a_phase_is_told_with_its_parts_and_gives_way_to_one_within_it(tmp_path):
    now = time.time() - 40
    told = status.Status(tmp_path, clock=lambda: now)
    told.phase("warm start", done=1, total=400)
    told.phase("warm start", done=2, total=400)  # too soon to be written
    assert status.read(tmp_path).done == 1
    now += 30
    told.phase("warm start", done=300, total=400)
    read = status.read(tmp_path)
    assert (read.phase, read.done, read.total) == ("warm start", 300, 400) and 39 < read.phase_seconds < 60
    with told.during("compiling the update"):
        assert (status.read(tmp_path).phase, status.read(tmp_path).total) == ("compiling the update", 0)
    read = status.read(tmp_path)
    assert (read.phase, read.done, read.total) == ("warm start", 300, 400)
    with told.during("compiling a program", at_once=False):
        assert status.read(tmp_path).phase == "warm start"
    told.phase("")
    assert (status.read(tmp_path).phase, status.read(tmp_path).phase_seconds) == ("", 0.0)


def test_storage_that_refuses_stops_nobody(tmp_path):
    told = status.Status(tmp_path / "gone")
    told.waits("rows", seconds=1.0)
    assert not (tmp_path / "gone").exists()


@pytest.mark.parametrize(
    "told",
    [
        *('{"waits": "ro', "[]", "", "null", "[" * 100_000, '{"time": "x"}', '{"phase": 5}', '{"waits": "w", "since": null}'),
        *('{"phase_of": [1]}', '{"time": 1e400}', '{"time": 1' + "0" * 400 + "}", '{"time": NaN}', '{"figures": {"a": "b"}}'),
    ],
)
def test_a_damaged_status_says_nothing(tmp_path, told):
    (tmp_path / "status.json").write_text(told)
    assert status.read(tmp_path) == status.Told()
