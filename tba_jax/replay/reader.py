"""Reads the rows of replay logs: of all writers under a replay folder, and of those of other runs that are mounted."""

import itertools
import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tba_jax.replay.log import REGISTER
from tba_jax.replay.segment import LogSchema, RowsExpired, segment_name
from tba_jax.replay.writers import REQUESTS_PER_MINUTE, Writers
from tba_jax.run import processes
from tba_jax.storage import places
from tba_jax.storage.places import STORAGE_ERRORS, Place
from tba_jax.trajectory import Rows, RowShape

# Below a committed head this error means damage, unless the file is empty, as one is that is not there yet. Any other error may
# mean that storage lags.
_DAMAGED = re.compile(r"DATA_LOSS:(?!.*Input size of 0 is less than digest size)", re.DOTALL)
# These mean that storage does not answer: nothing is known of the rows.
_AWAY = re.compile(r"(UNAVAILABLE|DEADLINE_EXCEEDED|ABORTED|RESOURCE_EXHAUSTED|PERMISSION_DENIED|UNAUTHENTICATED):")
# A segment that nothing was missing from for so long has a new deadline.
_OVER_SECONDS = 60.0
_SEGMENTS_REMEMBERED = 10_000
_READ_AHEAD_APPENDS = 16
# Appends whose reading may have started before anyone asked for their rows.
PREFETCHED_APPENDS = 64


class LogCorruption(ValueError):
    """Committed rows [start, stop) of a writer cannot be read back whole."""

    def __init__(self, writer: str, start: int, stop: int, reason: str):
        super().__init__(f"replay log of writer {writer}: rows {start} to {stop - 1} cannot be read: {reason}")
        self.writer, self.start, self.stop, self.reason = writer, start, stop, reason


class RowsPending(OSError):
    """Committed rows [start, stop) of a writer cannot be read yet: storage lags, or does not answer."""

    def __init__(self, writer: str, start: int, stop: int, reason: str):
        super().__init__(f"replay log of writer {writer}: rows {start} to {stop - 1} cannot be read yet: {reason}")
        self.writer, self.start, self.stop, self.reason = writer, start, stop, reason


