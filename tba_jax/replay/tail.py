"""Follows the replay log for the trainer: reads new rows beside the training loop, hands them over between steps.

However far behind a trainer is, it holds no more than `arrival_bytes` of rows that the index has not taken. Rows come in rounds:
a round has the next rows of each writer that is furthest behind, so that the newest rows of all writers come last.
"""

import collections
import dataclasses
import heapq
import math
import threading
import time
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tba_jax.replay import ledger
from tba_jax.replay.index import ReplayIndex
from tba_jax.replay.ledger import Gap
from tba_jax.replay.reader import PREFETCHED_APPENDS, LogReader, RowsGone, RowsPending, Unreadable
from tba_jax.storage import places
from tba_jax.trajectory import Rows

_ROWS_PER_READ = 4096
_BYTES_PER_READ = 1 << 23
ARRIVAL_BYTES = 1 << 26
# A round has at most so small a part of the bytes that may wait, or one append.
_PARTS = 4
# A trainer that is as far behind as it may be reads at least so many rounds: the window gets rows of each writer.
_ROUNDS = 16
# Rows that cannot be read yet are asked for again after pauses up to this.
_LONGEST_PAUSE = 5.0
# Between tries of rows that were passed by, which grow to this.
_LONGEST_PENDING_PAUSE = 300.0
# Between looks at the whole log. An object store charges for them, by the thousand of appends.
SWEEP_SECONDS, SWEEP_SECONDS_OF_STORE = 30.0, 300.0
_NAMED_AT_MOST = 1000


@dataclasses.dataclass
class Part:
    """Rows of one writer up to `head`, without those in gaps.

    runs: the first row of each append, and its rows. error: why it ends at `head`, where more was asked for.
    """

    head: int
    runs: list[tuple[int, Rows]]
    gaps: list[Gap]
    error: Unreadable | None = None

    @property
    def bytes(self) -> int:
        return sum(column.nbytes for _, run in self.runs for column in run.values())


@dataclasses.dataclass
class _Round:
    """Writer -> its part. is_last: whether no writer had more rows that could be read. late: these rows were pending."""

    parts: dict[str, Part]
    is_last: bool
    late: Gap | None = None

    @property
    def bytes(self) -> int:
        return sum(part.bytes for part in self.parts.values())


def read_part(reader: LogReader, writer: str, begin: int, end: int, known: Sequence[Gap] = (), *, wait: bool) -> Part:
    """Rows [begin, end) of a writer without the known gaps.

    Args: known: ascending, within the rows. wait: for rows that cannot be read yet, and then rows that cannot be read count as
      damaged; else the part ends before the first of them, and tells its error.

    Raises: RowsPending where `wait` was in vain.
    """
    part, bounds = Part(begin, [], []), [*known, Gap(writer, end, end, "")]
    for gap in bounds:
        while part.head < gap.start:
            error = _read_into(part, reader, writer, min(part.head + _ROWS_PER_READ, gap.start), wait=wait)
            if error is not None and not wait:
                part.error = error
                return part
            if isinstance(error, RowsPending):
                raise error
            if error is not None:
                part.gaps.append(Gap(writer, part.head, min(error.stop, gap.start), "damaged", error.reason))
                part.head = part.gaps[-1].stop
        if gap.stop > part.head:
            part.gaps.append(gap.within(part.head, gap.stop))
            part.head = gap.stop
    part.gaps = ledger.merged(part.gaps)
    return part


def _read_into(part: Part, reader: LogReader, writer: str, stop: int, *, wait: bool) -> Unreadable | None:
    """Adds the rows up to `stop` to a part, one run an append, or those up to the first that cannot be read. Returns why not."""
    error: Unreadable | None = None
    while (begin := part.head) < stop:
        try:
            rows = reader.read(writer, begin, stop, wait=wait)
        except Unreadable as found:  # the rows before it may have a trouble of their own
            error, stop = found, max(found.start, begin)
            continue
        for append in reader.appends(writer, begin, stop):
            there = slice(max(append.first - begin, 0), append.stop - begin)
            part.runs.append((append.first, {name: column[there] for name, column in rows.items()}))
        part.head = stop
    return error


