"""The replay log: append-only, one folder a writer, readable while it is written.

    replay/<writer>/writer.json           schema and who writes, committed together with the folder
    replay/<writer>/<segment:06d>/        one database a segment, see `segment.py`

A writer id belongs to one process for ever, so rows are numbered without coordination and a row is named by
(writer, row). Row r is in segment r // segment_rows, append (r % segment_rows) // rows_per_append.
"""

import collections
import dataclasses
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tba_jax import run_dir
from tba_jax.replay.segment import STORAGE_ERRORS, LogSchema, Segment
from tba_jax.trajectory import Rows, RowShape, check_rows

_WRITER_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,99}")
_SEGMENT_NAME = re.compile(r"\d{6}")
_DESCRIPTION = "writer.json"
# Below a committed head these mean storage that lags, never the absence of rows; anything else is damage. The last two
# are a data file that is not there yet: the database reads it as empty, and the checksum or the metadata parser refuses.
_LAGGING = re.compile(
    r"(NOT_FOUND|UNAVAILABLE|DEADLINE_EXCEEDED|ABORTED):|.*(Input size of 0 is less than digest size|Invalid JSON)", re.DOTALL
)
_READ_AHEAD_APPENDS = 16
# Open segments beyond one a writer.
_SPARE_SEGMENTS = 64
# Appends whose reading may have started before anyone asked for their rows.
_PREFETCHED_APPENDS = 64


class LogCorruption(ValueError):
    """Committed rows [start, stop) of a writer cannot be read back whole."""

    def __init__(self, writer: str, start: int, stop: int, reason: str):
        super().__init__(f"replay log of writer {writer}: rows {start} to {stop - 1} cannot be read: {reason}")
        self.writer, self.start, self.stop, self.reason = writer, start, stop, reason


