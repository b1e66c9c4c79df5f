"""Reads the rows of replay logs: of all writers under a replay folder, and of those of other runs that are mounted.

A look lists what was put in the last minutes, and what comes later: its cost grows with the news, not with the log. A sweep lists
all, and so finds what a look passes by: an append whose writer's clock is behind, or that storage shows late.
"""

import bisect
import calendar
import collections
import contextlib
import itertools
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

from tba_jax.replay.log import GIVEN, Append, decode, is_minute, minute_of, registration
from tba_jax.run import processes
from tba_jax.storage import layout, places
from tba_jax.storage.places import STORAGE_ERRORS, Place
from tba_jax.trajectory import Rows, RowShape

# A look begins so long before the last one: clocks differ, and storage may show an append late.
_SKEW_SECONDS = 120
# A writer whose clock is further behind is looked for at its own time, until it has been silent for so long.
_LATE_SECONDS = 600
_MOST_LATE_MINUTES = 32
_READ_AHEAD_APPENDS = 16
# Appends whose reading may have started before anyone asked for their rows.
PREFETCHED_APPENDS = 64
_DEBRIS = ".__lock"  # the end of the names of files that tensorstore is writing
_MOST_SENTENCES = 64


class Unreadable(Exception):
    """Committed rows [start, stop) of a writer cannot be read."""

    told = "cannot be read"

    def __init__(self, writer: str, start: int, stop: int, reason: str):
        super().__init__(f"replay log of writer {writer}: rows {start} to {stop - 1} {self.told}: {reason}")
        self.writer, self.start, self.stop, self.reason = writer, start, stop, reason


class LogCorruption(Unreadable, ValueError):
    """An append is there, and is not what its writer put, or not what this version reads."""


class RowsGone(Unreadable, ValueError):
    """A sweep does not find the append: retention has removed it, or storage does not show it."""

    told = "are not in the log"


class RowsPending(Unreadable, OSError):
    """Storage does not answer, or does not show the append yet."""

    told = "cannot be read yet"


class _Log:
    """The appends of a writer that have been seen, by their first rows."""

    def __init__(self, root: "_Root"):
        self.root = root
        self.firsts: list[int] = []
        self.appends: list[Append] = []

    @property
    def head(self) -> int:
        """Rows that are committed: a writer puts an append once the one before is there."""
        return self.appends[-1].stop if self.appends else 0

    def add(self, append: Append) -> bool:
        """Takes an append up. Returns whether it has no row of another."""
        at = bisect.bisect(self.firsts, append.first)
        before, after = self.appends[at - 1 : at] if at else [], self.appends[at : at + 1]
        if any(each.stop > append.first for each in before) or any(append.stop > each.first for each in after):
            return False
        self.firsts.insert(at, append.first)
        self.appends.insert(at, append)
        return True

    def drop(self, append: Append) -> None:
        at = bisect.bisect_left(self.firsts, append.first)
        if self.appends[at : at + 1] == [append]:
            del self.firsts[at], self.appends[at]

    def at(self, row: int) -> Append | None:
        """The append that has a row."""
        place = bisect.bisect(self.firsts, row) - 1
        found = self.appends[place] if place >= 0 else None
        return found if found is not None and row < found.stop else None

    def after(self, row: int) -> int:
        """The first row of the next append beyond a row that none has; the head where there is none."""
        place = bisect.bisect(self.firsts, row)
        return self.firsts[place] if place < len(self.firsts) else self.head


