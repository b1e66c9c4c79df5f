"""Following many writers of which most have ended: what a poll costs, on a folder and on an object store."""

import os
import shutil
import time
import uuid

import numpy as np
import pytest

from tba_jax.replay import log as polling
from tba_jax.replay.index import ReplayIndex
from tba_jax.replay.log import REGISTER
from tba_jax.replay.reader import LogReader
from tba_jax.replay.tail import Tail
from tba_jax.storage import places
from tests.support.tiny_log import SHAPE, make_rows, writer


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def asked(monkeypatch) -> list[str]:
    """What places are asked for: each writer's name for its head, "" for any other."""
    names: list[str] = []
    changed, names_in = places.changed, places.names_in
    monkeypatch.setattr(
        places, "changed", lambda files: (names.extend(k if isinstance(k, str) else "" for k in files), changed(files))[1]
    )
    monkeypatch.setattr(places, "names_in", lambda *a, **k: (names.append(""), names_in(*a, **k))[1])
    return names


def make_dead(root, count: int, *, quiet_seconds: float) -> None:
    """Copies of a writer that made one append and ended so long ago."""
    writer(root, "dead").append(make_rows(0, 4))
    described, at = (root / REGISTER / "dead.json").read_bytes(), time.time() - quiet_seconds
    for number in range(count):
        shutil.copytree(root / "dead", root / f"dead-{number}")
        os.utime(root / f"dead-{number}" / "000000", (at, at))
        (root / REGISTER / f"dead-{number}.json").write_bytes(described)
    os.utime(root / "dead" / "000000", (at, at))


def follow(root, **settings) -> tuple[LogReader, Tail, ReplayIndex]:
    reader = LogReader(root, SHAPE, **settings)
    tail = Tail(reader, {}, poll_seconds=0.2)
    index = ReplayIndex(shape=SHAPE, capacity=500, capacity_per_query=99, vocab_size=100)
    tail.poll(spare_quiet=True)
    tail.integrate(index, step=0)
    return reader, tail, index


def test_writers_that_have_ended_cost_a_poll_nothing(tmp_path, clock, asked):
    make_dead(tmp_path, 90, quiet_seconds=3600)
    reader, tail, index = follow(tmp_path)
    assert len(reader.heads()) == 91 and sum(index.heads.values()) == 4 * 91
    live = writer(tmp_path, "live", segment_appends=100)
    live.append(make_rows(0, 4))
    tail.poll()
    clock[0] += 6  # the folder has settled
    tail.poll()
    asked.clear()
    for _ in range(20):
        clock[0] += 0.1
        live.append(make_rows(live.next_row, 4))
        tail.poll(spare_quiet=True)
        tail.integrate(index, step=0)
        assert index.heads["live"] == live.next_row, "who is at work is heard at once"
    assert asked.count("live") >= 20 and len(asked) <= 45, asked
    assert len(reader._segments) < 80


def test_a_writer_is_asked_ever_less_often_and_at_once_again_when_it_is_back(tmp_path, clock):
    assert [polling.pause_seconds(quiet) for quiet in (0, 59, 61, 120, 3600, 86_400)] == [0, 0, 61 / 12, 10, 300, 1800]
    assert polling.pause_seconds(60) == polling.QUIET_POLL_SECONDS
    log = writer(tmp_path, segment_appends=100)
    log.append(make_rows(0, 4))
    _, tail, index = follow(tmp_path)
    clock[0] += 61
    tail.poll(spare_quiet=True)  # quiet from now on
    log.append(make_rows(4, 4))
    tail.poll(spare_quiet=True)
    tail.integrate(index, step=0)
    assert index.heads["w0"] == 4
    clock[0] += 6
    for head in (8, 12, 16):
        if head > 8:
            log.append(make_rows(log.next_row, 4))
        tail.poll(spare_quiet=True)
        tail.integrate(index, step=0)
        assert index.heads["w0"] == head


@pytest.mark.parametrize(("limit", "mounts", "dead"), [(120, 3, 4), (1200, 0, 60)])
def test_requests_have_a_limit_that_keeps_no_rows_from_the_trainer(limit, mounts, dead, clock, asked):
    places_of_runs = [places.place(f"memory://runs/{uuid.uuid4().hex}") for _ in range(1 + mounts)]
    for number, place in enumerate(places_of_runs):
        for each in range(dead):
            writer(place, f"dead-{number}-{each}").append(make_rows(0, 4))
    live = writer(places_of_runs[0], "live", segment_appends=1000)
    reader = LogReader(places_of_runs[0], SHAPE, mounts=places_of_runs[1:], requests_per_minute=limit)
    reader.news(spare_quiet=True)
    asked.clear()
    behind = []
    for poll in range(150):
        clock[0] += places.OBJECT_STORE_POLL_SECONDS
        if poll % 10 == 0:
            live.append(make_rows(live.next_row, 4))
        reader.news(spare_quiet=True)
        behind.append(live.next_row - reader._followed["live"].rows)
    assert np.mean(behind) < 20 and behind[-1] <= 12, behind[-20:]
    minutes = 150 * places.OBJECT_STORE_POLL_SECONDS / 60
    assert len(asked) < limit * (minutes + polling.BURST_SECONDS / 60) + 60, len(asked)
