"""Following a log: every row is handed over once and a resume does the same again, whatever becomes of segments meanwhile."""

import json
import shutil
import tempfile
import threading
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from tba_jax.replay import journal, ledger
from tba_jax.replay.index import ReplayIndex
from tba_jax.replay.journal import Again
from tba_jax.replay.ledger import Losses
from tba_jax.replay.log import LogWriter
from tba_jax.replay.reader import PREFETCHED_APPENDS, LogReader
from tba_jax.replay.tail import Tail
from tba_jax.trajectory import RowShape
from tests.support.tiny_log import integrate_again

SHAPE = RowShape(prompt_length=4, response_length=64, reward_parts=())
APPEND = 16


def make_rows(first: int) -> dict[str, np.ndarray]:
    rows = {name: np.zeros((APPEND, *row), dtype) for name, (dtype, row) in SHAPE.columns().items()}
    rows["row"] = np.arange(first, first + APPEND)
    rows["query_id"] = (rows["row"] // 8).astype(np.uint64)
    rows["prompt_length"][:], rows["response_length"][:] = 4, 2
    rows["tokens"][:, 4], rows["tokens"][:, 5] = rows["row"] % 100, rows["row"] // 100 % 100
    return rows


def write(root, appends: dict[str, int]) -> dict[str, LogWriter]:
    logs = {name: LogWriter(root, name, SHAPE, info={}) for name in appends}
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


def hide(root, append: int, writer: str = "a"):
    """Takes an append away. Returns what brings it back."""
    (path,) = root.glob(f"*/{writer}.{append * APPEND}-*")
    away = root / path.name
    path.rename(away)
    return lambda: away.rename(path)


class FollowedLog(RuleBasedStateMachine):
    """Three writers, an index that follows them, and the lines of a journal from which another index is made at the end."""

    @initialize(
        most_behind=st.sampled_from((0, 6)), patience=st.sampled_from((0.0, 0.05)), starts=st.booleans(), best=st.booleans()
    )
    def begin(self, most_behind: int, patience: float, starts: bool, best: bool) -> None:
        self.folder, self.away, self.lines, self.lost, self.starts = Path(tempfile.mkdtemp()), {}, [], [], starts
        self.rules = {"merge_keep": "best", "merge_edit_distance": 0.3} if best else {}
        self.logs = write(self.folder, dict.fromkeys("abc", 0))
        self.patience, self.most_behind, self.live = patience, most_behind * APPEND, index_of(12 * APPEND, **self.rules)
        self.follow()

    def follow(self) -> None:
        reader, room = LogReader(self.folder, SHAPE, patience_seconds=self.patience), 8 * APPEND * SHAPE.row_bytes
        options = {"poll_seconds": 0.01, "most_behind": self.most_behind, "arrival_bytes": room}
        self.tail = Tail(reader, {**self.live.closed.heads, **self.live.heads}, self.live.pending, **options)
        if self.starts:
            self.tail.start()

    @rule(writer=st.sampled_from("abc"), count=st.integers(1, 7))
    def append(self, writer: str, count: int) -> None:
        for _ in range(count):
            self.logs[writer].append(make_rows(self.logs[writer].next_row))

    @rule()
    def integrate(self) -> None:
        if self.starts:
            self.tail.wait(0.02)
        else:
            self.tail.poll()
        records, self.lost = [*self.lost, *self.tail.integrate(self.live, step=len(self.lines))], []
        if self.live.merge(before=(oldest := self.live.recent_since(2))):
            records.append(ledger.merging(oldest))
        drawn = np.flatnonzero(self.live.slot_query >= 0)[:: 1 + len(self.lines) % 5]
        self.live.mark_drawn(drawn)
        told = {"visible": records, "ids": self.live.ids(drawn), "rows": self.live.gather(drawn)}
        self.lines.append(journal.journal_line(step=len(self.lines) + 1, **told, reward_version=1, key=0))

    @rule(writer=st.sampled_from("abc"), number=st.integers(0, 12))
    def lose(self, writer: str, number: int) -> None:
        """An append is away for a while; not the last, which tells that the ones before are committed."""
        if (writer, number) not in self.away and (number + 1) * APPEND < self.logs[writer].next_row:
            self.away[writer, number] = hide(self.folder, number, writer)

    @rule(writer=st.sampled_from("abc"), number=st.integers(0, 12), damaged=st.binary(max_size=9))
    def damage(self, writer: str, number: int, damaged: bytes) -> None:
        if (writer, number) not in self.away and (number + 1) * APPEND <= self.logs[writer].next_row:
            (path,) = self.folder.glob(f"*/{writer}.{number * APPEND}-*")
            whole = path.read_bytes()
            path.write_bytes(damaged)
            self.away[writer, number] = lambda: path.write_bytes(whole)

    @rule(writer=st.sampled_from("abc"))
    def close(self, writer: str) -> None:
        """A writer that has nothing left to draw is closed; it may come again."""
        if writers := self.live.closable([writer]):
            self.lost.append(ledger.closing({each: self.live.heads[each] for each in writers}))
            self.live.close(writers)

    @precondition(lambda self: self.away)
    @rule()
    def find(self) -> None:
        for bring_back in self.away.values():
            bring_back()
        self.away = {}

    @rule()
    def resume(self) -> None:
        """From a checkpoint of this moment. Rows that were resident and cannot be read are lost for good."""
        self.tail.close()
        self.live.closed.seal(self.folder / "closed")
        state = json.loads(json.dumps(self.live.state()))
        self.live, lost = ReplayIndex.restore(
            state, LogReader(self.folder, SHAPE, patience_seconds=0), closed=self.folder / "closed"
        )
        if lost:
            self.lost.append(ledger.loss(lost, since=len(self.lines)))
        self.follow()

    @invariant()
    def every_row_is_accounted_for(self) -> None:
        if hasattr(self, "live"):
            heads = {writer: self.live.head(writer) for writer in "abc"}
            found = ledger.accounts(self.live, heads)
            assert all(account.balances for account in found.values())
            assert sum(account.committed for account in found.values()) == sum(heads.values())

    def teardown(self) -> None:
        if not hasattr(self, "live"):
            return
        try:
            heads = {name: log.next_row for name, log in self.logs.items() if log.next_row}
            end = time.monotonic() + 20
            while self.lost or {name: self.live.head(name) for name in heads} != heads:
                assert time.monotonic() < end, (self.live.heads, heads)
                self.integrate()
            self.find()
            again, reader = index_of(12 * APPEND, **self.rules), LogReader(self.folder, SHAPE)
            does = Again(again, reader, Losses(self.lines), step=0)
            for line in self.lines:
                again.mark_drawn(slots := does.do(line))
                assert journal.batch_hash(again.gather(slots)) == line["batch"]
            assert again.state() == self.live.state() and not does.lost
        finally:
            self.tail.close()
            shutil.rmtree(self.folder)


def test_whoever_does_the_journal_again_has_the_same_rows():
    phases = (Phase.explicit, Phase.generate)
    chosen = settings(max_examples=15, stateful_step_count=15, deadline=None, derandomize=True, phases=phases)
    run_state_machine_as_test(FollowedLog, settings=chosen)


def test_a_tail_that_nobody_hands_rows_to_holds_no_more_than_its_share(tmp_path):
    write(tmp_path, {"a": 65, "b": 65})
    limit = 1 << 18
    assert 130 * APPEND * SHAPE.row_bytes > 10 * limit
    tail = Tail(LogReader(tmp_path, SHAPE), {}, poll_seconds=0.02, arrival_bytes=limit)
    tracemalloc.start()
    tail.start()
    time.sleep(0.3)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2.5 * limit, f"{peak:,} bytes at the peak"
    index = index_of(100_000)
    follow(tmp_path, index, {"a": 65 * APPEND, "b": 65 * APPEND}, tail=tail, poll=False)
    tail.close()
    assert index.totals["seen"] == 130 * APPEND


def test_the_appends_of_many_writers_are_never_read_one_after_the_other(tmp_path, monkeypatch):
    writers = {f"w{number:03}": 1 for number in range(2 * PREFETCHED_APPENDS)}
    write(tmp_path, writers)
    asked = []
    monkeypatch.setattr(LogReader, "prefetch", lambda _, ranges: asked.append(len(ranges)))
    follow(tmp_path, index_of(), dict.fromkeys(writers, APPEND))
    assert sum(asked) == len(writers) and max(asked) == PREFETCHED_APPENDS


def test_the_oldest_rows_of_a_long_absence_are_never_read(tmp_path, monkeypatch):
    write(tmp_path, {"long": 100, "short": 3, "dead": 40})
    read, original = [], LogReader._start
    monkeypatch.setattr(
        LogReader, "_start", lambda self, each: (read.append((each.writer, each.first // APPEND)), original(self, each))[1]
    )
    tail = Tail(LogReader(tmp_path, SHAPE), {}, poll_seconds=1.0, most_behind=20 * APPEND)
    index = index_of(10 * APPEND)
    tail.poll()
    told = tail.integrate(index, step=1)
    # What each may have of the twenty: all of the short one, and as much of each of the others, the newest.
    assert set(read) <= {*(("long", each) for each in range(91, 100)), *(("dead", each) for each in range(31, 40))} | {
        ("short", each) for each in range(3)
    }
    found, heads = index.ledger(), {"long": 100 * APPEND, "short": 3 * APPEND, "dead": 40 * APPEND}
    assert found["long"]["passed_over"] >= 91 * APPEND and found["short"]["passed_over"] == 0
    assert found["dead"]["passed_over"] >= 31 * APPEND and len(index) == 10 * APPEND
    assert all(each.balances for each in ledger.accounts(index, heads).values())
    assert any("long: rows 0 to" in each and "replay.capacity" in each for each in tail.problems())
    again = index_of(10 * APPEND)
    assert not integrate_again(again, LogReader(tmp_path, SHAPE), *told, step=1)
    assert again.state() == index.state()


def test_rows_that_cannot_be_read_hold_nobody_up_and_come_late(tmp_path):
    """Two appends are away and one is damaged: after the patience the others go on, and what comes back is taken up once."""
    patience, logs = 0.3, write(tmp_path, {"a": 16})
    bring_back = [hide(tmp_path, number) for number in (3, 4)]
    (damaged,) = tmp_path.glob(f"*/a.{9 * APPEND}-*")
    whole = damaged.read_bytes()
    damaged.write_bytes(whole[:-9] + bytes(9))
    logs |= write(tmp_path, {"b": 2})
    index, begin, others, told = index_of(), time.monotonic(), None, []
    tail = Tail(LogReader(tmp_path, SHAPE, patience_seconds=patience), {}, poll_seconds=0.02)
    tail.start()
    while index.heads.get("a", 0) < 16 * APPEND:
        assert time.monotonic() < begin + 20, (index.heads, tail.problems())
        tail.wait(0.05)
        told += tail.integrate(index, step=1)
        if others is None and index.heads.get("b") == 2 * APPEND:
            others = time.monotonic() - begin
    assert others is not None and others < patience
    assert index.pending == {"a": [(3 * APPEND, 5 * APPEND), (9 * APPEND, 10 * APPEND)]}
    assert index.ledger()["a"]["pending"] == 3 * APPEND and index.ledger()["a"]["seen"] == 13 * APPEND
    assert any("rows 144 to 159 cannot be read" in each and "checksum" in each for each in tail.problems())
    tail.close()
    for each in bring_back:
        each()
    damaged.write_bytes(whole)
    tail = Tail(LogReader(tmp_path, SHAPE), index.heads, index.pending, poll_seconds=0.02)
    told += tail.integrate(index, step=1)
    tail.poll()
    told += tail.integrate(index, step=1)
    assert not index.pending and index.ledger()["a"]["seen"] == 16 * APPEND and not tail.problems()
    again = index_of()
    assert not integrate_again(again, LogReader(tmp_path, SHAPE), *told, step=1)
    assert again.state() == index.state()


@pytest.mark.parametrize("away", ["an append", "the last append", "all appends of a minute"])
def test_a_resume_waits_for_rows_that_storage_does_not_list_yet(tmp_path, away):
    """At a listing that lags, resident rows are not lost; those that do not come cost the reader's patience once."""
    root = tmp_path / "log"
    root.mkdir()
    write(root, {"a": 4, "b": 4})
    index = index_of(merge_duplicates=False)
    follow(root, index, {"a": 4 * APPEND, "b": 4 * APPEND})
    state = json.loads(json.dumps(index.state()))
    hidden = {"an append": [1], "the last append": [3], "all appends of a minute": [0, 1, 2, 3]}[away]
    timer = threading.Timer(0.5, lambda: [bring_back() for bring_back in back])
    back = [hide(root, number) for number in hidden]
    timer.start()
    restored, lost = ReplayIndex.restore(state, LogReader(root, SHAPE), closed=tmp_path / "closed")
    timer.join()
    assert not lost and restored.state() == index.state()
    hide(root, 1)
    hide(root, 2, "b")
    begin = time.monotonic()
    _, lost = ReplayIndex.restore(state, LogReader(root, SHAPE, patience_seconds=1.0), closed=tmp_path / "closed")
    assert {(gap.writer, gap.start, gap.stop) for gap in lost} == {("a", 16, 32), ("b", 32, 48)}, lost
    assert 1.0 < time.monotonic() - begin < 1.9


def test_rows_before_a_hole_that_are_damaged_wait_as_well(tmp_path):
    write(tmp_path, {"a": 4})
    (damaged,) = tmp_path.glob("*/a.0-*")
    whole = damaged.read_bytes()
    damaged.write_bytes(b"torn")
    bring_back, index = hide(tmp_path, 1), index_of()
    tail = Tail(LogReader(tmp_path, SHAPE, patience_seconds=0.05), {}, poll_seconds=0.01)
    follow(tmp_path, index, {"a": 64}, tail=tail)
    assert index.pending == {"a": [(0, 32)]} and len(index) == 32
    bring_back()
    damaged.write_bytes(whole)
    tail = Tail(LogReader(tmp_path, SHAPE), index.heads, index.pending, poll_seconds=0.01)
    while index.pending:
        tail.poll()
        tail.integrate(index, step=2)
    assert len(index) == 64


@pytest.mark.parametrize("appends", [1, 3])
def test_a_newest_append_that_goes_after_it_was_seen_ends_nobody(tmp_path, appends):
    """An operator removes the damaged file, say, and nothing of its writer comes behind it."""
    head, index, records = appends * APPEND, index_of(), []
    write(tmp_path, {"a": appends})
    (newest,) = tmp_path.glob(f"*/a.{head - APPEND}-*")
    whole = newest.read_bytes()
    newest.write_bytes(b"torn")
    tail = Tail(LogReader(tmp_path, SHAPE, patience_seconds=0.05), {}, poll_seconds=0.01)
    follow(tmp_path, index, {"a": head}, tail=tail)
    newest.unlink()
    tail = Tail(LogReader(tmp_path, SHAPE), index.heads, index.pending, poll_seconds=0.01)  # of a trainer that was started again
    for _ in range(2):
        tail.poll()
        assert tail.integrate(index, step=2) == []
    assert index.pending == {"a": [(head - APPEND, head)]} and len(index) == head - APPEND
    newest.parent.mkdir(exist_ok=True)
    newest.write_bytes(whole)
    tail = Tail(LogReader(tmp_path, SHAPE), index.heads, index.pending, poll_seconds=0.01)
    while index.pending:
        tail.poll()
        records += tail.integrate(index, step=3)
    assert len(index) == head and records == [ledger.late("a", head - APPEND, head)]


def test_a_newest_append_that_is_lost_counts_as_damaged_when_a_resume_looks_for_it(tmp_path):
    write(tmp_path, {"a": 3})
    index, again = index_of(), index_of()
    records = follow(tmp_path, index, {"a": 48})
    (newest,) = tmp_path.glob("*/a.32-*")
    newest.unlink()
    reader = LogReader(tmp_path, SHAPE, patience_seconds=0.05)
    done = Again(again, reader, Losses(), step=0)
    done.do({"step": 1, "visible": records, "writers": [], "rows": []})
    restored, lost = ReplayIndex.restore(index.state(), reader, closed=tmp_path)
    for gaps, there in ((done.lost, again), (lost, restored)):
        assert [(gap.start, gap.stop, gap.kind) for gap in gaps] == [(32, 48, "damaged")] and len(there) == 32
        account = ledger.accounts(there, there.heads)["a"]
        assert account.balances and account.damaged == 16


def test_what_a_resume_lost_stays_lost_beside_rows_that_were_passed_over(tmp_path):
    """The lines after that resume were drawn without these rows, so the next resume leaves them out although they are back."""
    write(tmp_path, {"a": 4})
    taken_up = ledger.integration({"a": 64}, [ledger.Gap("a", 0, 16, "passed_over")])
    lines = [{"step": 1, "visible": [taken_up], "writers": [], "rows": []}]
    bring_back, first, second = hide(tmp_path, 2), index_of(), index_of()
    reader = LogReader(tmp_path, SHAPE, patience_seconds=0.05)
    once = Again(first, reader, Losses(), step=0)
    once.do(lines[0])
    lines.append({"step": 2, "visible": [ledger.loss(once.lost, since=0)], "writers": [], "rows": []})
    bring_back()
    reader.heads()
    again = Again(second, reader, Losses(lines), step=0)
    again.do(lines[0])
    assert again.lost == []
    assert sorted(first.slot_row[first.slot_query >= 0]) == sorted(second.slot_row[second.slot_query >= 0])


@pytest.mark.parametrize("away", ["append", "log"])
def test_what_comes_back_in_time_stays_in_its_place(tmp_path, away):
    """An append has the reader's patience, and a log whose whole place is away has all time."""
    root = tmp_path / "log"
    root.mkdir()
    write(root, {"a": 8})
    index, reader = index_of(), LogReader(root, SHAPE, patience_seconds=30 if away == "append" else 0.02)
    tail = Tail(reader, {}, poll_seconds=0.05)
    tail.poll()
    if away == "log":
        root.rename(tmp_path / "away")
        bring_back = lambda: (tmp_path / "away").rename(root)  # noqa: E731
    else:
        bring_back = hide(root, 0)
    end = time.monotonic() + 0.15
    while time.monotonic() < end:
        assert tail.integrate(index, step=1) == []
    assert any("replay log of writer a: rows 0 to" in each for each in tail.problems())
    bring_back()
    follow(root, index, {"a": 8 * APPEND}, tail=tail)
    assert index.totals["seen"] == 8 * APPEND and not index.pending and not tail.problems()
