"""Reads replay logs: follows all writers under a replay folder, and those of other runs that are mounted."""

import collections
import dataclasses
import itertools
import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tba_jax.replay.expiry import EXPIRED, RowsExpired, expired_segments
from tba_jax.replay.log import REGISTER, WRITER_NAME, registration
from tba_jax.replay.segment import LogSchema, Segment, last_segment, manifest, segment_name, segments_in
from tba_jax.run import layout, places
from tba_jax.run.places import STORAGE_ERRORS, Place
from tba_jax.trajectory import Rows, RowShape

# Below a committed head these errors mean that storage lags; any other error means damage. The last two appear while a data file
# is not there yet: the database reads it as empty, and the checksum or the metadata parser refuses.
_LAGGING = re.compile(
    r"(NOT_FOUND|UNAVAILABLE|DEADLINE_EXCEEDED|ABORTED):|.*(Input size of 0 is less than digest size|Invalid JSON)", re.DOTALL
)
_READ_AHEAD_APPENDS = 16
# A writer without news for QUIET_SECONDS (most have ended) is asked only every QUIET_POLL_SECONDS, if the caller allows it.
QUIET_SECONDS = 60.0
QUIET_POLL_SECONDS = 5.0
# Open segments beyond one a writer.
SPARE_SEGMENTS = 64
# Appends whose reading may have started before anyone asked for their rows.
PREFETCHED_APPENDS = 64


class LogCorruption(ValueError):
    """Committed rows [start, stop) of a writer cannot be read back whole."""

    def __init__(self, writer: str, start: int, stop: int, reason: str):
        super().__init__(f"replay log of writer {writer}: rows {start} to {stop - 1} cannot be read: {reason}")
        self.writer, self.start, self.stop, self.reason = writer, start, stop, reason


@dataclasses.dataclass
class _Followed:
    """How far a writer's log has been seen. version: of the segment's manifest. news, asked: times of the last news and of
    the last request."""

    root: Place
    folder: Place
    schema: LogSchema
    segment: int
    rows: int
    version: bytes = b""
    news: float = dataclasses.field(default_factory=time.monotonic)
    asked: float = -math.inf

    def is_due(self) -> bool:
        """Whether the writer is to be asked by those who leave quiet writers alone."""
        now = time.monotonic()
        return now - self.news < QUIET_SECONDS or now - self.asked >= QUIET_POLL_SECONDS

    @property
    def stop(self) -> int:
        """The row after the last that the segment can hold."""
        return (self.segment + 1) * self.schema.segment_rows

    def go_to(self, segment: int) -> None:
        self.segment, self.rows, self.version = segment, segment * self.schema.segment_rows, b""


