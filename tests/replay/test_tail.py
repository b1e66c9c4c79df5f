"""Following many writers: what a poll costs, and that it hands over every row once."""

import builtins
import io
import os
import time
from pathlib import Path

import numpy as np
import pytest

from tba_jax.replay import gaps
from tba_jax.replay.expiry import remove_segments
from tba_jax.replay.index import ReplayIndex
from tba_jax.replay.log import LogWriter
from tba_jax.replay.reader import LogReader
from tba_jax.replay.segment import LogSchema, Segment
from tba_jax.replay.tail import Tail
from tba_jax.storage import places
from tba_jax.trajectory import RowShape
from tests.support.tiny_log import integrate_again

SHAPE = RowShape(prompt_length=4, response_length=8, reward_parts=())
ROWS = 16


def make_rows(first: int) -> dict[str, np.ndarray]:
    rows = {name: np.zeros((ROWS, *row), dtype) for name, (dtype, row) in SHAPE.columns().items()}
    rows["row"] = np.arange(first, first + ROWS)
    rows["query_id"] = (rows["row"] // 8).astype(np.uint64)
    rows["response_length"][:] = 2
    rows["tokens"][:, 0] = rows["row"] % 100
    rows["tokens"][:, 1] = rows["row"] // 100 % 100
    return rows


def heads_of(told: list[dict]) -> dict[str, int]:
    """The heads after an integration."""
    return {writer: head for each in told for writer, head in each["heads"].items()}


class LongLog:
    """A log with a long past of which only the last append has bytes; appends go on from there.

    The folders of the full segments are empty. The last segment is a real one, and its first append stands at position 9.
    """

    def __init__(self, root: Path, writer: str, *, full_segments: int, segment_appends: int = 1000):
        LogWriter(root, writer, SHAPE, rows_per_append=ROWS, segment_appends=segment_appends, info={})  # registers it
        folders = [root / writer / f"{number:06d}" for number in range(full_segments + 1)]
        for folder in folders[:-1]:
            folder.mkdir(parents=True)
        schema = LogSchema(rows_per_append=ROWS, segment_appends=segment_appends, columns=SHAPE.columns(), reward_parts=())
        self.segment = Segment(folders[-1], schema, create=True)
        self.writer, self.past, self.position = writer, full_segments * segment_appends, 9
        self.append(make_rows(self.next_row))

    @property
    def next_row(self) -> int:
        return (self.past + self.position) * ROWS

    def append(self, rows: dict[str, np.ndarray]) -> None:
        appends = self.past + self.position + 1
        self.segment.append(self.position, rows, {"appends": appends, "rows": appends * ROWS})
        self.position += 1


def test_a_poll_of_64_writers_of_10_million_rows_is_fast(tmp_path):
    logs = [LongLog(tmp_path, f"w{number}", full_segments=10) for number in range(64)]
    past = LogReader(tmp_path, SHAPE).heads()
    assert sum(past.values()) > 10_000_000
    tail = Tail(LogReader(tmp_path, SHAPE), past, poll_seconds=1.0)
    index = ReplayIndex(shape=SHAPE, capacity=10_000, capacity_per_query=100, vocab_size=100)
    seconds = []
    for step in range(16):
        # Eight writers have news, each time others.
        writing = logs[8 * (step % 8) : 8 * (step % 8) + 8]
        for log in writing:
            log.append(make_rows(log.next_row))
        begin = time.perf_counter()
        tail.poll()
        told = tail.integrate(index, step=step)
        seconds.append(time.perf_counter() - begin)
        assert heads_of(told) == {log.writer: log.next_row for log in writing}
    assert len(index) + sum(entry["evicted"]["duplicate"] for entry in index.ledger().values()) == 16 * 8 * ROWS
    assert np.median(seconds) < 0.05, seconds


def count_file_accesses(monkeypatch, function) -> int:
    """Opened files, listed folders and asked-for names while `function` runs. It must not go through tensorstore."""
    count = 0

    def counting(original):
        def call(*arguments, **settings):
            nonlocal count
            count += 1
            return original(*arguments, **settings)

        return call

    def refused(*_):
        raise AssertionError("a quiet poll opens no segment")

    with monkeypatch.context() as patch:
        for module, name in [(io, "open"), (builtins, "open"), (os, "listdir"), (os, "scandir"), (os, "stat"), (os, "open")]:
            patch.setattr(module, name, counting(getattr(module, name)))
        for name in ("start_head", "start_read", "__init__"):
            patch.setattr(Segment, name, refused)
        function()
    return count


@pytest.mark.parametrize("full", [False, True])
def test_a_quiet_poll_costs_the_same_however_long_the_past(tmp_path, monkeypatch, full):
    counts = {}
    for segments in (1, 300):
        root = tmp_path / str(segments)
        logs = [LongLog(root, f"w{n}", full_segments=segments, segment_appends=10 if full else 11) for n in range(3)]
        tail = Tail(LogReader(root, SHAPE), {log.writer: log.next_row for log in logs}, poll_seconds=1.0)
        tail.poll()
        counts[segments] = count_file_accesses(monkeypatch, tail.poll)
    # What has expired, the folder, the register; of each writer its last manifest or, once the segment is full, its segments.
    assert counts[1] == counts[300] and 4 <= counts[1] <= 8, counts


def test_many_writers_keep_their_segments_open(tmp_path, monkeypatch):
    monkeypatch.setattr("tba_jax.replay.writers.SPARE_SEGMENTS", 1)
    logs = [LongLog(tmp_path, f"w{number}", full_segments=0) for number in range(5)]
    tail = Tail(LogReader(tmp_path, SHAPE), {log.writer: log.next_row for log in logs}, poll_seconds=1.0)
    opened = []
    original = Segment.__init__
    monkeypatch.setattr(
        Segment, "__init__", lambda self, folder, *a, **k: (opened.append(folder), original(self, folder, *a, **k))[1]
    )
    for _ in range(4):
        for log in logs:
            log.append(make_rows(log.next_row))
        tail.poll()
    assert len(opened) == 5


def test_reading_ahead_of_many_writers_loses_and_repeats_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("tba_jax.replay.reader.PREFETCHED_APPENDS", 3)
    logs = [LogWriter(tmp_path, name, SHAPE, rows_per_append=ROWS, segment_appends=3, info={}) for name in ("a", "b", "c")]
    tail = Tail(LogReader(tmp_path, SHAPE), {}, poll_seconds=1.0)
    live, again = (ReplayIndex(shape=SHAPE, capacity=500, capacity_per_query=9, vocab_size=100) for _ in range(2))
    for step in range(6):
        for appends, log in enumerate(logs):
            for _ in range((step + appends) % 3):
                log.append(make_rows(log.next_row))
        tail.poll()
        for told in tail.integrate(live, step=step):
            assert not integrate_again(again, LogReader(tmp_path, SHAPE), told, step=step)
    assert live.heads == {log.writer: log.next_row for log in logs}
    assert again.state() == live.state()
    slots = np.flatnonzero(live.slot_query >= 0)
    for name, column in live.gather(slots).items():
        np.testing.assert_array_equal(again.gather(slots)[name], column)
    assert tail.problems() == []


def test_a_late_reader_counts_each_row_of_a_gap_once(tmp_path, monkeypatch):
    log = LogWriter(tmp_path, "a", SHAPE, rows_per_append=ROWS, segment_appends=2, info={})
    for _ in range(20):
        log.append(make_rows(log.next_row))
    remove_segments(tmp_path, {"a": [*range(1, 5), 7]})
    tail = Tail(LogReader(tmp_path, SHAPE), {}, poll_seconds=1.0)
    tail.poll()
    size = 2 * ROWS
    live = ReplayIndex(shape=SHAPE, capacity=900, capacity_per_query=9, vocab_size=100, merge_duplicates=False)
    (told,) = tail.integrate(live, step=0)
    assert told == {"heads": {"a": 20 * ROWS}, "skipped": {"a": [[size, 5 * size, "expired"], [7 * size, 8 * size, "expired"]]}}
    assert live.ledger()["a"]["expired"] == 5 * size and live.heads == {"a": 20 * ROWS}

    # A journal's heads may end within a gap: the rest of it is for the next step.
    again = ReplayIndex(shape=SHAPE, capacity=900, capacity_per_query=9, vocab_size=100, merge_duplicates=False)
    for head in (ROWS, 2 * size, 3 * size + ROWS, 20 * ROWS):
        integrate_again(again, LogReader(tmp_path, SHAPE), gaps.integration({"a": head}), step=0)
        assert again.heads == {"a": head}
    assert again.ledger() == live.ledger()


def test_the_thread_asks_quiet_writers_now_and_then(tmp_path, monkeypatch):
    monkeypatch.setattr("tba_jax.replay.polling.QUIET_SECONDS", 0.2)
    monkeypatch.setattr("tba_jax.replay.polling.QUIET_POLL_SECONDS", 0.5)
    logs = [LogWriter(tmp_path, f"w{number}", SHAPE, rows_per_append=ROWS, segment_appends=9, info={}) for number in range(3)]
    for log in logs:
        log.append(make_rows(0))
    tail, asked, changed = Tail(LogReader(tmp_path, SHAPE), {}, poll_seconds=1.0), [], places.changed
    monkeypatch.setattr(
        places, "changed", lambda files: (asked.append([k for k in files if isinstance(k, str)]), changed(files))[1]
    )

    def polled(**settings) -> set[str]:
        asked.clear()
        tail.poll(**settings)
        return {name for names in asked for name in names}

    assert polled(spare_quiet=True) == {"w0", "w1", "w2"}
    time.sleep(0.25)
    assert polled(spare_quiet=True) == {"w0", "w1", "w2"}, "quiet from now on"
    logs[0].append(make_rows(ROWS))
    assert polled(spare_quiet=True) == set() and polled() == {"w0", "w1", "w2"}
    late = LogWriter(tmp_path, "w3", SHAPE, rows_per_append=ROWS, segment_appends=9, info={})
    assert polled(spare_quiet=True) == {"w0", "w3"}, "one had news just now, the other is new"
    logs[1].append(make_rows(ROWS))
    late.append(make_rows(0))
    time.sleep(0.55)
    assert polled(spare_quiet=True) == {"w0", "w1", "w2", "w3"}
    index = ReplayIndex(shape=SHAPE, capacity=500, capacity_per_query=9, vocab_size=100)
    assert heads_of(tail.integrate(index, step=0)) == {"w0": 2 * ROWS, "w1": 2 * ROWS, "w2": ROWS, "w3": ROWS}
