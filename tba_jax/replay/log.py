"""The replay log: one immutable object an append, put once, readable while the log is written.

    replay/<minute>/<writer>.<first>-<stop>    rows [first, stop) of a writer; minute: YYYYmmddTHHMM, UTC, of its clock
    replay/writers/<writer>.json               who writes; making this file claims the id

An object describes itself: 4 bytes, the length n of the header (little-endian); n bytes, the header (JSON); the columns one after
the other in the header's order, in C order and little-endian, each of the length in the header's "bytes", compressed (zlib) where
that is not its own length; 4 bytes, the CRC-32 of all before.

A writer id belongs to one process for ever, so rows are numbered without coordination, a row is named by (writer, row), and an
append needs no lock. A writer puts an append once the one before is there: below its newest append every row is committed.
"""

import contextlib
import dataclasses
import functools
import json
import math
import re
import time
import uuid
import weakref
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tba_jax.storage import file_systems, layout, places
from tba_jax.storage.places import STORAGE_ERRORS, Place
from tba_jax.trajectory import Rows, RowShape, check_rows

REGISTER = "writers"
# The beginning of a writer's id, if its responses come from a file (the command append).
GIVEN = "given-"
# A name of a searcher, which its writer ids begin with.
NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,89}")
WRITER_NAME = re.compile(rf"(?!{REGISTER}$)[a-z0-9][a-z0-9-]{{0,99}}")
LAYOUT = "append-2"
_WORTH = 2 / 3  # of its own length, above which a column is not compressed
_REMOVED_AT_ONCE = 64
_MINUTE = re.compile(r"[1-9]\d{3}(0[1-9]|1[0-2])(0[1-9]|[12]\d|3[01])T([01]\d|2[0-3])[0-5]\d")
_APPEND = re.compile(r"([a-z0-9][a-z0-9-]{0,99})\.(\d{1,18})-(\d{1,18})")


@dataclasses.dataclass(frozen=True, slots=True)
class Append:
    """The name of the object with rows [first, stop) of a writer. minute: when it was put, by the writer's clock."""

    writer: str
    first: int
    stop: int
    minute: str

    @property
    def key(self) -> str:
        """Its path below the replay folder."""
        return f"{self.minute}/{self.writer}.{self.first}-{self.stop}"

    @staticmethod
    def of(minute: str, name: str) -> "Append | None":
        """The append of this name in a minute's folder; None where it is another file."""
        if (match := _APPEND.fullmatch(name)) is None or int(match[2]) >= int(match[3]):
            return None
        return Append(match[1], int(match[2]), int(match[3]), minute)


def minute_of(seconds: float) -> str:
    """The name of a minute. Args: seconds: time.time()."""
    return time.strftime("%Y%m%dT%H%M", time.gmtime(seconds))


def is_minute(name: str) -> bool:
    return bool(_MINUTE.fullmatch(name))


def registration(root: Place, writer: str) -> Place:
    """The file that claims a writer id under a replay folder: {"info", "claim"}. claim: a random id."""
    return root / REGISTER / f"{writer}.json"


def encode(writer: str, rows: Rows, shape: RowShape) -> bytes:
    """The object of an append. Raises ValueError where the rows are not of the shape."""
    check_rows(rows, shape)
    columns = {
        name: np.ascontiguousarray(rows[name], np.dtype(dtype).newbyteorder("<")) for name, (dtype, _) in shape.columns().items()
    }
    parts = [_packed(column) for column in columns.values()]
    header = {
        "layout": LAYOUT,
        "writer": writer,
        "first": int(rows["row"][0]),
        "rows": len(rows["row"]),
        "reward_parts": list(shape.reward_parts),
        "columns": [[name, column.dtype.str, list(column.shape[1:])] for name, column in columns.items()],
        "bytes": [len(part) for part in parts],
    }
    described = json.dumps(header, separators=(",", ":")).encode()
    content = b"".join((len(described).to_bytes(4, "little"), described, *parts))
    return content + zlib.crc32(content).to_bytes(4, "little")