class _Root:
    """A replay folder that is followed.

    seen: minute -> names in it; changed: local minute -> its time of change when it was listed whole; looked: time.time();
    late: writer -> time.monotonic() of its last news, for those whose clocks are behind.
    """

    def __init__(self, place: Place):
        self.place = place
        self.store: ts.KvStore = places.open_store(place)
        self.seen: dict[str, set[str]] = {}
        self.changed: dict[str, int] = {}
        self.looked = 0.0
        self.late: dict[str, float] = {}
        self.told: dict[str, str] = {}

    def tell(self, name: str, sentence: str) -> None:
        """Keeps a sentence about a file or writer; of very many, the first."""
        if name in self.told or len(self.told) < _MOST_SENTENCES:
            self.told[name] = sentence

    def listed(self, minutes: Sequence[str], since: str) -> dict[str, list[str]]:
        """Minute -> all names in it, of these minutes and of those from `since` on; "": of all.
        On a local folder, of all leaves out the minutes that have not changed. Raises places.STORAGE_ERRORS."""
        if isinstance(self.place, Path):
            there = sorted(name for name in os.listdir(self.place) if is_minute(name) and (name >= since or name in minutes))
            return {minute: names for minute in there if (names := self._names(minute, always=bool(since))) is not None}
        ranges = [ts.KvStore.KeyRange(f"{each}/", f"{each}0") for each in minutes if each < since]
        lists = [self.store.list(each) for each in [*ranges, ts.KvStore.KeyRange(since, ":")]]  # ":" follows "9"
        found: dict[str, list[str]] = collections.defaultdict(list)
        for key in itertools.chain.from_iterable(each.result() for each in lists):
            minute, _, name = key.decode().partition("/")
            found[minute].append(name)
        return found

    def _names(self, minute: str, *, always: bool) -> list[str] | None:
        """The names in a minute of a local folder; None where it has not changed since it was listed whole, unless `always`."""
        folder = self.place / minute
        assert isinstance(folder, Path)
        try:
            stamp = folder.stat().st_mtime_ns
        except FileNotFoundError:
            return []
        if not always and self.changed.get(minute) == stamp:
            return None
        names = places.names_in(folder)
        if time.time_ns() - stamp > _SKEW_SECONDS * 10**9:  # else it may change again at the same time of change
            self.changed[minute] = stamp
        return names


