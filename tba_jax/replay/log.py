"""The replay log: append-only, one folder a writer, readable while it is written.

    replay/writers/<writer>.json          schema and who writes; making this file claims the id
    replay/<writer>/<segment:06d>/        one database a segment, see `segment.py`
    replay/expired.json                   segments that retention has removed, see `segment.py`

A writer id belongs to one process for ever, so rows are numbered without coordination and a row is named by
(writer, row). Row r is in segment r // segment_rows, append (r % segment_rows) // rows_per_append.
"""

import math
import os
import re
import time
import uuid
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tba_jax.replay.segment import LogSchema, Segment, segment_name
from tba_jax.storage import file_systems, layout, places
from tba_jax.storage.places import STORAGE_ERRORS, Place
from tba_jax.trajectory import Rows, RowShape, check_rows

REGISTER = "writers"
# The beginning of a writer's id, if its responses come from a file (the command append).
GIVEN = "given-"
# A name of a searcher, which its writer ids begin with.
NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,89}")
WRITER_NAME = re.compile(rf"(?!{REGISTER}$)[a-z0-9][a-z0-9-]{{0,99}}")
# An object store charges for each request. A writer without news for QUIET_SECONDS (most have ended) is asked every
# QUIET_POLL_SECONDS at first, then ever less often.
QUIET_SECONDS = 60.0
QUIET_POLL_SECONDS = 5.0
LONGEST_POLL_SECONDS = 1800.0
# A folder that changed so recently may change again without another time of change; and now and then one is listed anyway.
_SETTLED_SECONDS = 5.0
_RELIST_SECONDS = 60.0
_LIST_SECONDS = 10.0  # of an object store
BURST_SECONDS = 10.0
# Keys in one reply of an object store.
_PAGE = 1000


def registration(root: Place, writer: str) -> Place:
    """The file that claims a writer id under a replay folder: {"schema", "info", "claim"}. claim: a random id."""
    return root / REGISTER / f"{writer}.json"


class LogWriter:
    """Appends rows to one writer's log."""

    def __init__(
        self,
        root: Place,
        writer: str,
        shape: RowShape,
        *,
        rows_per_append: int,
        segment_appends: int,
        info: Mapping[str, Any],
        claim: bool = True,
    ):
        """Claims the writer id. Raises ValueError: it is malformed or used. OSError: the folder cannot be written.

        Args: root: `RunDir.replay`. rows_per_append: of every append, the storage's chunk. segment_appends: of a segment, the
        unit of retention. info: who writes, stored as it is. claim: False: no reader sees the log until `claim` is called.
        """
        if not WRITER_NAME.fullmatch(writer):
            raise ValueError(f"writer id {writer!r} must match {WRITER_NAME.pattern}: it is a folder name under {root}")
        self.writer = writer
        self._root, self._folder = root, root / writer
        self._shape, self._info = shape, dict(info)
        self._schema = LogSchema(
            rows_per_append=rows_per_append,
            segment_appends=segment_appends,
            columns=shape.columns(),
            reward_parts=shape.reward_parts,
        )
        self._next_row = 0
        self._segment: Segment | None = None
        self._segment_number = -1
        self._held: Path | None = None
        if places.names_in(self._folder):
            raise ValueError(self._used())
        if claim:
            self.claim()

    def _used(self) -> str:
        return f"writer id {self.writer!r} has a log under {self._root} already; a writer id is never reused"

    def claim(self) -> None:
        """Takes the writer id, and shows the log to readers. Raises ValueError where another process has it."""
        places.make_folder(self._root / REGISTER, below=2)
        described = {"schema": self._schema.to_json(), "info": self._info, "claim": uuid.uuid4().hex}
        if not layout.create_json(registration(self._root, self.writer), described):
            raise ValueError(self._used())

    @property
    def next_row(self) -> int:
        """Sequence number of the next row = rows committed so far."""
        return self._next_row

    def append(self, rows: Rows) -> range:
        """Commits rows_per_append rows that continue at `next_row`; returns their numbers once they are durable and visible.

        Raises ValueError: wrong columns, dtypes, shapes, count or row numbers. OSError: the storage refused; the same rows may be
        appended again.
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
            self._segment = Segment(self._hold() / segment_name(number), self._schema, create=True)
            self._segment_number = number
            if isinstance(self._folder, Path):
                for folder in (self._folder, self._folder.parent):
                    places.sync_folder(folder)
            head = self._segment.finish_head(self._segment.start_head())
            if head is not None and head["rows"] >= numbers.stop:
                stored = self._segment.finish_read(self._segment.start_read(position))
                if any(stored[name].tobytes() != np.ascontiguousarray(rows[name]).tobytes() for name in rows):
                    raise OSError("a failed append was committed after all and other rows follow it; append the first rows again")
                return
        self._segment.append(position, rows, {"appends": numbers.stop // size, "rows": numbers.stop})

    def _hold(self) -> Place:
        """The writer's folder. tensorstore would make a workdir anew that was moved away meanwhile, so a local folder is held."""
        if self._held is None and isinstance(self._folder, Path):
            places.make_folder(self._folder, below=2)
            self._held = file_systems.hold(self._folder)
            weakref.finalize(self, file_systems.let_go, self._held)
        return self._held or self._folder