def take_part(index: ReplayIndex, reader: LogReader, writer: str, part: Part, *, step: int) -> None:
    """Gives the index the next rows of a writer, and the number of those that it does not get."""
    for append, rows in part.runs:
        index.add(writer, rows, step=step, own=reader.is_own(writer), append=append)
    for gap in part.gaps:
        index.skip(writer, gap.start, gap.stop, kind=gap.kind)


@dataclasses.dataclass
class _Pending:
    """Rows that were passed by. due: when they are tried again, time.monotonic()."""

    gap: Gap
    due: float
    pause: float = _LONGEST_PAUSE


@dataclasses.dataclass
class _Behind:
    """Rows [begin, head) of a writer that are committed and not read. gap: at their beginning, those that are passed over."""

    begin: int
    head: int
    gap: Gap | None = None
    not_before: float = 0.0
    pause: float = 0.05
    unreadable_since: float = math.inf

    @property
    def rows(self) -> int:
        return self.head - self.begin


class Tail:
    """Reads with a thread of its own. `integrate` is called by the training loop, everything else is inside."""

    def __init__(
        self,
        reader: LogReader,
        heads: Mapping[str, int],
        pending: Mapping[str, Sequence[tuple[int, int]]] = types.MappingProxyType({}),
        *,
        poll_seconds: float,
        most_behind: int = 0,
        arrival_bytes: int = ARRIVAL_BYTES,
    ):
        """Args: reader: no other thread may use it from `start` on, but for what is thread-safe. heads: rows of each writer
        that the index has seen. pending: writer -> rows [start, stop) below them that may come. most_behind: rows; who is further
        behind passes over the oldest, of the writers that have most; 0: no row is passed over. arrival_bytes: of rows that wait
        for `integrate`, beyond which no more are read.
        """
        self._reader = reader
        self._read_to = dict(heads)
        self._behind: dict[str, _Behind] = {}
        self._arrivals: collections.deque[_Round] = collections.deque()
        # Each is written by one thread: bytes that were read, and those that the index has.
        self._read_bytes = self._taken_bytes = 0
        self._poll_seconds, self._most_behind, self._arrival_bytes = poll_seconds, most_behind, arrival_bytes
        self._stop = threading.Event()
        self._news = threading.Event()
        self._room = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._follow, name="replay-tail", daemon=True)
        # Writer -> its first rows that were passed over.
        self._named: dict[str, Gap] = {}
        # Writer -> why its next rows cannot be read yet.
        self._waiting: dict[str, str] = {}
        self._pending = [
            _Pending(Gap(writer, start, stop, "pending", "they could not be read before"), 0.0)
            for writer, ranges in pending.items()
            for start, stop in ranges
        ]
        self._sweep_seconds = SWEEP_SECONDS_OF_STORE if isinstance(reader.root, places.Bucket) else SWEEP_SECONDS
        self._next_sweep = 0.0

    def start(self) -> None:
        """Polls in the background from now on."""
        self._thread.start()

    def poll(self) -> None:
        """Looks for rows that were committed since the last poll. `integrate` reads them, unless the thread does."""
        if is_due := time.monotonic() >= self._next_sweep:
            self._next_sweep = time.monotonic() + self._sweep_seconds
        for writer in sorted(self._reader.look(sweep=is_due)):
            begin, head = self._read_to.get(writer, 0), self._reader.head(writer)
            if begin < head:
                self._behind.setdefault(writer, _Behind(begin, head)).head = head
        self._pass_over()

    def _pass_over(self) -> None:
        """Gives up the oldest rows where more than `most_behind` are unread."""
        total = sum(each.rows for each in self._behind.values())
        if not self._most_behind or total <= self._most_behind:
            return
        most = _level([each.rows for each in self._behind.values()], self._most_behind)
        for writer, behind in self._behind.items():
            kept = self._reader.appends(writer, behind.head - most)
            first = kept[0].first if kept else behind.head
            if first > behind.begin:
                reason = f"the trainer is {total} rows behind, and reads the newest {self._most_behind} (twice replay.capacity)"
                begin = behind.gap.start if behind.gap else behind.begin
                behind.gap, behind.begin = Gap(writer, begin, first, "passed_over", reason), first

    def _read_round(self) -> _Round | None:
        """The next round; None where no row can be read now."""
        if (late := self._read_late()) is not None:
            return late
        now = time.monotonic()
        ready = {writer: each for writer, each in self._behind.items() if each.not_before <= now}
        if not ready:
            return None
        size = self._rows_per_round(of=len(ready))
        asked: dict[str, tuple[int, int]] = {}
        # No more appends than are read at once: one after the other they would cost a request's latency each.
        room, most = self._arrival_bytes // _PARTS, PREFETCHED_APPENDS
        first = heapq.nlargest(most, ready, key=lambda name: ready[name].rows)
        furthest = ready[first[0]].rows
        for writer in first:
            each = ready[writer]
            if asked and (room <= 0 or most <= 0 or each.rows <= furthest - size):
                break
            asked[writer] = each.begin, self._end(writer, each.begin, min(each.begin + size, each.head))
            room -= (asked[writer][1] - each.begin) * self._reader.shape.row_bytes
            most -= len(self._reader.appends(writer, *asked[writer]))
        self._reader.prefetch(asked)
        parts = {writer: part for writer in asked if (part := self._read_writer(writer, *asked[writer])) is not None}
        is_last = not any(each.not_before <= now for each in self._behind.values())
        return _Round(parts, is_last)

    def _read_late(self) -> _Round | None:
        """Rows that were passed by and can be read now."""
        now = time.monotonic()
        for each in [each for each in self._pending if each.due <= now]:
            gap = each.gap
            part = read_part(self._reader, gap.writer, gap.start, gap.stop, wait=False)
            if part.head > gap.start:
                self._pending.remove(each)
                if part.head < gap.stop:
                    self._pending.append(_Pending(gap.within(part.head, gap.stop), now + _LONGEST_PAUSE))
                return _Round({gap.writer: part}, is_last=False, late=gap.within(gap.start, part.head))
            each.pause = min(2 * each.pause, _LONGEST_PENDING_PAUSE)
            each.due = now + each.pause
        return None

    def _rows_per_round(self, *, of: int) -> int:
        """About how many rows: what many rounds are made of mixes the writers. Args: of: writers with rows to read."""
        rows = min(_ROWS_PER_READ, min(_BYTES_PER_READ, self._arrival_bytes // _PARTS) // self._reader.shape.row_bytes)
        if self._most_behind:
            rows = min(rows, self._most_behind // _ROUNDS // of)
        return max(rows, 1)

    def _end(self, writer: str, begin: int, end: int) -> int:
        """Where rows end that are read together: where an append ends, `end` or behind it."""
        last = self._reader.appends(writer, max(end - 1, begin), end)
        return max(last[-1].stop, end) if last else end

    def _read_writer(self, writer: str, begin: int, end: int) -> Part | None:
        behind = self._behind[writer]
        part = read_part(self._reader, writer, begin, end, wait=False)
        if (error := part.error) is not None:
            now = time.monotonic()
            if isinstance(error, RowsGone):  # a look has passed it by, perhaps
                self._next_sweep = min(self._next_sweep, now + self._reader.patience_seconds / 4)
            behind.not_before, behind.pause = now + behind.pause, min(2 * behind.pause, _LONGEST_PAUSE)
            # While the whole log is away, all of it may come.
            is_new = part.head > begin or behind.unreadable_since == math.inf or not self._reader.is_there(writer)
            behind.unreadable_since = now if is_new else behind.unreadable_since
            self._waiting[writer] = f"{error}; the rows behind them come in {self._reader.patience_seconds:g} s all the same"
            # Retention of another run removes rows as it likes.
            patience = 0.0 if isinstance(error, RowsGone) and not self._reader.is_own(writer) else self._reader.patience_seconds
            if now - behind.unreadable_since >= patience and self._reader.is_there(writer):
                gap = Gap(writer, part.head, min(error.stop, behind.head), "pending", error.reason)
                part.gaps.append(gap)
                part.head, behind.unreadable_since, behind.not_before = gap.stop, math.inf, 0.0
                self._pending.append(_Pending(gap, now + _LONGEST_PAUSE))
        if part.error is None or part.gaps:
            behind.pause, behind.unreadable_since = 0.05, math.inf
            self._waiting.pop(writer, None)
        if behind.gap is not None:
            part.gaps.insert(0, behind.gap)
            behind.gap = None
        elif part.head == begin:
            return None
        for gap in part.gaps if len(self._named) < _NAMED_AT_MOST else ():
            if gap.kind == "passed_over":
                self._named.setdefault(writer, gap)
        self._read_to[writer] = behind.begin = part.head
        if behind.begin == behind.head:
            del self._behind[writer]
        return part

    def _follow(self) -> None:
        try:
            while not self._stop.is_set():
                self.poll()
                next_poll = time.monotonic() + self._poll_seconds
                while time.monotonic() < next_poll and not self._stop.is_set():
                    self._room.clear()
                    if self._read_bytes - self._taken_bytes > self._arrival_bytes * (_PARTS - 1) // _PARTS:
                        self._room.wait(self._poll_seconds)
                    elif (found := self._read_round()) is None:
                        self._stop.wait(max(next_poll - time.monotonic(), 0))
                    elif found.parts:
                        self._read_bytes += found.bytes
                        self._arrivals.append(found)
                        self._news.set()
        except BaseException as error:  # handed to the training loop, which raises it
            self._failure = error
            self._news.set()

    def integrate(self, index: ReplayIndex, *, step: int) -> list[dict[str, Any]]:
        """Adds what has arrived to the index, as visible from `step` on.

        Returns records for the journal: one ledger.integration for each group of rounds that went in at once, writer by writer.
        """
        if self._failure is not None:
            raise self._failure
        self._news.clear()
        records = []
        while groups := self._grouped(self._arrived()):
            for group in groups:
                for writer in sorted(group.parts):
                    part = group.parts[writer]
                    self._taken_bytes += part.bytes
                    take_part(index, self._reader, writer, part, step=step)
                    part.runs.clear()
                self._room.set()
                if group.late is not None:
                    records.append(ledger.late(group.late.writer, group.late.start, group.late.stop))
                    continue
                heads = {writer: part.head for writer, part in group.parts.items()}
                records.append(ledger.integration(heads, [gap for part in group.parts.values() for gap in part.gaps]))
            if self._thread.is_alive():
                break
        return records

    def _arrived(self) -> list[_Round]:
        """The rounds that the thread has read; without a thread the next one."""
        if self._thread.is_alive():
            return [self._arrivals.popleft() for _ in range(len(self._arrivals))]
        while (found := self._read_round()) is not None:
            if found.parts:
                return [found]
        return []

    def _grouped(self, arrived: Iterable[_Round]) -> list[_Round]:
        """Rounds that follow one another become one. Those of a trainer that catches up stay apart, and late rows."""
        groups: list[_Round] = []
        for each in arrived:
            if not (groups and groups[-1].is_last and each.is_last):
                groups.append(each)
                continue
            for writer, part in each.parts.items():
                there = groups[-1].parts.setdefault(writer, part)
                if there is not part:
                    there.head, there.runs, there.gaps = part.head, there.runs + part.runs, there.gaps + part.gaps
        return groups

    def wait(self, seconds: float) -> None:
        """Returns when rows have arrived, at the latest after `seconds`."""
        self._news.wait(seconds)

    def problems(self) -> list[str]:
        """Sentences about folders and rows that are left out."""
        gaps = [*self._named.values(), *(each.gap for each in tuple(self._pending))]
        return [*self._reader.problems.values(), *dict.fromkeys(map(str, gaps)), *tuple(self._waiting.values())]

    def close(self) -> None:
        self._stop.set()
        self._room.set()
        if self._thread.is_alive():
            self._thread.join()


def _level(counts: Sequence[int], total: int) -> int:
    """The largest number so that no more than `total` are left of all counts where each is cut to it."""
    left, number = total, len(counts)
    for count in sorted(counts):
        if count * number >= left:
            return left // number
        left, number = left - count, number - 1
    return max(counts, default=0)
