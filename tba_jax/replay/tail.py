"""Follows the replay log for the trainer: reads new rows beside the training loop, hands them over between steps.

However far behind a trainer is, it holds no more than `arrival_bytes` of rows that the index has not taken. Rows come in rounds:
a round has the next rows of each writer that is furthest behind, so that the newest rows of all writers come last.
"""

import collections
import dataclasses
import math
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tba_jax.replay import ledger
from tba_jax.replay.index import ReplayIndex
from tba_jax.replay.ledger import Gap
from tba_jax.replay.reader import LogCorruption, LogReader, RowsPending
from tba_jax.replay.segment import RowsExpired
from tba_jax.trajectory import Rows, concatenate

_ROWS_PER_READ = 4096
_BYTES_PER_READ = 1 << 23
ARRIVAL_BYTES = 1 << 26
# A round has at most so small a part of the bytes that may wait, or one append.
_PARTS = 4
# A trainer that is as far behind as it may be reads at least so many rounds: the window gets rows of each writer.
_ROUNDS = 16
# Rows that cannot be read yet are asked for again after pauses up to this.
_LONGEST_PAUSE = 5.0
_NAMED_AT_MOST = 1000


@dataclasses.dataclass
class Part:
    """Rows of one writer up to `head`, without those in gaps."""

    head: int
    runs: list[Rows]
    gaps: list[Gap]

    @property
    def bytes(self) -> int:
        return sum(column.nbytes for run in self.runs for column in run.values())


@dataclasses.dataclass
class _Round:
    """Writer -> its part. is_last: whether no writer had more rows that could be read."""

    parts: dict[str, Part]
    is_last: bool

    @property
    def bytes(self) -> int:
        return sum(part.bytes for part in self.parts.values())


def _read_before(reader: LogReader, writer: str, begin: int, stop: int, *, wait: bool) -> tuple[Rows | None, Any]:
    """Rows from `begin` on, up to what cannot be read before `stop`; and the error that tells of that, None without one."""
    error = None
    while begin < stop:
        try:
            return reader.read(writer, begin, stop, wait=wait), error
        except (LogCorruption, RowsExpired, RowsPending) as found:
            error, stop = found, found.start
    return None, error


def read_part(reader: LogReader, writer: str, begin: int, end: int, known: Sequence[Gap] = (), *, wait: bool) -> Part:
    """Rows [begin, end) of a writer without the known gaps and those that are found.

    Args: known: ascending, within the rows. wait: for rows that cannot be read yet; else the part ends before the first of them.

    Raises: RowsPending where `wait` was in vain.
    """
    part, bounds = Part(begin, [], []), [*known, Gap(writer, end, end, "")]
    for gap in bounds:
        while part.head < gap.start:
            stop = min(part.head + _ROWS_PER_READ, gap.start)
            rows, error = _read_before(reader, writer, part.head, stop, wait=wait)
            if rows is not None:
                part.runs.append(rows)
                part.head += len(rows["row"])
            if isinstance(error, RowsPending):
                if wait:
                    raise error
                return part
            if error is not None:
                # A gap may end beyond these rows: the call that reads the rows after them counts the rest of it.
                kind = "expired" if isinstance(error, RowsExpired) else "damaged"
                found = Gap(writer, part.head, min(error.stop, gap.start), kind, getattr(error, "reason", ""))
                part.gaps.append(found)
                part.head = found.stop
        if gap.stop > part.head:
            part.gaps.append(gap.within(part.head, gap.stop))
            part.head = gap.stop
    part.gaps = ledger.merged(part.gaps)
    return part


def _merge(runs: Iterable[Rows]) -> list[Rows]:
    """Joins runs whose row numbers follow one another: however a writer was polled, the index is given the same."""
    groups: list[list[Rows]] = []
    for run in runs:
        follows = groups and groups[-1][-1]["row"][-1] + 1 == run["row"][0]
        groups[-1].append(run) if follows else groups.append([run])
    return [concatenate(group) if len(group) > 1 else group[0] for group in groups]


def take_part(index: ReplayIndex, reader: LogReader, writer: str, part: Part, *, step: int) -> None:
    """Gives the index the next rows of a writer, and the number of those that it does not get."""
    for rows in _merge(part.runs):
        index.add(writer, rows, step=step, own=reader.is_own(writer), rows_per_append=reader.schema(writer).rows_per_append)
    for gap in part.gaps:
        index.skip(writer, gap.start, gap.stop, kind=gap.kind)


@dataclasses.dataclass
class _Behind:
    """Rows [begin, head) of a writer that are committed and not read. gap: at their beginning, those that are passed over."""

    begin: int
    head: int
    gap: Gap | None = None
    not_before: float = 0.0
    pause: float = 0.05

    @property
    def rows(self) -> int:
        return self.head - self.begin


