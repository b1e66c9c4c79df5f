"""A trainer that was away: it holds a bounded part of what it missed, and passes over what its window would not keep."""

import threading
import time
import tracemalloc

import numpy as np
import pytest

from tba_jax.replay import gaps, ledger
from tba_jax.replay.gaps import KnownGaps
from tba_jax.replay.index import ReplayIndex
from tba_jax.replay.log import LogWriter
from tba_jax.replay.reader import LogReader
from tba_jax.replay.tail import Tail
from tba_jax.trajectory import RowShape
from tests.support.tiny_log import integrate_again

SHAPE = RowShape(prompt_length=4, response_length=64, reward_parts=())
APPEND = 64


def make_rows(first: int, count: int = APPEND) -> dict[str, np.ndarray]:
    """Rows of different responses, eight of a query."""
    rows = {name: np.zeros((count, *row), dtype) for name, (dtype, row) in SHAPE.columns().items()}
    rows["row"] = np.arange(first, first + count)
    rows["query_id"] = (rows["row"] // 8).astype(np.uint64)
    rows["prompt_length"][:], rows["response_length"][:] = 4, 2
    rows["tokens"][:, 4], rows["tokens"][:, 5] = rows["row"] % 100, rows["row"] // 100 % 100
    return rows


def write(root, appends: dict[str, int]) -> dict[str, LogWriter]:
    logs = {name: LogWriter(root, name, SHAPE, rows_per_append=APPEND, segment_appends=8, info={}) for name in appends}
    for name, count in appends.items():
        for _ in range(count):
            logs[name].append(make_rows(logs[name].next_row))
    return logs


def index_of(capacity: int, **rules) -> ReplayIndex:
    return ReplayIndex(shape=SHAPE, capacity=capacity, capacity_per_query=100, vocab_size=100, **rules)


def test_a_tail_that_nobody_hands_rows_to_holds_no_more_than_its_share(tmp_path):
    """20,000 rows of 1.2 kB are behind; the trainer compiles, and takes none of them for a while."""
    write(tmp_path, {"a": 160, "b": 160})
    limit = 1 << 21
    assert 320 * APPEND * SHAPE.row_bytes > 10 * limit
    tail = Tail(LogReader(tmp_path, SHAPE), {}, poll_seconds=0.05, arrival_bytes=limit)
    tracemalloc.start()
    tail.start()
    time.sleep(3)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2 * limit, f"{peak:,} bytes at the peak"
    index = index_of(100_000)
    deadline = time.monotonic() + 60
    while index.heads != {"a": 160 * APPEND, "b": 160 * APPEND} and time.monotonic() < deadline:
        tail.wait(0.05)
        tail.integrate(index, step=1)
    tail.close()
    assert index.heads == {"a": 160 * APPEND, "b": 160 * APPEND} and index.totals["seen"] == 320 * APPEND


def test_the_oldest_rows_of_a_long_absence_are_never_read(tmp_path, monkeypatch):
    write(tmp_path, {"long": 100, "short": 3, "dead": 40})
    read = []
    original = LogReader._start
    monkeypatch.setattr(LogReader, "_start", lambda self, *each: (read.append((each[0], each[2])), original(self, *each))[1])
    tail = Tail(LogReader(tmp_path, SHAPE), {}, poll_seconds=1.0, most_behind=20 * APPEND)
    index = index_of(10 * APPEND)
    tail.poll()
    told = tail.integrate(index, step=1)
    # What each may have of the twenty: all of the short one, and as much of each of the others.
    wanted = {("long", each) for each in range(91, 100)} | {("dead", each) for each in range(31, 40)}
    assert set(read) <= wanted | {("long", 91), ("dead", 31)} | {("short", each) for each in range(3)}
    found = index.ledger()
    assert found["long"]["passed_over"] >= 91 * APPEND and found["short"]["passed_over"] == 0
    assert found["dead"]["passed_over"] >= 31 * APPEND and len(index) == 10 * APPEND
    assert all(each.balances for each in ledger.accounts(index, {"long": 6400, "short": 192, "dead": 2560}).values())
    # The newest of both long ones are what is left.
    newest = {name: [row for writer, row in index.ids(np.flatnonzero(index.slot_query >= 0)) if writer == name] for name in found}
    assert min(newest["long"]) >= 95 * APPEND and min(newest["dead"]) >= 35 * APPEND
    assert any("long: rows 0 to" in each and "replay.capacity" in each for each in tail.problems())

    again = index_of(10 * APPEND)
    read.clear()
    assert not integrate_again(again, LogReader(tmp_path, SHAPE), *told, step=1)
    assert again.state() == index.state() and ("long", 0) not in read


def test_a_window_of_the_best_rewards_reads_everything(tmp_path):
    write(tmp_path, {"a": 30})
    index = index_of(APPEND, merge_keep="best")
    tail = Tail(LogReader(tmp_path, SHAPE), {}, poll_seconds=1.0)
    tail.poll()
    tail.integrate(index, step=1)
    assert index.totals["seen"] == 30 * APPEND


@pytest.mark.parametrize("threaded", [False, True])
def test_who_catches_up_is_replayed_round_by_round(tmp_path, threaded):
    """The order in which rounds of several writers went into the window is that of the journal."""
    logs = write(tmp_path, {"a": 60, "b": 20, "c": 41})
    live, again = index_of(50 * APPEND), index_of(50 * APPEND)
    tail = Tail(LogReader(tmp_path, SHAPE), {}, poll_seconds=0.02, arrival_bytes=24 * APPEND * SHAPE.row_bytes)
    told = []
    if threaded:
        tail.start()
    deadline = time.monotonic() + 60
    while live.heads != {name: log.next_row for name, log in logs.items()} and time.monotonic() < deadline:
        if not threaded:
            tail.poll()
        if len(told) < 30:
            logs["b"].append(make_rows(logs["b"].next_row))
        told += tail.integrate(live, step=1)
        time.sleep(0.01)
    tail.close()
    assert live.heads == {name: log.next_row for name, log in logs.items()} and len(told) > 3
    integrate_again(again, LogReader(tmp_path, SHAPE), *told, step=1)
    assert again.state() == live.state()


def hide(folder, name: str = "d"):
    """Makes the data of a segment unreadable, as if its storage had lost it. Returns what brings it back."""
    (folder / name).rename(folder / ".away")
    return lambda: (folder / ".away").rename(folder / name)


def test_an_error_that_heals_leaves_the_resume_exact(tmp_path):
    logs = write(tmp_path, {"a": 24, "b": 8})
    bring_back = hide(tmp_path / "a" / "000001")
    live = index_of(10_000)
    tail = Tail(LogReader(tmp_path, SHAPE, patience_seconds=0.2), {}, poll_seconds=0.05)
    told = []
    while live.heads.get("a") != logs["a"].next_row:
        tail.poll()
        told += tail.integrate(live, step=1)
    assert live.ledger()["a"]["damaged"] == 8 * APPEND
    assert any(f"a: rows {8 * APPEND} to {16 * APPEND - 1} cannot be read" in each for each in tail.problems())
    assert any(str(tmp_path / "a" / "000001") in each for each in tail.problems()), "the file is named"
    states = []
    for is_there in (False, True):
        if is_there:
            bring_back()
        again = index_of(10_000)
        assert not integrate_again(again, LogReader(tmp_path, SHAPE, patience_seconds=0), *told, step=1)
        states.append(again.state())
    assert states == [live.state()] * 2


def test_a_segment_has_one_deadline_and_holds_nobody_up(tmp_path):
    """Eight appends of a segment are missing: all of them together may take the patience that one may."""
    patience = 1.5
    logs = write(tmp_path, {"a": 16})
    hide(tmp_path / "a" / "000000")
    logs |= write(tmp_path, {"b": 2})
    index, begin = index_of(10_000), time.monotonic()
    tail = Tail(LogReader(tmp_path, SHAPE, patience_seconds=patience), {}, poll_seconds=0.05)
    tail.start()
    others = None
    while index.heads.get("a", 0) < 16 * APPEND:
        assert time.monotonic() < begin + 4 * patience, "one deadline for the segment"
        tail.wait(0.05)
        tail.integrate(index, step=1)
        if others is None and index.heads.get("b") == 2 * APPEND:
            others = time.monotonic() - begin
            logs["b"].append(make_rows(logs["b"].next_row))
    tail.close()
    assert others is not None and others < patience and index.heads["b"] == 3 * APPEND
    assert index.ledger()["a"]["damaged"] == 8 * APPEND and index.ledger()["a"]["seen"] == 8 * APPEND


def test_rows_that_come_back_in_time_are_read(tmp_path):
    write(tmp_path, {"a": 8})
    index = index_of(10_000)
    tail = Tail(LogReader(tmp_path, SHAPE, patience_seconds=30), {}, poll_seconds=0.05)
    tail.poll()
    bring_back = hide(tmp_path / "a" / "000000")
    assert tail.integrate(index, step=1) == [] and any("rows from 0 on cannot be read yet" in each for each in tail.problems())
    timer = threading.Timer(0.3, bring_back)
    timer.start()
    while index.heads.get("a") != 8 * APPEND:
        tail.poll()
        tail.integrate(index, step=1)
        time.sleep(0.02)
    assert index.totals["seen"] == 8 * APPEND and not tail.problems()


def test_a_log_whose_place_is_away_is_not_damaged(tmp_path):
    (tmp_path / "log").mkdir()
    write(tmp_path / "log", {"a": 8})
    reader, index = LogReader(tmp_path / "log", SHAPE, patience_seconds=0.1), index_of(10_000)
    tail = Tail(reader, {}, poll_seconds=0.05)
    tail.poll()
    (tmp_path / "log").rename(tmp_path / "away")
    end = time.monotonic() + 1
    while time.monotonic() < end:
        assert tail.integrate(index, step=1) == []
    (tmp_path / "away").rename(tmp_path / "log")
    while index.heads.get("a") != 8 * APPEND:
        tail.poll()
        tail.integrate(index, step=1)
        time.sleep(0.05)
    assert index.ledger()["a"]["damaged"] == 0


@pytest.mark.parametrize("heals", [False, True])
def test_a_resident_row_that_is_lost_is_left_out_for_good(tmp_path, heals):
    write(tmp_path, {"a": 24})
    original, reader = index_of(20 * APPEND), LogReader(tmp_path, SHAPE)
    for begin in range(0, 24 * APPEND, APPEND):
        original.add("a", reader.read("a", begin, begin + APPEND), step=1)
    bring_back = hide(tmp_path / "a" / "000001")
    lossy = LogReader(tmp_path, SHAPE, patience_seconds=0)
    lossy.heads()
    restored, lost = ReplayIndex.restore(original.state(), lossy)
    (gap,) = lost
    assert (gap.writer, gap.start, gap.stop, gap.kind) == ("a", 8 * APPEND, 16 * APPEND, "damaged")
    assert len(restored) == 12 * APPEND and restored.ledger()["a"]["damaged"] == 8 * APPEND
    assert ledger.accounts(restored, {"a": 24 * APPEND})["a"].balances
    if heals:
        bring_back()
    known = KnownGaps([gaps.loss([gap], since=1)])
    fresh = LogReader(tmp_path, SHAPE, patience_seconds=0)
    fresh.heads()
    again, more = ReplayIndex.restore(original.state(), fresh, known=known)
    assert again.state() == restored.state() and not more
    # Who comes from before takes them out when it is there.
    original.lose("a", gap.start, gap.stop)
    assert original.state() == restored.state() and original.totals == restored.totals