class LogReader:
    """Follows all logs under a replay folder, and under those of other runs that are mounted, and reads their rows.

    Not thread-safe, but for `appends`, `head`, `is_own` and `problems`.

    Attributes: shape: the schema that rows must have. root: the replay folder.
    """

    def __init__(self, root: Place, shape: RowShape, *, mounts: Sequence[Place] = (), patience_seconds: float = 30.0):
        """Args: root: `RunDir.replay`. mounts: replay folders of other runs, which are only read. patience_seconds: how long
        `read` waits for committed rows that storage does not show; for those that it does not list, so long in all."""
        self.shape, self.root, self.patience_seconds = shape, root, patience_seconds
        self._expected: dict[str, int] = {}
        self._unlisted_seconds = 0.0  # that `read` has waited for rows that are not listed
        self._roots = [_Root(each) for each in dict.fromkeys((root, *mounts))]
        self._logs: dict[str, _Log] = {}
        # Writers whose rows appear when they are registered, and are not.
        self._hidden: set[str] = set()
        self._moved: set[str] = set()
        self._prefetched: dict[Append, Any] = {}

    def look(self, *, sweep: bool = False) -> set[str]:
        """Takes up appends that were put since the last look; by a sweep all, and forgets those that were removed.

        Returns the writers that have more of them than when this was asked last.
        """
        self._update(sweep=sweep)
        moved, self._moved = self._moved - self._hidden, self._moved & self._hidden
        return moved

    def _update(self, *, sweep: bool) -> None:
        for root in self._roots:
            try:
                self._look(root, sweep=sweep or not root.looked)
                root.told.pop("", None)
            except FileNotFoundError:  # nobody has written yet, or the folder is away
                continue
            except STORAGE_ERRORS as error:
                root.told[""] = f"{root.place} cannot be listed: {error}"
        for writer in sorted(self._hidden & self._logs.keys()):
            with contextlib.suppress(OSError):  # storage does not answer: they stay hidden
                if places.exists(registration(self.root_of(writer), writer)):
                    self._hidden.discard(writer)
                    self._moved.add(writer)

    def _look(self, root: _Root, *, sweep: bool) -> None:
        now = time.time()
        since = "" if sweep else minute_of(min(now, root.looked) - _SKEW_SECONDS)
        if not sweep and root.seen:  # this clock may be ahead of all writers'
            since = min(since, max(root.seen))
        listed = root.listed(self._late_minutes(root), since)
        for minute, names in listed.items():
            seen = root.seen.setdefault(minute, set())
            is_late = sweep and root.looked > 0 and minute < minute_of(root.looked - _SKEW_SECONDS)
            taken = {name for name in set(names) - seen if self._take(root, minute, name, is_late=is_late)}
            if sweep:
                self._forget(root, minute, seen - set(names))
            seen.update(taken)
        if sweep:
            there = set(places.names_in(root.place)) if isinstance(root.place, Path) else listed.keys()
            for minute in root.seen.keys() - there:
                self._forget(root, minute, root.seen.pop(minute))
                root.changed.pop(minute, None)
            self._logs = {writer: log for writer, log in self._logs.items() if log.appends}
        root.looked = now

    def _late_minutes(self, root: _Root) -> list[str]:
        """The minutes in which writers are now whose clocks are behind."""
        now = time.monotonic()
        there = ((writer, at) for writer, at in root.late.items() if self.appends(writer))
        root.late = {writer: at for writer, at in there if now - at < _LATE_SECONDS}
        minutes: dict[str, None] = {}
        for writer in sorted(root.late, key=lambda each: -root.late[each]):
            newest = calendar.timegm(time.strptime(self._logs[writer].appends[-1].minute, "%Y%m%dT%H%M"))
            minutes |= dict.fromkeys(minute_of(newest + 60 * ahead) for ahead in range(3 + _LATE_SECONDS // 300))
        return list(minutes)[:_MOST_LATE_MINUTES]

    def _take(self, root: _Root, minute: str, name: str, *, is_late: bool) -> bool:
        """Takes an append up, or says why not. Returns whether that stays so."""
        append = Append.of(minute, name) if is_minute(minute) else None
        if append is None:
            if not name.endswith(_DEBRIS):
                root.tell(name, f"{root.place / minute / name} is ignored: it is no append")
            return True
        writer = append.writer
        if writer not in self._logs:
            self._logs[writer] = _Log(root)
            if writer.startswith(GIVEN):
                self._hidden.add(writer)
        log = self._logs[writer]
        if log.root is not root:
            root.tell(writer, f"the rows of writer {writer} in {root.place} are ignored: those in {log.root.place} are read")
        elif not log.add(append):
            root.tell(writer, f"{root.place / append.key} is ignored: another append of writer {writer} has some of its rows")
            return False  # the other one may be of an attempt that was interrupted, and go
        else:
            root.told.pop(writer, None)
            self._moved.add(writer)
            if is_late or writer in root.late:
                root.late[writer] = time.monotonic()
                says = f"it said {append.minute} (UTC) when it was {minute_of(time.time())} here"
                # Once, for whoever logs the sentences: each append would say it in other words.
                if (clock := f"clock of {writer}") not in root.told:
                    root.tell(clock, f"the clock of writer {writer} is behind: {says}")
        return True

    def _forget(self, root: _Root, minute: str, names: set[str]) -> None:
        for name in names:
            root.seen.get(minute, set()).discard(name)
            append = Append.of(minute, name)
            if append is not None and (log := self._logs.get(append.writer)) is not None and log.root is root:
                log.drop(append)

    @property
    def problems(self) -> dict[str, str]:
        """Name of a writer or file -> why it is not followed, or what is wrong with it. One sentence each."""
        return {name or str(root.place): told for root in self._roots for name, told in tuple(root.told.items())}

    def heads(self) -> dict[str, int]:
        """Committed rows of every writer; sweeps."""
        self._update(sweep=True)
        return {writer: log.head for writer, log in self._logs.items() if log.appends and writer not in self._hidden}

    def expect(self, heads: Mapping[str, int]) -> None:
        """Notes rows that were committed once, so that `read` waits for those of them that are not listed."""
        self._expected |= heads

    def head(self, writer: str) -> int:
        """Committed rows of a writer, as of the last look."""
        log = self._logs.get(writer)
        return 0 if log is None or writer in self._hidden else log.head

    def appends(self, writer: str, start: int = 0, stop: int | None = None) -> list[Append]:
        """The appends of a writer that have been seen and have rows of [start, stop), ascending."""
        if (log := self._logs.get(writer)) is None:
            return []
        begin = max(bisect.bisect(log.firsts, start) - 1, 0)
        end = len(log.firsts) if stop is None else bisect.bisect_left(log.firsts, stop)
        return [each for each in log.appends[begin:end] if each.stop > start and (stop is None or each.first < stop)]

    def kept(self, writer: str) -> list[range]:
        """Rows of a writer that are in its log, ascending; no two ranges touch."""
        found: list[range] = []
        for append in self.appends(writer):
            follows = found and found[-1].stop == append.first
            found[-1:] = [range(found[-1].start, append.stop)] if follows else [*found[-1:], range(append.first, append.stop)]
        return found

    def is_own(self, writer: str) -> bool:
        """Whether a writer's rows are of this run; policy_step counts the steps of the run that a row is of."""
        return (log := self._logs.get(writer)) is None or log.root is self._roots[0]

    def root_of(self, writer: str) -> Place:
        """The replay folder that has a writer's log."""
        return self._logs[writer].root.place if writer in self._logs else self.root

    def info(self, writer: str) -> dict[str, Any]:
        """What the process that writes a log says of itself. Raises FileNotFoundError, ValueError."""
        return layout.read_json(registration(self.root_of(writer), writer))["info"]

    def prefetch(self, ranges: Mapping[str, tuple[int, int]]) -> None:
        """Starts reading committed rows [start, stop) of several writers at once, a bounded number; `read` then waits less.

        What an earlier call started and nobody read is given up.
        """
        wanted = (append for writer, (start, stop) in ranges.items() for append in self.appends(writer, start, stop))
        self._prefetched = {append: self._start(append) for append in itertools.islice(wanted, PREFETCHED_APPENDS)}

    def read(self, writer: str, start: int, stop: int, *, wait: bool = True) -> Rows:
        """Rows [start, stop) of a writer, all columns.

        Args: wait: for storage that lags or does not answer, at most patience_seconds; else RowsPending comes at once.

        Raises: RowsGone: rows are not committed, or not in the log any more. LogCorruption, RowsPending: with the rows of one
        append, which may begin before `start` or end behind `stop`.
        """
        rows = self._empty(stop - start)
        self._fill(rows, writer, np.arange(start, stop), np.arange(stop - start), wait=wait)
        return rows

    def read_ids(self, ids: Sequence[tuple[str, int]]) -> Rows:
        """The rows named by (writer, row), in the order given. Raises as `read`."""
        rows = self._empty(len(ids))
        targets: dict[str, list[int]] = {}
        for target, (writer, _) in enumerate(ids):
            targets.setdefault(writer, []).append(target)
        for writer, of_writer in targets.items():
            self._fill(rows, writer, np.array([ids[target][1] for target in of_writer], np.int64), np.array(of_writer), wait=True)
        return rows

    def _empty(self, count: int) -> dict[str, np.ndarray]:
        return {name: np.zeros((count, *shape), dtype) for name, (dtype, shape) in self.shape.columns().items()}

    def _fill(self, rows: Rows, writer: str, wanted: np.ndarray, targets: np.ndarray, *, wait: bool) -> None:
        """rows[targets] = the rows `wanted` (int64 row numbers) of the writer."""
        if not len(wanted):
            return
        order = np.argsort(wanted, kind="stable")
        ascending = wanted[order]
        for append, content in self._contents(self._covering(writer, ascending, wait=wait), wait=wait):
            begin, end = np.searchsorted(ascending, [append.first, append.stop])
            # Rows side by side, as the trainer reads them, are copied at once.
            source, target = _as_slice(ascending[begin:end] - append.first), _as_slice(targets[order[begin:end]])
            for name, column in content.items():
                rows[name][target] = column[source]

    def _covering(self, writer: str, ascending: np.ndarray, *, wait: bool) -> list[Append]:
        """The appends that have these rows."""
        found: list[Append] = []
        at, begin, has_swept, waited = 0, time.monotonic(), False, self._unlisted_seconds
        while at < len(ascending):
            row, log = int(ascending[at]), self._logs.get(writer)
            append = log.at(row) if log is not None and writer not in self._hidden else None
            if append is not None:
                found.append(append)
                at = int(np.searchsorted(ascending, append.stop))
                continue
            expected, is_there = self._expected.get(writer, 0), self.is_there(writer)
            patience = self.patience_seconds - waited * is_there if wait and (row < expected or not is_there) else 0.0
            if row >= 0 and (not has_swept or time.monotonic() - begin < patience):
                time.sleep(0.2 * has_swept)
                has_swept = True
                self._update(sweep=True)
                self._unlisted_seconds = waited + time.monotonic() - begin
                continue
            if row < 0:
                raise ValueError(f"row {row} of writer {writer} cannot be read: rows begin with 0")
            head = self.head(writer)
            stop = self._logs[writer].after(row) if row < head else max(expected, int(ascending[-1]) + 1)
            if not is_there:
                raise RowsPending(writer, row, stop, f"{self.root_of(writer)} is not there")
            if row < max(head, expected) and head:
                raise RowsGone(writer, row, stop, "retention has removed them, or storage does not show them")
            raise RowsGone(writer, row, stop, f"rows 0 to {head - 1} are committed" if head else "its log is not there")
        return found

    def _contents(self, appends: Sequence[Append], *, wait: bool) -> Iterator[tuple[Append, dict[str, np.ndarray]]]:
        """Yields (append, its rows) in order, with bounded read-ahead."""
        started: collections.deque[Any] = collections.deque()
        ahead = iter(appends)
        for append in appends:
            for each in itertools.islice(ahead, _READ_AHEAD_APPENDS - len(started)):
                started.append(self._prefetched.pop(each, None) or self._start(each))
            yield append, self._finish(append, started.popleft(), wait=wait)

    def _start(self, append: Append) -> Any:
        return self._logs[append.writer].root.store.read(append.key)

    def _finish(self, append: Append, started: Any, *, wait: bool) -> dict[str, np.ndarray]:
        rows, root = (append.writer, append.first, append.stop), self._logs[append.writer].root
        deadline, pause = time.monotonic() + self.patience_seconds, 0.01
        while True:
            try:
                found = started.result()
                if found.state == "value":
                    return decode(found.value, append, self.shape)
                reason = "is not there"
            except STORAGE_ERRORS as error:
                if not _is_of_storage(error):
                    raise LogCorruption(*rows, f"{root.place / append.key}: {error}") from error
                reason = str(error)
            if not wait or time.monotonic() > deadline:
                is_gone = reason == "is not there" and self.is_there(append.writer)
                raise (RowsGone if is_gone else RowsPending)(*rows, f"{root.place / append.key} {reason}")
            time.sleep(pause)
            pause = min(1.0, 2 * pause)
            started = self._start(append)

    def is_there(self, writer: str) -> bool:
        """Whether the replay folder of a writer answers. Else the log is away: a folder that was moved, a mount that is lost."""
        place = self.root_of(writer)
        try:
            if isinstance(place, Path):
                return place.is_dir()
            places.exists(registration(place, writer))
            return True
        except OSError:
            return False


_AWAY = re.compile(
    r"(UNAVAILABLE|DEADLINE_EXCEEDED|ABORTED|RESOURCE_EXHAUSTED|PERMISSION_DENIED|UNAUTHENTICATED|NOT_FOUND|INTERNAL|UNKNOWN|CANCELLED)"
)


def _is_of_storage(error: Exception) -> bool:
    """Whether an error means that storage does not answer: nothing is known of the object."""
    return bool(_AWAY.match(str(error))) or processes.is_storage_failure(OSError(str(error)))


def _as_slice(numbers: np.ndarray) -> slice | np.ndarray:
    """The same rows as `numbers`, int[n], n >= 1, as a slice where they follow one another."""
    first = int(numbers[0])
    follows = np.array_equal(numbers, np.arange(first, first + len(numbers)))
    return slice(first, first + len(numbers)) if follows else numbers
