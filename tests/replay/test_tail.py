"""Following many writers: what a poll costs, that every row is handed over once, and a trainer that was away for long."""

import time
import tracemalloc

import numpy as np
import pytest

from tba_jax.replay import gaps, ledger
from tba_jax.replay.expiry import remove_segments
from tba_jax.replay.gaps import KnownGaps
from tba_jax.replay.index import ReplayIndex
from tba_jax.replay.log import LogWriter
from tba_jax.replay.reader import LogReader
from tba_jax.replay.tail import Tail
from tba_jax.trajectory import RowShape
from tests.support.tiny_log import integrate_again

SHAPE = RowShape(prompt_length=4, response_length=64, reward_parts=())
APPEND = 16


def make_rows(first: int) -> dict[str, np.ndarray]:
    """Rows of different responses, eight of a query."""
    rows = {name: np.zeros((APPEND, *row), dtype) for name, (dtype, row) in SHAPE.columns().items()}
    rows["row"] = np.arange(first, first + APPEND)
    rows["query_id"] = (rows["row"] // 8).astype(np.uint64)
    rows["prompt_length"][:], rows["response_length"][:] = 4, 2
    rows["tokens"][:, 4], rows["tokens"][:, 5] = rows["row"] % 100, rows["row"] // 100 % 100
    return rows


def write(root, appends: dict[str, int], segment_appends: int = 8) -> dict[str, LogWriter]:
    made = {"rows_per_append": APPEND, "segment_appends": segment_appends, "info": {}}
    logs = {name: LogWriter(root, name, SHAPE, **made) for name in appends}
    for name, count in appends.items():
        for _ in range(count):
            logs[name].append(make_rows(logs[name].next_row))
    return logs


def index_of(capacity: int = 10_000, **rules) -> ReplayIndex:
    return ReplayIndex(shape=SHAPE, capacity=capacity, capacity_per_query=100, vocab_size=100, **rules)


def follow(root, index: ReplayIndex, heads: dict[str, int], *, tail: Tail | None = None, poll: bool = True) -> list[dict]:
    """Integrates until the index has these heads. Returns the records."""
    tail, told, end = tail or Tail(LogReader(root, SHAPE), {}, poll_seconds=0.05), [], time.monotonic() + 60
    while index.heads != heads and time.monotonic() < end:
        if poll:
            tail.poll()
        else:
            tail.wait(0.05)
        told += tail.integrate(index, step=1)
    assert index.heads == heads
    return told


def test_reading_ahead_of_many_writers_loses_and_repeats_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("tba_jax.replay.reader.PREFETCHED_APPENDS", 3)
    logs = write(tmp_path, dict.fromkeys("abc", 0), segment_appends=3)
    tail = Tail(LogReader(tmp_path, SHAPE), {}, poll_seconds=1.0)
    live, again = index_of(500), index_of(500)
    for step in range(6):
        for appends, log in enumerate(logs.values()):
            for _ in range((step + appends) % 3):
                log.append(make_rows(log.next_row))
        tail.poll()
        for told in tail.integrate(live, step=step):
            assert not integrate_again(again, LogReader(tmp_path, SHAPE), told, step=step)
    assert live.heads == {name: log.next_row for name, log in logs.items()} and again.state() == live.state()
    slots = np.flatnonzero(live.slot_query >= 0)
    for name, column in live.gather(slots).items():
        np.testing.assert_array_equal(again.gather(slots)[name], column)
    assert tail.problems() == []


def test_a_late_reader_counts_each_row_of_a_gap_once(tmp_path):
    write(tmp_path, {"a": 20}, segment_appends=2)
    remove_segments(tmp_path, {"a": [*range(1, 5), 7]})
    live, size = index_of(900, merge_duplicates=False), 2 * APPEND
    (told,) = follow(tmp_path, live, {"a": 20 * APPEND})
    assert told == {"heads": {"a": 20 * APPEND}, "skipped": {"a": [[size, 5 * size, "expired"], [7 * size, 8 * size, "expired"]]}}
    assert live.ledger()["a"]["expired"] == 5 * size
    # A journal's heads may end within a gap: the rest of it is for the next step.
    again = index_of(900, merge_duplicates=False)
    for head in (APPEND, 2 * size, 3 * size + APPEND, 20 * APPEND):
        integrate_again(again, LogReader(tmp_path, SHAPE), gaps.integration({"a": head}), step=0)
        assert again.heads == {"a": head}
    assert again.ledger() == live.ledger()


def test_a_tail_that_nobody_hands_rows_to_holds_no_more_than_its_share(tmp_path):
    """The trainer compiles, and takes no rows for a while."""
    write(tmp_path, {"a": 200, "b": 200})
    limit = 1 << 19
    assert 400 * APPEND * SHAPE.row_bytes > 10 * limit
    tail = Tail(LogReader(tmp_path, SHAPE), {}, poll_seconds=0.02, arrival_bytes=limit)
    tracemalloc.start()
    tail.start()
    time.sleep(1)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2.5 * limit, f"{peak:,} bytes at the peak"
    index = index_of(100_000)
    follow(tmp_path, index, {"a": 200 * APPEND, "b": 200 * APPEND}, tail=tail, poll=False)
    tail.close()
    assert index.totals["seen"] == 400 * APPEND


def test_the_oldest_rows_of_a_long_absence_are_never_read(tmp_path, monkeypatch):
    write(tmp_path, {"long": 100, "short": 3, "dead": 40})
    read, original = [], LogReader._start
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
    heads = {"long": 100 * APPEND, "short": 3 * APPEND, "dead": 40 * APPEND}
    assert all(each.balances for each in ledger.accounts(index, heads).values())
    # The newest of both long ones are what is left.
    newest = {name: [row for writer, row in index.ids(np.flatnonzero(index.slot_query >= 0)) if writer == name] for name in found}
    assert min(newest["long"]) >= 95 * APPEND and min(newest["dead"]) >= 35 * APPEND
    assert any("long: rows 0 to" in each and "replay.capacity" in each for each in tail.problems())
    again = index_of(10 * APPEND)
    read.clear()
    assert not integrate_again(again, LogReader(tmp_path, SHAPE), *told, step=1)
    assert again.state() == index.state() and ("long", 0) not in read


def test_who_catches_up_is_replayed_round_by_round(tmp_path):
    """The order in which rounds of several writers went into the window is that of the journal."""
    logs = write(tmp_path, {"a": 60, "b": 20, "c": 41})
    live, again = index_of(50 * APPEND), index_of(50 * APPEND)
    tail = Tail(LogReader(tmp_path, SHAPE), {}, poll_seconds=0.02, arrival_bytes=24 * APPEND * SHAPE.row_bytes)
    tail.start()
    told = []
    for _ in range(10):
        logs["b"].append(make_rows(logs["b"].next_row))
        told += tail.integrate(live, step=1)
        time.sleep(0.01)
    told += follow(tmp_path, live, {name: log.next_row for name, log in logs.items()}, tail=tail, poll=False)
    tail.close()
    assert len(told) > 3
    integrate_again(again, LogReader(tmp_path, SHAPE), *told, step=1)
    assert again.state() == live.state()


def hide(folder):
    """Makes the data of a segment unreadable, as if its storage had lost it. Returns what brings it back."""
    (folder / "d").rename(folder / ".away")
    return lambda: (folder / ".away").rename(folder / "d")


def test_an_error_that_heals_leaves_the_resume_exact(tmp_path):
    write(tmp_path, {"a": 24, "b": 8})
    bring_back = hide(tmp_path / "a" / "000001")
    live = index_of()
    tail = Tail(LogReader(tmp_path, SHAPE, patience_seconds=0.2), {}, poll_seconds=0.05)
    told = follow(tmp_path, live, {"a": 24 * APPEND, "b": 8 * APPEND}, tail=tail)
    assert live.ledger()["a"]["damaged"] == 8 * APPEND
    assert any(f"a: rows {8 * APPEND} to {16 * APPEND - 1} cannot be read" in each for each in tail.problems())
    assert any(str(tmp_path / "a" / "000001") in each for each in tail.problems()), "the file is named"
    states = []
    for is_there in (False, True):
        if is_there:
            bring_back()
        again = index_of()
        assert not integrate_again(again, LogReader(tmp_path, SHAPE, patience_seconds=0), *told, step=1)
        states.append(again.state())
    assert states == [live.state()] * 2


def test_a_segment_has_one_deadline_and_holds_nobody_up(tmp_path):
    """Eight appends of a segment are missing: all of them together may take the patience that one may."""
    patience = 0.8
    logs = write(tmp_path, {"a": 16})
    hide(tmp_path / "a" / "000000")
    logs |= write(tmp_path, {"b": 2})
    index, begin, others = index_of(), time.monotonic(), None
    tail = Tail(LogReader(tmp_path, SHAPE, patience_seconds=patience), {}, poll_seconds=0.05)
    tail.start()
    while index.heads.get("a", 0) < 16 * APPEND:
        assert time.monotonic() < begin + 5 * patience, "one deadline for the segment"
        tail.wait(0.05)
        tail.integrate(index, step=1)
        if others is None and index.heads.get("b") == 2 * APPEND:
            others = time.monotonic() - begin
            logs["b"].append(make_rows(logs["b"].next_row))
    tail.close()
    assert others is not None and others < patience and index.heads["b"] == 3 * APPEND
    assert index.ledger()["a"]["damaged"] == 8 * APPEND and index.ledger()["a"]["seen"] == 8 * APPEND


@pytest.mark.parametrize("away", ["segment", "log"])
def test_what_comes_back_in_time_is_not_damaged(tmp_path, away):
    """A segment has the reader's patience, and a log whose whole place is away has all time."""
    root = tmp_path / "log"
    root.mkdir()
    write(root, {"a": 8})
    index, reader = index_of(), LogReader(root, SHAPE, patience_seconds=30 if away == "segment" else 0.05)
    tail = Tail(reader, {}, poll_seconds=0.05)
    tail.poll()
    if away == "segment":
        bring_back = hide(root / "a" / "000000")
    else:
        root.rename(tmp_path / "away")
    end = time.monotonic() + 0.3
    while time.monotonic() < end:
        assert tail.integrate(index, step=1) == []
    if away == "segment":
        assert any("rows from 0 on cannot be read yet" in each for each in tail.problems())
        bring_back()
    else:
        (tmp_path / "away").rename(root)
    follow(root, index, {"a": 8 * APPEND}, tail=tail)
    assert index.totals["seen"] == 8 * APPEND and index.ledger()["a"]["damaged"] == 0 and not tail.problems()


@pytest.mark.parametrize("heals", [False, True])
def test_a_resident_row_that_is_lost_is_left_out_for_good(tmp_path, heals):
    write(tmp_path, {"a": 24})
    original, reader = index_of(20 * APPEND), LogReader(tmp_path, SHAPE)
    for begin in range(0, 24 * APPEND, APPEND):
        original.add("a", reader.read("a", begin, begin + APPEND), step=1)
    bring_back = hide(tmp_path / "a" / "000001")
    lossy = LogReader(tmp_path, SHAPE, patience_seconds=0)
    lossy.heads()
    restored, (gap,) = ReplayIndex.restore(original.state(), lossy)
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