class LogReader(Writers):
    """Follows all logs as Writers does, and reads their rows."""

    def __init__(
        self,
        root: Place,
        shape: RowShape,
        *,
        mounts: Sequence[Place] = (),
        patience_seconds: float = 30.0,
        requests_per_minute: float = REQUESTS_PER_MINUTE,
    ):
        """Args: root, mounts, requests_per_minute: see Writers. patience_seconds: how long committed chunks of a segment may stay
        "not found" on slow storage before they count as lost."""
        super().__init__(root, shape, mounts=mounts, requests_per_minute=requests_per_minute)
        self._patience_seconds = patience_seconds
        # (writer, segment) -> when chunks of it began to be missing, and when one was last: the deadline is of the segment.
        self._missing_since: dict[tuple[str, int], tuple[float, float]] = {}
        # (writer, append number) -> its read, started by `prefetch`.
        self._prefetched: dict[tuple[str, int], Any] = {}

    def prefetch(self, ranges: Mapping[str, tuple[int, int]]) -> None:
        """Starts reading committed rows [start, stop) of several writers at once, a bounded number; `read` then waits less.

        What an earlier call started and nobody read is given up.
        """
        self._prefetched.clear()
        for writer, (start, stop) in ranges.items():
            schema = self.schema(writer)
            for append in range(start // schema.rows_per_append, -(-stop // schema.rows_per_append)):
                if len(self._prefetched) == PREFETCHED_APPENDS:
                    return
                self._prefetched[writer, append] = self._start(writer, schema, append)

    def read(self, writer: str, start: int, stop: int, *, wait: bool = True) -> Rows:
        """Rows [start, stop) of a writer, all columns.

        Args: wait: for storage that lags or does not answer, at most patience_seconds; else RowsPending comes at once.

        Raises:
          ValueError: the rows are not committed, or the writer is not followed (with the problem that was found).
          RowsExpired: retention has removed some of them; its range ends with the gap, which may be behind `stop`.
          LogCorruption: rows are damaged, missing beyond patience, or not where they should be.
          RowsPending: storage does not answer, or may have the rows later.
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
            self._fill(rows, writer, np.array([ids[target][1] for target in of_writer], np.int64), np.array(of_writer))
        return rows

    def _empty(self, count: int) -> dict[str, np.ndarray]:
        return {name: np.zeros((count, *shape), dtype) for name, (dtype, shape) in self.shape.columns().items()}

    def _fill(self, rows: Rows, writer: str, wanted: np.ndarray, targets: np.ndarray, *, wait: bool = True) -> None:
        """rows[targets] = the rows `wanted` (int64 row numbers) of the writer."""
        if not len(wanted):
            return
        self._check_committed(writer, int(wanted.min()), int(wanted.max()) + 1, wait=wait)
        size = self.schema(writer).rows_per_append
        order = np.argsort(wanted, kind="stable")
        appends, starts = np.unique(wanted[order] // size, return_index=True)
        blocks = np.split(order, starts[1:])
        for block, (append, content) in zip(blocks, self._read_appends(writer, appends.tolist(), wait), strict=True):
            # Rows side by side, as the trainer reads them, are copied at once.
            source, target = _as_slice(wanted[block] - append * size), _as_slice(targets[block])
            for name, column in content.items():
                rows[name][target] = column[source]

    def _check_committed(self, writer: str, start: int, stop: int, *, wait: bool) -> None:
        """Raises what `read` raises where rows up to `stop` are not known to be committed."""
        deadline = time.monotonic() + self._patience_seconds
        while stop > self._committed(writer):
            self.heads()
            if stop <= self._committed(writer):
                return
            first, error = max(start, self._committed(writer)), self._head_errors.get(writer)
            if error is None or start < 0:
                register = (root.place / REGISTER / f"{writer}.json" for root in self._roots.values())
                if writer not in self._followed and any(each in self._refused for each in register):
                    raise LogCorruption(writer, start, stop, self.problems[writer])
                there = self._committed(writer)
                reason = self.problems.get(writer, f"rows 0 to {there - 1} are committed" if there else "its log is not there")
                raise ValueError(f"rows {start} to {stop - 1} of writer {writer} cannot be read: {reason}")
            if not self._may_come(writer, self._followed[writer].segment, error):
                raise LogCorruption(writer, first, stop, self.problems[writer]) from error
            if not wait or time.monotonic() > deadline:
                raise RowsPending(writer, first, stop, self.problems[writer]) from error
            time.sleep(0.2)
        if start < 0:
            raise ValueError(f"rows {start} to {stop - 1} of writer {writer} cannot be read: rows begin with 0")

    def _committed(self, writer: str) -> int:
        return self._followed[writer].rows if writer in self._followed else 0

    def _read_appends(self, writer: str, appends: Sequence[int], wait: bool) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
        """Yields (append number, its rows) in order, with bounded read-ahead."""
        schema = self.schema(writer)
        for first in range(0, len(appends), _READ_AHEAD_APPENDS):
            block = appends[first : first + _READ_AHEAD_APPENDS]
            started = {append: self._start(writer, schema, append) for append in block}
            for append in block:
                yield append, self._finish(writer, schema, append, started.pop(append), wait)

    def _start(self, writer: str, schema: LogSchema, append: int) -> Any:
        if (writer, append) in self._prefetched:
            return self._prefetched.pop((writer, append))
        try:
            self._refuse_expired(writer, append)
            return self._segment(writer, append // schema.segment_appends).start_read(append % schema.segment_appends)
        except STORAGE_ERRORS as error:
            return error

    def _refuse_expired(self, writer: str, append: int) -> None:
        """Raises RowsExpired from this append to the next that is kept: a late reader is told once of a whole gap."""
        schema, gone = self.schema(writer), self._gone(writer)
        segment = append // schema.segment_appends
        kept = next(number for number in itertools.count(segment) if number not in gone)
        if kept != segment:
            raise RowsExpired(writer, append * schema.rows_per_append, kept * schema.segment_rows)

    def _finish(self, writer: str, schema: LogSchema, append: int, started: Any, wait: bool) -> dict[str, np.ndarray]:
        start, stop = append * schema.rows_per_append, (append + 1) * schema.rows_per_append
        segment = append // schema.segment_appends
        deadline, pause = math.inf, 0.01
        while True:
            try:
                if isinstance(started, Exception):
                    raise started
                rows = self._segment(writer, segment).finish_read(started)
                break
            except RowsExpired:
                raise
            except STORAGE_ERRORS as error:
                self._refresh_expired()  # it may have gone just now
                self._refuse_expired(writer, append)
                reason = f"{self.folder(writer) / segment_name(segment)}: {error}"
                if not self._may_come(writer, segment, error):
                    raise LogCorruption(writer, start, stop, reason) from error
                # From the first failure on, so that what is missing has had its time before.
                deadline = min(deadline, time.monotonic() + self._patience_seconds)
                if not wait or time.monotonic() > deadline:
                    raise RowsPending(writer, start, stop, reason) from error
            time.sleep(pause)
            pause = min(1.0, 2 * pause)
            self._segments.pop((writer, segment), None)
            started = self._start(writer, schema, append)
        if not np.array_equal(rows["row"], np.arange(start, stop)):
            raise LogCorruption(writer, start, stop, f"the column row says {rows['row'].tolist()[:4]}…")
        return rows

    def _may_come(self, writer: str, segment: int, error: Exception) -> bool:
        """Whether rows of a segment that cannot be read may be readable later."""
        if _AWAY.match(str(error)) or processes.is_storage_failure(OSError(str(error))):
            return True
        if _DAMAGED.match(str(error)):
            return False
        now, patience = time.monotonic(), self._patience_seconds
        since, last = self._missing_since.get((writer, segment), (now, now))
        if now - last > max(patience, _OVER_SECONDS):
            since = now
        if len(self._missing_since) > _SEGMENTS_REMEMBERED:
            self._missing_since.clear()
        self._missing_since[writer, segment] = since, now
        return now - since < patience or not self._is_there(writer)

    def _is_there(self, writer: str) -> bool:
        """Whether a writer's registration is there. Else the log is away: a folder that was moved, or a mount that is lost."""
        try:
            return places.exists(self._registration(writer))
        except OSError:
            return False


def _as_slice(numbers: np.ndarray) -> slice | np.ndarray:
    """The same rows as `numbers`, int[n], n >= 1, as a slice where they follow one another."""
    first = int(numbers[0])
    follows = np.array_equal(numbers, np.arange(first, first + len(numbers)))
    return slice(first, first + len(numbers)) if follows else numbers