@functools.lru_cache
def _schema(told: str, parts: tuple[str, ...], shape: RowShape) -> tuple[dict[str, tuple[np.dtype, tuple[int, ...]]], str]:
    """The columns of a header, which is the same in all appends of a run, and how they differ from `shape`, see `difference`.
    Args: told: JSON. Raises ValueError, TypeError."""
    columns = {name: (np.dtype(dtype), tuple(row)) for name, dtype, row in json.loads(told)}
    return columns, difference(columns, parts, shape)


def _packed(column: np.ndarray) -> bytes:
    """The bytes of a column, compressed where that saves a third: whoever reads the logs of all writers decompresses."""
    raw = column.tobytes()
    packed = zlib.compress(raw, 1)
    return packed if len(packed) < _WORTH * len(raw) else raw


def decode(content: bytes, append: Append, shape: RowShape) -> dict[str, np.ndarray]:
    """The rows of an append: the columns of `shape`, read-only, [stop − first, *row]. Columns that it does not name are left out.

    Raises ValueError: half a sentence: the object is damaged, of another append or layout, or lacks columns of the shape.
    """
    if len(content) < 8 or zlib.crc32(content[:-4]) != int.from_bytes(content[-4:], "little"):
        raise ValueError(f"its checksum does not fit its {len(content)} bytes")
    size = int.from_bytes(content[:4], "little")
    try:
        header = json.loads(content[4 : 4 + size])
        if header["layout"] != LAYOUT:
            raise ValueError(f"it is stored in layout {header['layout']!r}, and this version reads {LAYOUT!r}")
        if (told := (header["writer"], header["first"], header["rows"])) != (
            append.writer,
            append.first,
            append.stop - append.first,
        ):
            raise ValueError(f"it says that it holds {told[2]} rows of writer {told[0]} from {told[1]} on")
        sizes = [int(each) for each in header["bytes"]]
        columns, different = _schema(json.dumps(header["columns"]), tuple(header["reward_parts"]), shape)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"its header lacks {error}") from error
    if different:
        raise ValueError(f"its rows have another schema: {different}")
    wanted, rows, at = shape.columns(), {}, 4 + size
    for (name, (dtype, row)), length in zip(columns.items(), sizes, strict=True):
        if name in wanted:
            part, whole = content[at : at + length], header["rows"] * math.prod(row) * dtype.itemsize
            try:
                column = np.frombuffer(part if length == whole else zlib.decompress(part), dtype)
            except zlib.error as error:
                raise ValueError(f"its column {name} cannot be decompressed: {error}") from error
            column = column.reshape(header["rows"], *row)
            rows[name] = column if dtype.isnative else column.astype(dtype.newbyteorder("="))
        at += length
    if not np.array_equal(rows["row"], np.arange(append.first, append.stop)):
        raise ValueError(f"its column row says {rows['row'].tolist()[:4]}…")
    return rows


def difference(columns: Mapping[str, tuple[np.dtype, tuple[int, ...]]], parts: tuple[str, ...], shape: RowShape) -> str:
    """Which columns rows of `shape` need and an append has not or has otherwise; empty where it can be read."""
    differing = []
    for name, (dtype, row) in shape.columns().items():
        if name not in columns:
            differing.append(f"{name} is absent, expected {dtype}{list(row)}")
        elif columns[name] != (np.dtype(dtype).newbyteorder("<"), row):
            differing.append(f"{name} is {columns[name][0].name}{list(columns[name][1])}, expected {dtype}{list(row)}")
    if not differing and parts != shape.reward_parts:
        differing = [f"reward_parts are {list(parts)}, expected {list(shape.reward_parts)}"]
    return "; ".join(differing)