class Tail:
    """Reads with a thread of its own. `integrate` is called by the training loop, everything else is inside."""

    def __init__(
        self,
        reader: LogReader,
        heads: Mapping[str, int],
        *,
        poll_seconds: float,
        most_behind: int = 0,
        arrival_bytes: int = ARRIVAL_BYTES,
    ):
        """Args: reader: no other thread may use it from `start` on, but for what is thread-safe. heads: rows of each writer
        that the index has seen. most_behind: rows; who is further behind passes over the oldest, of the writers that have
        most; 0: no row is passed over. arrival_bytes: of rows that wait for `integrate`, beyond which no more are read.
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
        # Gaps that messages name: a writer that is passed over again and again is named once.
        self._named: dict[tuple[str, ...], Gap] = {}
        # Writer -> why its next rows cannot be read yet.
        self._pending: dict[str, str] = {}

    def start(self) -> None:
        """Polls in the background from now on."""
        self._thread.start()

    def poll(self, *, spare_quiet: bool = False) -> None:
        """Looks for rows that were committed since the last poll. `integrate` reads them, unless the thread does.

        Args: spare_quiet: as of LogReader.news.
        """
        for writer, head in self._reader.news(spare_quiet=spare_quiet).items():
            begin = self._read_to.get(writer, 0)
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
            size = self._reader.schema(writer).rows_per_append
            first = (behind.head - most) // size * size
            if first > behind.begin:
                reason = f"the trainer is {total} rows behind, and reads the newest {self._most_behind} (twice replay.capacity)"
                begin = behind.gap.start if behind.gap else behind.begin
                behind.gap, behind.begin = Gap(writer, begin, first, "passed_over", reason), first

    def _read_round(self) -> _Round | None:
        """The next round; None where no row can be read now."""
        now = time.monotonic()
        ready = {writer: each for writer, each in self._behind.items() if each.not_before <= now}
        if not ready:
            return None
        sizes = {writer: self._rows_per_round(writer, of=len(ready)) for writer in ready}
        furthest = max(each.rows for each in ready.values())
        asked: dict[str, tuple[int, int]] = {}
        room = self._arrival_bytes // _PARTS
        for writer in sorted(ready, key=lambda name: -ready[name].rows):
            each = ready[writer]
            if asked and (room <= 0 or each.rows <= furthest - sizes[writer]):
                continue
            asked[writer] = each.begin, min(each.begin + sizes[writer], each.head)
            room -= (asked[writer][1] - each.begin) * self._reader.shape.row_bytes
        self._reader.prefetch(asked)
        parts = {writer: part for writer in asked if (part := self._read_writer(writer, *asked[writer])) is not None}
        is_last = not any(each.not_before <= now for each in self._behind.values())
        return _Round(parts, is_last)

    def _rows_per_round(self, writer: str, *, of: int) -> int:
        """Whole appends, at least one: what many rounds are made of mixes the writers. Args: of: writers with rows to read."""
        size = self._reader.schema(writer).rows_per_append
        rows = min(_ROWS_PER_READ, min(_BYTES_PER_READ, self._arrival_bytes // _PARTS) // self._reader.shape.row_bytes)
        if self._most_behind:
            rows = min(rows, self._most_behind // _ROUNDS // of)
        return max(math.ceil(rows / size), 1) * size

    def _read_writer(self, writer: str, begin: int, end: int) -> Part | None:
        behind = self._behind[writer]
        part = read_part(self._reader, writer, begin, end, wait=False)
        if part.head < end:
            behind.not_before, behind.pause = time.monotonic() + behind.pause, min(2 * behind.pause, _LONGEST_PAUSE)
            self._pending[writer] = f"replay log of writer {writer}: rows from {part.head} on cannot be read yet"
        else:
            behind.pause = 0.05
            self._pending.pop(writer, None)
        if behind.gap is not None:
            part.gaps.insert(0, behind.gap)
            behind.gap = None
        elif part.head == begin:
            return None
        for gap in part.gaps if len(self._named) < _NAMED_AT_MOST else ():
            self._named.setdefault((writer, gap.kind, *([str(gap.start)] * (gap.kind == "damaged"))), gap)
        self._read_to[writer] = behind.begin = part.head
        if behind.begin == behind.head:
            del self._behind[writer]
        return part

    def _follow(self) -> None:
        try:
            while not self._stop.is_set():
                self.poll(spare_quiet=True)
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
                for writer in sorted(group):
                    take_part(index, self._reader, writer, group[writer], step=step)
                    self._taken_bytes += group[writer].bytes
                    group[writer].runs.clear()
                self._room.set()
                heads = {writer: part.head for writer, part in group.items()}
                records.append(ledger.integration(heads, [gap for part in group.values() for gap in part.gaps]))
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

    def _grouped(self, arrived: Iterable[_Round]) -> list[dict[str, Part]]:
        """Writer -> part of rounds that follow one another. Rounds of a trainer that catches up stay apart, in their order."""
        groups: list[dict[str, Part]] = []
        was_last = False
        for each in arrived:
            if not (was_last and each.is_last):
                groups.append({})
            for writer, part in each.parts.items():
                there = groups[-1].setdefault(writer, part)
                if there is not part:
                    there.head, there.runs, there.gaps = part.head, there.runs + part.runs, there.gaps + part.gaps
            was_last = each.is_last
        return groups

    def wait(self, seconds: float) -> None:
        """Returns when rows have arrived, at the latest after `seconds`."""
        self._news.wait(seconds)

    def problems(self) -> list[str]:
        """Sentences about folders and rows that are left out."""
        return [*self._reader.problems.values(), *map(str, tuple(self._named.values())), *tuple(self._pending.values())]

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