def pause_seconds(quiet: float) -> float:
    """Until a writer is asked again that has had no news for `quiet` seconds: a twelfth of that, 0 after news of late."""
    return 0.0 if quiet < QUIET_SECONDS else min(max(quiet / 12, QUIET_POLL_SECONDS), LONGEST_POLL_SECONDS)


class Allowance:
    """Requests to object stores that look for news: so many a minute, of which a burst may take those of BURST_SECONDS."""

    def __init__(self, per_minute: float):
        self._per_minute, self._left, self._at = per_minute, per_minute * BURST_SECONDS / 60, time.monotonic()

    def left(self) -> int:
        """How many may be sent now."""
        now = time.monotonic()
        saved = self._left + (now - self._at) * self._per_minute / 60
        self._left, self._at = min(saved, self._per_minute * BURST_SECONDS / 60), now
        return max(int(self._left), 0)

    def spend(self, count: int) -> None:
        self._left -= count


class WatchedFolder:
    """A folder whose names are asked for again and again. pages: requests of an object store that a listing takes."""

    def __init__(self, folder: Place, allowance: Allowance):
        self._folder, self._allowance = folder, allowance
        self._stamp: tuple[int, int] | None = None
        self._changed = self._listed = -math.inf
        self.pages = 1

    def names(self, *, always: bool) -> list[str] | None:
        """The names in the folder; None where they are those of the last call, as far as a cheap look tells.

        A local folder is listed when its time of change is another. One of an object store is listed every ten seconds, and as
        much less often as its names take more replies.
        """
        now = time.monotonic()
        if isinstance(self._folder, Path):
            stamp = _time_of_change(self._folder)
            if stamp != self._stamp:
                self._stamp, self._changed = stamp, now
            settled = now - self._changed > _SETTLED_SECONDS and now - self._listed < _RELIST_SECONDS
            if settled and not always:
                return None
            self._listed = now
            return places.names_in(self._folder)
        early = now - self._listed < self.pages * _LIST_SECONDS
        if not always and (early or not self._allowance.left()):
            return None
        names = places.names_in(self._folder)
        self._listed, self.pages = now, 1 + len(names) // _PAGE
        self._allowance.spend(self.pages)
        return names

    def list_again(self) -> None:
        """The next call of `names` lists the folder."""
        self._changed, self._listed = time.monotonic(), -math.inf


def _time_of_change(folder: Path) -> tuple[int, int] | None:
    """When a local folder changed, and its inode; None where it cannot be opened. Opening makes NFS ask its server."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return None
    try:
        found = os.fstat(descriptor)
    finally:
        os.close(descriptor)
    return found.st_mtime_ns, found.st_ino