class LogReader:
    """Follows all logs under a replay folder, and under those of other runs that are mounted.

    Not thread-safe, but for `is_own`, `segment_rows` and `problems`.

    Attributes:
      shape: the schema rows must have.
      problems: name of a writer or entry -> why it is not followed, or why its head cannot be read. One sentence each;
        an entry that later becomes readable is removed.
    """

    def __init__(self, root: Place, shape: RowShape, *, mounts: Sequence[Place] = (), patience_seconds: float = 30.0):
        """
        Args:
          root: `RunDir.replay`. mounts: replay folders of other runs, which are only read.
          patience_seconds: how long a committed chunk may stay "not found" on slow storage.
        """
        self.shape = shape
        self.problems: dict[str, str] = {}
        self._roots = (root, *mounts)
        self._patience_seconds = patience_seconds
        # Registrations that are not logs of these rows -> the reason.
        self._refused: dict[Place, str] = {}
        self._followed: dict[str, _Followed] = {}
        # Root -> the version of its list of expired segments, and the list.
        self._expired: dict[Place, tuple[bytes, dict[str, frozenset[int]]]] = {each: (b"", {}) for each in self._roots}
        self._segments: collections.OrderedDict[tuple[str, int], Segment] = collections.OrderedDict()
        # (writer, append number) -> its read, started by `prefetch`.
        self._prefetched: dict[tuple[str, int], Any] = {}

    def heads(self, *, spare_quiet: bool = False) -> dict[str, int]:
        """Committed rows of every followed writer; the cost grows with writers and news, not with history.

        Args: spare_quiet: asks those without news for a minute (most have ended) every five seconds only, and sees them so late.
        """
        problems: dict[str, str] = {}
        self._refresh_expired()
        for root in self._roots:
            problems |= self._discover(root)
        # Writers whose head cannot be read are always asked, so that their problem is reported while it lasts.
        asking = [name for name, each in self._followed.items() if not spare_quiet or name in self.problems or each.is_due()]
        problems |= self._advance_all(asking)
        self.problems = problems  # as a whole: another thread may be reading them
        return {name: followed.rows for name, followed in self._followed.items()}

    def folder(self, writer: str) -> Place:
        """Where the log of a followed writer lies."""
        return self._followed[writer].folder

    def info(self, writer: str) -> dict[str, Any]:
        """What the process that writes a followed log says of itself."""
        followed = self._followed[writer]
        return layout.read_json(registration(followed.root, writer))["info"]

    def schema(self, writer: str) -> LogSchema:
        """Of a followed writer's log."""
        return self._followed[writer].schema

    def segment_rows(self, writer: str) -> int | None:
        """Rows in a segment of a writer's log; None where it is not followed right now (`problems` may say why)."""
        return self.schema(writer).segment_rows if writer in self._followed else None

    def kept(self, writer: str) -> list[range]:
        """Committed rows of a followed writer that retention has left, ascending; no two ranges touch."""
        size, head = self._followed[writer].schema.segment_rows, self._followed[writer].rows
        gone = sorted(self._gone(writer))
        starts, stops = [0, *((segment + 1) * size for segment in gone)], [*(segment * size for segment in gone), head]
        return [kept for kept in (range(start, min(stop, head)) for start, stop in zip(starts, stops, strict=True)) if kept]

    def is_own(self, writer: str) -> bool:
        """Whether a followed writer's rows are of this run; policy_step counts the steps of the run that a row is of."""
        return self._followed[writer].root == self._roots[0]

    def _refresh_expired(self) -> None:
        watched = {root: (root / EXPIRED, version) for root, (version, _) in self._expired.items()}
        for root, version in places.changed(watched).items():
            if isinstance(version, bytes):
                self._expired[root] = version, expired_segments(root)

    def _gone(self, writer: str) -> frozenset[int]:
        """Segments of a writer that retention has removed."""
        return self._expired[self._followed[writer].root][1].get(writer, frozenset())

    def _discover(self, root: Place) -> dict[str, str]:
        """Follows the writers that are new under a root. Returns what else is there, and why it is not followed."""
        problems: dict[str, str] = {}
        # The folder is listed before the register, so that a claim in between is no false alarm.
        entries = places.names_in(root) if isinstance(root, Path) else []
        known = {REGISTER, EXPIRED}
        for name in places.names_in(root / REGISTER):
            writer = name.removesuffix(".json")
            known.add(writer)
            if name.startswith(".") or (writer in self._followed and self._followed[writer].root == root):
                continue
            if sentence := self._follow(root, name):
                problems[writer] = sentence
        for name in entries:
            if name not in known and not name.startswith("."):
                problems[name] = f"{root / name} is ignored: no writer is registered under this name"
        return problems

    def _follow(self, root: Place, name: str) -> str:
        """Follows the writer of a registration, or returns why not."""
        file, writer = root / REGISTER / name, name.removesuffix(".json")
        if file in self._refused:
            return self._refused[file]
        try:
            if not name.endswith(".json") or not WRITER_NAME.fullmatch(writer):
                raise ValueError("it is not the registration of a writer")
            if writer in self._followed:
                raise ValueError(f"the rows of a writer of this name are read from {self._followed[writer].folder}")
            schema = LogSchema.from_json(layout.read_json(file)["schema"])
            if difference := schema.difference(self.shape):
                raise ValueError(f"its rows have another schema: {difference}")
            first = max(self._expired[root][1].get(writer, ()), default=-1) + 1
            last = last_segment(root / writer, first)
        except OSError as error:  # storage may recover
            return f"{file} is ignored: {error}"
        except (ValueError, TypeError, KeyError) as error:
            self._refused[file] = f"{file} is ignored: {error}"
            return self._refused[file]
        # A writer opens a segment once the one before is full, so the last segment tells all.
        self._followed[writer] = _Followed(root, root / writer, schema, segment=last, rows=last * schema.segment_rows)
        return ""

    def _advance_all(self, asking: Sequence[str]) -> dict[str, str]:
        """Brings these writers up to date; all that have news are asked at once. Returns the problems."""
        problems: dict[str, str] = {}
        while asking:
            versions, reads = places.changed(self._manifests(asking)), {}
            for writer, version in versions.items():
                try:
                    if isinstance(version, OSError):
                        raise version
                    if version is not None:  # else: the next segment is not there yet
                        reads[writer] = version, self._start_head(writer)
                except STORAGE_ERRORS as error:
                    problems[writer] = self._stays(writer, error)
            asking = []
            for writer, (version, read) in reads.items():
                try:
                    if self._finish_head(writer, version, read):
                        asking.append(writer)
                except STORAGE_ERRORS as error:
                    problems[writer] = self._stays(writer, error)
        return problems

    def _stays(self, writer: str, error: Exception) -> str:
        return f"the head of writer {writer} cannot be read, it stays at row {self._followed[writer].rows}: {error}"

    def _manifests(self, writers: Sequence[str]) -> dict[str, tuple[Place, bytes]]:
        """The file of each writer whose change means news, and its version as it was seen last."""
        found = {}
        for writer in writers:
            followed = self._followed[writer]
            followed.asked = time.monotonic()
            if followed.segment < (first := max(self._gone(writer), default=-1) + 1):
                followed.go_to(first)
            if followed.rows < followed.stop:
                found[writer] = manifest(followed.folder, followed.segment), followed.version
            elif isinstance(followed.folder, places.Bucket) or followed.segment + 1 in segments_in(followed.folder):
                found[writer] = manifest(followed.folder, followed.segment + 1), b""
        return found

    def _start_head(self, writer: str) -> Any:
        followed = self._followed[writer]
        if followed.rows == followed.stop:
            followed.go_to(followed.segment + 1)
        return self._segment(writer, followed.segment).start_head()

    def _finish_head(self, writer: str, version: bytes, read: Any) -> bool:
        """Takes up a segment's head. Returns whether the segment is full, so that the next may be there."""
        followed = self._followed[writer]
        head = self._segment(writer, followed.segment).finish_head(read)
        if head is not None and not followed.rows <= head["rows"] <= followed.stop:
            raise ValueError(f"DATA_LOSS: segment {segment_name(followed.segment)} says {head['rows']} rows")
        followed.version, followed.news = version, time.monotonic()
        followed.rows = followed.rows if head is None else head["rows"]
        return followed.rows == followed.stop

    def _segment(self, writer: str, number: int) -> Segment:
        key = (writer, number)
        if key not in self._segments:
            followed = self._followed[writer]
            self._segments[key] = Segment(followed.folder / segment_name(number), followed.schema)
            if len(self._segments) > len(self._followed) + SPARE_SEGMENTS:
                self._segments.popitem(last=False)
        self._segments.move_to_end(key)
        return self._segments[key]

    def prefetch(self, ranges: Mapping[str, tuple[int, int]]) -> None:
        """Starts reading committed rows [start, stop) of several writers at once, a bounded number; `read` then waits less.

        What an earlier call started and nobody read is given up.
        """
        self._prefetched.clear()
        for writer, (start, stop) in ranges.items():
            schema = self._followed[writer].schema
            for append in range(start // schema.rows_per_append, -(-stop // schema.rows_per_append)):
                if len(self._prefetched) == PREFETCHED_APPENDS:
                    return
                self._prefetched[writer, append] = self._start(writer, schema, append)

    def read(self, writer: str, start: int, stop: int) -> Rows:
        """Rows [start, stop) of a writer, all columns.

        Raises:
          ValueError: the rows are not committed, or the writer is not followed (with the problem that was found).
          RowsExpired: retention has removed some of them; its range ends with the gap, which may be behind `stop`.
          LogCorruption: rows are damaged, missing beyond patience, or not where they should be.
        """
        rows = self._empty(stop - start)
        self._fill(rows, writer, np.arange(start, stop), np.arange(stop - start))
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

    def _fill(self, rows: Rows, writer: str, wanted: np.ndarray, targets: np.ndarray) -> None:
        """rows[targets] = the rows `wanted` (int64 row numbers) of the writer."""
        if not len(wanted):
            return
        if wanted.max() >= self._committed(writer):
            self.heads()
        if wanted.min() < 0 or wanted.max() >= self._committed(writer):
            reason = self.problems.get(writer, f"rows 0 to {self._committed(writer) - 1} are committed")
            raise ValueError(f"rows {wanted.min()} to {wanted.max()} of writer {writer} cannot be read: {reason}")
        size = self._followed[writer].schema.rows_per_append
        order = np.argsort(wanted, kind="stable")
        appends, starts = np.unique(wanted[order] // size, return_index=True)
        blocks = np.split(order, starts[1:])
        for block, (append, content) in zip(blocks, self._read_appends(writer, appends.tolist()), strict=True):
            # Rows side by side, as the trainer reads them, are copied at once.
            source, target = _as_slice(wanted[block] - append * size), _as_slice(targets[block])
            for name, column in content.items():
                rows[name][target] = column[source]

    def _committed(self, writer: str) -> int:
        return self._followed[writer].rows if writer in self._followed else 0

    def _read_appends(self, writer: str, appends: Sequence[int]) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
        """Yields (append number, its rows) in order, with bounded read-ahead."""
        schema = self._followed[writer].schema
        for first in range(0, len(appends), _READ_AHEAD_APPENDS):
            block = appends[first : first + _READ_AHEAD_APPENDS]
            started = {append: self._start(writer, schema, append) for append in block}
            for append in block:
                yield append, self._finish(writer, schema, append, started.pop(append))

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
        schema, gone = self._followed[writer].schema, self._gone(writer)
        segment = append // schema.segment_appends
        if segment in gone:
            kept = next(number for number in itertools.count(segment) if number not in gone)
            raise RowsExpired(writer, append * schema.rows_per_append, kept * schema.segment_rows)

    def _finish(self, writer: str, schema: LogSchema, append: int, started: Any) -> dict[str, np.ndarray]:
        start, stop = append * schema.rows_per_append, (append + 1) * schema.rows_per_append
        deadline = time.monotonic() + self._patience_seconds
        pause = 0.01
        while True:
            try:
                if isinstance(started, Exception):
                    raise started
                rows = self._segment(writer, append // schema.segment_appends).finish_read(started)
                break
            except RowsExpired:
                raise
            except STORAGE_ERRORS as error:
                self._refresh_expired()  # it may have gone just now
                self._refuse_expired(writer, append)
                if not _LAGGING.match(str(error)) or time.monotonic() > deadline:
                    raise LogCorruption(writer, start, stop, str(error)) from error
            time.sleep(pause)
            pause = min(1.0, 2 * pause)
            self._segments.pop((writer, append // schema.segment_appends), None)
            started = self._start(writer, schema, append)
        if not np.array_equal(rows["row"], np.arange(start, stop)):
            raise LogCorruption(writer, start, stop, f"the column row says {rows['row'].tolist()[:4]}…")
        return rows


def _as_slice(numbers: np.ndarray) -> slice | np.ndarray:
    """The same rows as `numbers`, int[n], n >= 1, as a slice where they follow one another."""
    first = int(numbers[0])
    follows = np.array_equal(numbers, np.arange(first, first + len(numbers)))
    return slice(first, first + len(numbers)) if follows else numbers