class LogWriter:
    """Appends rows to one writer's log."""

    def __init__(
        self,
        root: Path,
        writer: str,
        shape: RowShape,
        *,
        rows_per_append: int,
        segment_appends: int,
        info: Mapping[str, Any],
    ):
        """Claims the writer id.

        Args:
          root: the replay folder, `RunDir.replay`.
          writer: lower-case letters, digits and dashes; never used before under `root`.
          rows_per_append: rows in every append, the chunk of the storage.
          segment_appends: appends in a segment, the unit of retention.
          info: who writes (host, pid, start time); stored as it is.

        Raises:
          ValueError: a malformed or used writer id, or a count below 1.
          OSError: the folder cannot be written.
        """
        if not _WRITER_NAME.fullmatch(writer):
            raise ValueError(f"writer id {writer!r} must match {_WRITER_NAME.pattern}: it is a folder name under {root}")
        if rows_per_append < 1 or segment_appends < 1:
            raise ValueError(
                f"rows_per_append={rows_per_append} and segment_appends={segment_appends} must be at least 1 (replay settings)"
            )
        self.writer = writer
        self._folder = root / writer
        self._shape = shape
        self._schema = LogSchema(
            rows_per_append=rows_per_append,
            segment_appends=segment_appends,
            columns=shape.columns(),
            reward_parts=shape.reward_parts,
        )
        self._next_row = 0
        self._segment: Segment | None = None
        self._segment_number = -1
        self._claim(info)

    def _claim(self, info: Mapping[str, Any]) -> None:
        self._folder.parent.mkdir(parents=True, exist_ok=True)
        used = f"writer id {self.writer!r} has a log under {self._folder.parent} already; a writer id is never reused"
        if os.path.lexists(self._folder):
            raise ValueError(used)
        # The folder appears with its description in it: renaming onto a folder with content fails, so one claim wins.
        hidden = self._folder.parent / f".{self.writer}.{uuid.uuid4().hex[:8]}"
        hidden.mkdir()
        try:
            run_dir.write_json(hidden / _DESCRIPTION, {"schema": self._schema.to_json(), "info": dict(info)})
            os.rename(hidden, self._folder)
        except OSError as error:
            shutil.rmtree(hidden, ignore_errors=True)
            if os.path.lexists(self._folder):
                raise ValueError(used) from error
            raise
        run_dir.sync_folder(self._folder.parent)

    @property
    def next_row(self) -> int:
        """Sequence number of the next row = rows committed so far."""
        return self._next_row

    def append(self, rows: Rows) -> range:
        """Commits one append; returns its row numbers once they are durable and visible.

        After a failure the writer stands where it stood, and the same rows may be appended again.

        Args:
          rows: exactly rows_per_append rows whose `row` column continues at `next_row`.

        Raises:
          ValueError: wrong columns, dtypes, shapes, count or row numbers; nothing was written.
          OSError: the storage refused (the message has the cause, such as a full disk).
        """
        size = self._schema.rows_per_append
        count = check_rows(rows, self._shape)
        if count != size:
            raise ValueError(f"an append has {count} rows, the log of writer {self.writer} takes {size} (rows_per_append)")
        numbers = range(self._next_row, self._next_row + size)
        if not np.array_equal(rows["row"], np.arange(numbers.start, numbers.stop)):
            raise ValueError(
                f"column row is {rows['row'][0]} to {rows['row'][-1]}, writer {self.writer} continues at "
                f"{numbers.start} to {numbers.stop - 1}"
            )
        try:
            self._append(numbers, rows)
        except STORAGE_ERRORS as error:
            # Whether the commit landed is unknown: the next attempt opens the segment afresh and looks.
            self._segment = None
            raise OSError(
                f"append of rows {numbers.start} to {numbers.stop - 1} to {self._folder} failed: {error}. "
                "The rows are not acknowledged; the same rows may be appended again"
            ) from error
        self._next_row = numbers.stop
        return numbers

    def _append(self, numbers: range, rows: Rows) -> None:
        size = self._schema.rows_per_append
        number, offset = divmod(numbers.start, self._schema.segment_rows)
        position = offset // size
        if self._segment is None or number != self._segment_number:
            self._segment = Segment(self._folder / f"{number:06d}", self._schema, create=True)
            self._segment_number = number
            run_dir.sync_folder(self._folder)
            head = self._segment.head()
            if head is not None and head["rows"] >= numbers.stop:
                stored = self._segment.finish_read(self._segment.start_read(position))
                if batch_differs(stored, rows):
                    raise OSError("a failed append was committed after all and other rows follow it; append the first rows again")
                return
        self._segment.append(position, rows, {"appends": numbers.stop // size, "rows": numbers.stop})


def batch_differs(stored: Rows, rows: Rows) -> bool:
    """Whether any column differs, bit by bit (a NaN equals itself)."""
    return any(stored[name].tobytes() != np.ascontiguousarray(rows[name]).tobytes() for name in rows)


@dataclasses.dataclass
class _Followed:
    """A writer whose log is followed: its schema and how far it has been seen."""

    folder: Path
    schema: LogSchema
    segment: int
    rows: int
    manifest: bytes = b""


class LogReader:
    """Follows all logs under a replay folder, and under those of other runs that are mounted. Not thread-safe.

    Attributes:
      shape: the schema rows must have.
      problems: entry under the folder -> why it is not followed, or why its head cannot be read. One sentence each;
        an entry that later becomes readable is removed.
    """

    def __init__(self, root: Path, shape: RowShape, *, mounts: Sequence[Path] = (), patience_seconds: float = 30.0):
        """
        Args:
          root: `RunDir.replay`. mounts: replay folders of other runs, which are only read.
          patience_seconds: how long a committed chunk may stay "not found" on slow storage.
        """
        self.shape = shape
        self.problems: dict[str, str] = {}
        self._foreign: set[Path] = set()
        self._root, self._mounts = root, tuple(mounts)
        self._patience_seconds = patience_seconds
        self._followed: dict[str, _Followed] = {}
        self._segments: collections.OrderedDict[tuple[str, int], Segment] = collections.OrderedDict()
        # (writer, append number) -> its read, started by `prefetch`.
        self._prefetched: dict[tuple[str, int], dict[str, Any] | Exception] = {}

    def heads(self) -> dict[str, int]:
        """Committed rows of every followed writer; the cost grows with writers and news, not with history."""
        for root in (self._root, *self._mounts):
            try:
                names = sorted(os.listdir(root))
            except FileNotFoundError:
                continue
            for name in names:
                if name not in self._followed and root / name not in self._foreign and not name.startswith("."):
                    self._follow(root / name)
        for name, followed in self._followed.items():
            try:
                self._advance(name, followed)
            except STORAGE_ERRORS as error:
                self.problems[name] = f"the head of writer {name} cannot be read, it stays at row {followed.rows}: {error}"
            else:
                self.problems.pop(name, None)
        return {name: followed.rows for name, followed in self._followed.items()}

    def folder(self, writer: str) -> Path:
        """Where the log of a followed writer lies."""
        return self._followed[writer].folder

    def is_own(self, writer: str) -> bool:
        """Whether a followed writer's rows are of this run; policy_step counts the steps of the run that a row is of."""
        return self._followed[writer].folder.parent == self._root

    def _follow(self, folder: Path) -> None:
        name = folder.name
        try:
            if not _WRITER_NAME.fullmatch(name) or not folder.is_dir():
                raise ValueError("it is not the folder of a writer")
            schema = LogSchema.from_json(run_dir.read_json(folder / _DESCRIPTION).get("schema"))
            if difference := schema.difference(self.shape):
                raise ValueError(f"its rows have another schema: {difference}")
        except (ValueError, OSError, AttributeError) as error:
            self.problems[name] = f"{folder} is ignored: {error}"
            if not isinstance(error, OSError):  # storage may recover, a foreign folder stays one
                self._foreign.add(folder)
            return
        # A writer opens a segment once the one before is full, so the last segment tells all.
        last = max(_segments_in(folder), default=0)
        self._followed[name] = _Followed(folder, schema, segment=last, rows=last * schema.segment_rows)

    def _advance(self, writer: str, followed: _Followed) -> None:
        schema = followed.schema
        while True:
            stop = (followed.segment + 1) * schema.segment_rows
            if followed.rows == stop:
                if followed.segment + 1 not in _segments_in(followed.folder):
                    return
                followed.segment, followed.manifest, stop = followed.segment + 1, b"", stop + schema.segment_rows
            # The database rewrites this small file in every commit: the same bytes mean no news, without opening it.
            try:
                manifest = (followed.folder / f"{followed.segment:06d}" / "manifest.ocdbt").read_bytes()
            except FileNotFoundError:
                return
            if manifest == followed.manifest:
                return
            head = self._segment(writer, followed.segment).head()
            if head is not None and not followed.rows <= head["rows"] <= stop:
                raise ValueError(f"DATA_LOSS: segment {followed.segment:06d} says {head['rows']} rows")
            followed.manifest = manifest
            followed.rows = followed.rows if head is None else head["rows"]
            if followed.rows < stop:
                return

    def _segment(self, writer: str, number: int) -> Segment:
        key = (writer, number)
        if key not in self._segments:
            followed = self._followed[writer]
            self._segments[key] = Segment(followed.folder / f"{number:06d}", followed.schema)
            if len(self._segments) > len(self._followed) + _SPARE_SEGMENTS:
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
                if len(self._prefetched) == _PREFETCHED_APPENDS:
                    return
                self._prefetched[writer, append] = self._start(writer, schema, append)

    def read(self, writer: str, start: int, stop: int) -> Rows:
        """Rows [start, stop) of a writer, all columns.

        Raises:
          ValueError: the rows are not committed, or the writer is not followed (with the problem that was found).
          LogCorruption: rows are damaged, missing beyond patience, or not where they should be.
        """
        rows = self._empty(stop - start)
        self._fill(rows, writer, np.arange(start, stop), np.arange(stop - start))
        return rows

    def read_ids(self, ids: Sequence[tuple[str, int]]) -> Rows:
        """The rows named by (writer, row), in the order given. Raises as `read`."""
        rows = self._empty(len(ids))
        places: dict[str, list[int]] = {}
        for place, (writer, _) in enumerate(ids):
            places.setdefault(writer, []).append(place)
        for writer, of_writer in places.items():
            self._fill(rows, writer, np.array([ids[place][1] for place in of_writer], np.int64), np.array(of_writer))
        return rows

    def _empty(self, count: int) -> dict[str, np.ndarray]:
        return {name: np.zeros((count, *shape), dtype) for name, (dtype, shape) in self.shape.columns().items()}

    def _fill(self, rows: Rows, writer: str, wanted: np.ndarray, places: np.ndarray) -> None:
        """rows[places] = the rows `wanted` (int64 row numbers) of the writer."""
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
            for name, column in content.items():
                rows[name][places[block]] = column[wanted[block] - append * size]

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

    def _start(self, writer: str, schema: LogSchema, append: int) -> dict[str, Any] | Exception:
        if (writer, append) in self._prefetched:
            return self._prefetched.pop((writer, append))
        try:
            return self._segment(writer, append // schema.segment_appends).start_read(append % schema.segment_appends)
        except STORAGE_ERRORS as error:
            return error

    def _finish(self, writer: str, schema: LogSchema, append: int, started: dict[str, Any] | Exception) -> dict[str, np.ndarray]:
        start, stop = append * schema.rows_per_append, (append + 1) * schema.rows_per_append
        deadline = time.monotonic() + self._patience_seconds
        pause = 0.01
        while True:
            try:
                if isinstance(started, Exception):
                    raise started
                rows = self._segment(writer, append // schema.segment_appends).finish_read(started)
                break
            except STORAGE_ERRORS as error:
                if not _LAGGING.match(str(error)) or time.monotonic() > deadline:
                    raise LogCorruption(writer, start, stop, str(error)) from error
            time.sleep(pause)
            pause = min(1.0, 2 * pause)
            self._segments.pop((writer, append // schema.segment_appends), None)
            started = self._start(writer, schema, append)
        if not np.array_equal(rows["row"], np.arange(start, stop)):
            raise LogCorruption(writer, start, stop, f"the column row says {rows['row'].tolist()[:4]}…")
        return rows


def _segments_in(folder: Path) -> set[int]:
    """Numbers of the segments in a writer's folder. Lists the folder: never trusts a negative lookup of one name."""
    return {int(name) for name in os.listdir(folder) if _SEGMENT_NAME.fullmatch(name)}


# Why a row is not trained on; `validate_rows` returns indices into this tuple, 0 = valid.
REJECTIONS = ("valid", "prompt_length", "response_length", "prompt_tokens", "response_tokens", "reward", "logprobs")


def validate_rows(rows: Rows, *, vocab_size: int) -> np.ndarray:
    """Checks the values of rows that a searcher wrote.

    Args:
      rows: of a valid schema, see `check_rows`.
      vocab_size: V; every token, padding included, must be in [0, V).

    Returns:
      int8[B], the first of REJECTIONS that holds; 0 where the row is valid.
    """
    finite = {name: np.isfinite(rows[name]) for name in ("ref_logprobs", "policy_logprobs", "behavior_logprobs")}
    P, R = rows["prompt_tokens"].shape[1], rows["response_tokens"].shape[1]
    failed = np.stack(
        [
            (rows["prompt_length"] < 0) | (rows["prompt_length"] > P),
            (rows["response_length"] < 0) | (rows["response_length"] > R),
            ((rows["prompt_tokens"] < 0) | (rows["prompt_tokens"] >= vocab_size)).any(1),
            ((rows["response_tokens"] < 0) | (rows["response_tokens"] >= vocab_size)).any(1),
            ~np.isfinite(rows["reward"]) | ~np.isfinite(rows["reward_parts"]).all(1),
            ~np.logical_and.reduce([column.all(1) for column in finite.values()]),
        ],
        axis=1,
    )
    return np.where(failed.any(1), failed.argmax(1) + 1, 0).astype(np.int8)