class LogWriter:
    """Appends rows to one writer's log."""

    def __init__(self, root: Place, writer: str, shape: RowShape, *, info: Mapping[str, Any], claim: bool = True):
        """Claims the writer id. Raises ValueError: it is malformed or used. OSError: the folder cannot be written.

        Args: root: `RunDir.replay`. info: who writes, stored as it is. claim: False: `claim` is called later; readers leave out
          rows of `given-` writers until then.
        """
        if not WRITER_NAME.fullmatch(writer):
            raise ValueError(f"writer id {writer!r} must match {WRITER_NAME.pattern}: it names files under {root}")
        self.writer = writer
        self._root, self._shape, self._info = root, shape, dict(info)
        self._next_row = 0
        self._held: Path | None = None
        # The append that may have landed although its put failed, and its content.
        self._unsure: tuple[Append, bytes] | None = None
        if claim:
            self.claim()

    def claim(self) -> None:
        """Takes the writer id. Raises ValueError where another process has it."""
        places.make_folder(self._root / REGISTER, below=2)
        if not layout.create_json(registration(self._root, self.writer), {"info": self._info, "claim": uuid.uuid4().hex}):
            raise ValueError(f"writer id {self.writer!r} has a log under {self._root} already; a writer id is never reused")

    @property
    def next_row(self) -> int:
        """Sequence number of the next row = rows committed so far."""
        return self._next_row

    def append(self, rows: Rows) -> range:
        """Commits rows that continue at `next_row`; returns their numbers once they are durable and visible.

        Raises ValueError: wrong columns, dtypes, shapes or row numbers. OSError: the storage refused; the same rows may be
        appended again.
        """
        numbers = range(self._next_row, self._next_row + check_rows(rows, self._shape))
        if not numbers or not np.array_equal(rows["row"], np.arange(numbers.start, numbers.stop)):
            there = f"{rows['row'][0]} to {rows['row'][-1]}" if numbers else "empty"
            raise ValueError(f"column row is {there}, writer {self.writer} continues at {numbers.start} to {numbers.stop - 1}")
        content = encode(self.writer, rows, self._shape)
        append = Append(self.writer, numbers.start, numbers.stop, minute_of(time.time()))
        if self._unsure is not None:
            append, before = self._unsure  # under the same name, so that the rows are there once
            if before != content:
                told = f"rows from {numbers.start} on of writer {self.writer}"
                raise OSError(f"{told} may have been committed after all: append the same rows again")
        self._unsure = append, content
        try:
            self._put(append, content)
        except STORAGE_ERRORS as error:
            told = f"append of rows {numbers.start} to {numbers.stop - 1} to {self._root} failed: {error}. "
            told += "The rows are not acknowledged; the same rows may be appended again"
            raise places.failure(self._root, told) from error
        self._next_row, self._unsure = numbers.stop, None
        return numbers

    def _put(self, append: Append, content: bytes) -> None:
        root = self._hold()
        if isinstance(root, Path) and not (root / append.minute).exists():
            places.make_folder(root / append.minute)
            places.sync_folder(root)
        store = places.open_store(root)
        if not places.put(store, append.key, content) and store.read(append.key).result().value != content:
            raise ValueError(f"ALREADY_EXISTS: {root / append.key} has other rows: another process writes as {self.writer}")

    def _hold(self) -> Place:
        """The replay folder. tensorstore would make a workdir anew that was moved away meanwhile, so a local folder is held."""
        if self._held is None and isinstance(self._root, Path):
            places.make_folder(self._root)
            self._held = file_systems.hold(self._root)
            weakref.finalize(self, file_systems.let_go, self._held)
        return self._held or self._root


def remove(root: Place, appends: Iterable[Append]) -> None:
    """Removes appends for good, and the folders of minutes that are empty then. Only the run's trainer may call it.
    Raises OSError: the storage refused."""
    gone = list(appends)
    store = places.open_store(root)
    try:
        for begin in range(0, len(gone), _REMOVED_AT_ONCE):
            for removal in [store.write(append.key, None) for append in gone[begin : begin + _REMOVED_AT_ONCE]]:
                removal.result()
    except STORAGE_ERRORS as error:
        raise OSError(f"appends in {root} could not be removed: {error}") from error
    if isinstance(root, Path):
        for minute in {append.minute for append in gone}:
            with contextlib.suppress(OSError):  # it holds other appends, or a writer puts one now and makes it again
                (root / minute).rmdir()
