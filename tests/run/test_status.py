"""What a role says of itself, as the supervisor reads it."""

import dataclasses
import os
import time

import pytest

from tba_jax.telemetry import status
from tba_jax.telemetry.record import Record


def said(folder) -> status.Told:
    """What was said, whoever said it when."""
    return dataclasses.replace(status.read(folder), time=0.0, pid=0)


def test_what_is_said_is_read(tmp_path):
    told = status.Status(tmp_path)
    assert said(tmp_path) == status.Told() == status.read(tmp_path / "nobody")
    told.waits("rows", seconds=42.0)
    told.trouble("no row has a reward")
    read = status.read(tmp_path)
    assert (read.waits, read.trouble) == ("rows", "no row has a reward") and 41 <= read.seconds <= 44
    told.waits("", seconds=0.0)
    told.trouble("")
    assert said(tmp_path) == status.Told()


def test_a_status_is_as_old_as_its_writing_and_no_older(tmp_path):
    """Readers drop what was written before a role's start, so that a time that is rounded down would be dropped with it."""
    began = 1_000_000.00049
    status.Status(tmp_path, clock=lambda: began)
    assert status.read(tmp_path).time >= began


def test_a_sentence_that_changes_all_the_time_is_written_now_and_then(tmp_path):
    now = time.time()
    told = status.Status(tmp_path, clock=lambda: now)
    told.waits("rows, 1 s", seconds=1.0)
    told.waits("rows, 2 s", seconds=2.0)
    assert status.read(tmp_path).waits == "rows, 1 s"
    now += 2.5
    told.waits("rows, 5 s", seconds=5.0)
    assert status.read(tmp_path).waits == "rows, 5 s"


def test_storage_that_refuses_stops_nobody(tmp_path):
    told = status.Status(tmp_path / "gone")
    told.waits("rows", seconds=1.0)
    assert not (tmp_path / "gone").exists()
    for damaged in (b'{"waits": "ro', b"\xff\xfe{}", b"[]", b""):
        (tmp_path / "status.json").write_bytes(damaged)
        assert status.read(tmp_path) == status.Told()


def test_a_phase_is_told_with_its_parts_and_since_when(tmp_path):
    now = time.time() - 40
    told = status.Status(tmp_path, clock=lambda: now)
    told.phase("warm start", done=1, total=400)
    told.phase("warm start", done=2, total=400)  # too soon to be written
    assert status.read(tmp_path).done == 1
    now += 30
    told.phase("warm start", done=300, total=400)
    read = status.read(tmp_path)
    assert (read.phase, read.done, read.total, read.pid) == ("warm start", 300, 400, os.getpid())
    assert 39 < read.phase_seconds < 60 and abs(read.time - now) < 0.01
    told.phase("")
    read = status.read(tmp_path)
    assert (read.phase, read.phase_seconds, read.done, read.total) == ("", 0.0, 0, 0)


def test_a_phase_within_a_phase_gives_way_to_it_again(tmp_path):
    told = status.Status(tmp_path)
    told.phase("replaying steps of the journal", done=3, total=9)
    with told.during("compiling the update"):
        assert (status.read(tmp_path).phase, status.read(tmp_path).total) == ("compiling the update", 0)
    read = status.read(tmp_path)
    assert (read.phase, read.done, read.total) == ("replaying steps of the journal", 3, 9)


def test_a_phase_that_is_over_at_once_is_not_written(tmp_path):
    record = Record(tmp_path / "trainer")
    with record.status.during("compiling a program", at_once=False):
        assert status.read(tmp_path / "trainer").phase == ""
    with record.status.during("compiling another program", at_once=False):
        end = time.monotonic() + 10
        while not status.read(tmp_path / "trainer").phase and time.monotonic() < end:
            time.sleep(0.05)
        assert status.read(tmp_path / "trainer").phase == "compiling another program"
    record.close("finished")


def test_what_the_last_life_said_holds_no_more_in_the_next(tmp_path):
    last = status.Status(tmp_path)
    last.phase("compiling the update")
    last.waits("rows", seconds=42.0)
    last.trouble("no row has a reward")
    status.Status(tmp_path)
    assert said(tmp_path) == status.Told() and status.read(tmp_path).pid == os.getpid()


def test_the_status_of_an_older_version_is_read(tmp_path):
    (tmp_path / "status.json").write_text('{"waits": "rows", "since": 1.0, "trouble": ""}')
    assert (status.read(tmp_path).waits, status.read(tmp_path).phase) == ("rows", "")


@pytest.mark.parametrize(
    "told", ["[]", "null", "[" * 100_000, '{"time": "x"}', '{"phase": 5}', '{"waits": "w", "since": null}', '{"phase_of": [1]}',
             '{"phase_of": ["a", 1]}', '{"time": 1e400}', '{"time": 1' + "0" * 400 + "}", '{"time": NaN}'],
)  # fmt: skip
def test_a_damaged_status_says_nothing(tmp_path, told):
    (tmp_path / "status.json").write_text(told)
    assert status.read(tmp_path) == status.Told()
