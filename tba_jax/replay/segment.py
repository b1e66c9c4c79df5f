"""One segment of a writer's log: an OCDBT database with one zarr3 array of packed appends and a head.

Every append is one chunk of the array `appends` uint8[segment_appends, append_bytes] plus the key `head`, committed in one atomic
transaction. The bytes of an append are its columns one after the other, in the schema's order, in C order and little-endian.

Segments that retention removes are named in a file first and then deleted, so that a reader can tell them from damage.
"""

import dataclasses
import functools
import json
import logging
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

from tba_jax.storage import layout, places
from tba_jax.storage.places import Place
from tba_jax.trajectory import Rows, RowShape

log = logging.getLogger(__name__)

EXPIRED = "expired.json"
LAYOUT = "packed-columns-1"
_ARRAY = "appends/"
_HEAD = "head"
# The database rewrites this small file in every commit: if it is as it was, there is no news.
_MANIFEST = "manifest.ocdbt"
# An append rewrites the B-tree nodes that it touches: small nodes keep that below the size of the rows.
_MAX_NODE_BYTES = 16384


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogSchema:
    """What a registration says about the rows of a log.

    columns: column name -> (dtype, shape of one row). rows_per_append and segment_appends fix where a row is stored.
    """

    rows_per_append: int
    segment_appends: int
    columns: Mapping[str, tuple[str, tuple[int, ...]]]
    reward_parts: tuple[str, ...]

    @property
    def segment_rows(self) -> int:
        return self.rows_per_append * self.segment_appends

    @functools.cached_property
    def append_bytes(self) -> int:
        """Bytes of one append, before compression."""
        return self.rows_per_append * sum(np.dtype(dtype).itemsize * math.prod(shape) for dtype, shape in self.columns.values())

    def to_json(self) -> dict[str, Any]:
        return {
            "layout": LAYOUT,
            "rows_per_append": self.rows_per_append,
            "segment_appends": self.segment_appends,
            # A list, because the order of the columns is that of their bytes.
            "columns": [[name, dtype, list(shape)] for name, (dtype, shape) in self.columns.items()],
            "reward_parts": list(self.reward_parts),
        }

    @staticmethod
    def from_json(value: Any) -> "LogSchema":
        """Raises ValueError naming what is missing or malformed."""
        if isinstance(value, dict) and value.get("layout", LAYOUT) != LAYOUT:
            raise ValueError(f"its rows are stored in layout {value['layout']!r}, this version reads {LAYOUT!r}")
        try:
            if "layout" not in value:
                raise KeyError("layout")
            schema = LogSchema(
                rows_per_append=int(value["rows_per_append"]),
                segment_appends=int(value["segment_appends"]),
                columns={name: (str(np.dtype(dtype)), tuple(map(int, shape))) for name, dtype, shape in value["columns"]},
                reward_parts=tuple(value["reward_parts"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"it lacks the schema of a replay log ({type(error).__name__}: {error})") from error
        if schema.rows_per_append < 1 or schema.segment_appends < 1:
            raise ValueError(
                f"rows_per_append={schema.rows_per_append} and segment_appends={schema.segment_appends} must be at least 1"
            )
        return schema

    def pack(self, rows: Rows) -> np.ndarray:
        """uint8[append_bytes]: the bytes of one append."""
        parts = [
            np.ascontiguousarray(rows[name], _stored(dtype)).reshape(-1).view(np.uint8)
            for name, (dtype, _) in self.columns.items()
        ]
        return np.concatenate(parts)

    def unpack(self, content: np.ndarray) -> dict[str, np.ndarray]:
        """Columns of an append, [rows_per_append, *row_shape], as views of its bytes."""
        rows, begin = {}, 0
        for name, (dtype, shape) in self.columns.items():
            end = begin + self.rows_per_append * math.prod(shape) * np.dtype(dtype).itemsize
            rows[name] = content[begin:end].view(_stored(dtype)).reshape(self.rows_per_append, *shape)
            begin = end
        return rows

    def difference(self, shape: RowShape) -> str:
        """A sentence naming the columns that differ from `shape`; empty where the schemas agree."""
        expected = shape.columns()
        names = sorted(set(expected) | set(self.columns))
        differing = [
            f"{name} is {self.columns.get(name, 'absent')}, expected {expected.get(name, 'none')}"
            for name in names
            if self.columns.get(name) != expected.get(name)
        ]
        if not differing and self.reward_parts != shape.reward_parts:
            differing = [f"reward_parts are {list(self.reward_parts)}, expected {list(shape.reward_parts)}"]
        return "; ".join(differing)


def _stored(dtype: str) -> np.dtype:
    return np.dtype(dtype).newbyteorder("<")


def _array_spec(schema: LogSchema) -> dict[str, Any]:
    return places.ARRAY | {
        "metadata": {
            "shape": [schema.segment_appends, schema.append_bytes],
            "data_type": "uint8",
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [1, schema.append_bytes]}},
            "codecs": [
                {"name": "bytes"},
                {"name": "zstd", "configuration": {"level": 1}},
                {"name": "crc32c"},
            ],
        },
    }


class Segment:
    """An open segment. Raises places.STORAGE_ERRORS in the words of tensorstore."""

    def __init__(self, folder: Place, schema: LogSchema, *, create: bool = False):
        """Args: create: commits the empty array first; that of an earlier, interrupted creation is reused."""
        self.folder = folder
        self._schema = schema
        self._context = places.context(folder)
        database = {
            "driver": "ocdbt",
            "base": places.kvstore(folder),
            "config": {"max_decoded_node_bytes": _MAX_NODE_BYTES},
        }
        if not create:
            del database["config"]
        self._database = ts.KvStore.open(database, context=self._context).result()
        if create:
            transaction = ts.Transaction(atomic=True)
            self._open_array(create=True, transaction=transaction)
            transaction.commit_sync()

    def _open_array(self, **options: Any) -> Any:
        spec = _array_spec(self._schema)
        return ts.open(spec, kvstore=self._database / _ARRAY, open=True, context=self._context, **options).result()

    @functools.cached_property
    def _array(self) -> Any:
        """The array, opened at first use."""
        return self._open_array()

    def append(self, position: int, rows: Rows, head: Mapping[str, int]) -> None:
        """Commits append number `position` of this segment and the head, durably and atomically."""
        transaction = ts.Transaction(atomic=True)
        try:
            written = self._array.with_transaction(transaction)[position].write(self._schema.pack(rows))
            self._database.with_transaction(transaction)[_HEAD] = json.dumps(head).encode()
            transaction.commit_sync()
            written.result()
        except BaseException:
            transaction.abort()
            raise

    def start_head(self) -> Any:
        """Starts reading the head; `finish_head` waits for it."""
        return self._database.read(_HEAD)

    def finish_head(self, read: Any) -> dict[str, int] | None:
        """The committed head, None before the first append. Raises ValueError if it is not a head."""
        content = read.result()
        if content.state != "value":
            return None
        head = json.loads(content.value)
        if not isinstance(head, dict) or not isinstance(head.get("rows"), int):
            raise ValueError(f"DATA_LOSS: {self.folder} has the head {head!r}")
        return head

    def start_read(self, position: int) -> Any:
        """Starts reading append number `position`; `finish_read` waits for it."""
        return self._array[position].read()

    def finish_read(self, read: Any) -> dict[str, np.ndarray]:
        """Rows of the append, every column [rows_per_append, *row_shape]: views of one buffer."""
        return self._schema.unpack(read.result())


def segment_name(number: int) -> str:
    return f"{number:06d}"


def manifest(log: Place, number: int) -> Place:
    """The file that every commit to a segment of this log rewrites; a segment exists once it is there."""
    return log / segment_name(number) / _MANIFEST


_SEGMENT_NAME = re.compile(r"\d{6}")


def segments_in(folder: Path) -> set[int]:
    """Numbers of the segments in a writer's local folder. Lists the folder: never trusts a negative lookup of one name."""
    return {int(name) for name in places.names_in(folder) if _SEGMENT_NAME.fullmatch(name)}


def last_segment(folder: Place, first: int) -> int:
    """The last segment of a log, or `first` if there is none. All segments from `first` on are there.

    An object store is asked by a search that doubles and then halves its step.
    """
    if isinstance(folder, Path):
        return max(segments_in(folder), default=first)
    last, step = first, 1
    while places.exists(manifest(folder, last + step)):
        last, step = last + step, 2 * step
    while step > 1:
        step //= 2
        last += step if places.exists(manifest(folder, last + step)) else 0
    return last


class RowsExpired(ValueError):
    """Rows [start, stop) of a writer are in a segment that retention has removed."""

    def __init__(self, writer: str, start: int, stop: int):
        super().__init__(f"replay log of writer {writer}: rows {start} to {stop - 1} were removed by retention")
        self.writer, self.start, self.stop = writer, start, stop


def expired_segments(root: Place) -> dict[str, frozenset[int]]:
    """Writer -> segments that were removed, or are about to be. root: a replay folder."""
    return {writer: frozenset(numbers) for writer, numbers in _read_expired(root)["expired"].items()}


def _read_expired(root: Place) -> dict[str, dict[str, list[int]]]:
    try:
        return layout.read_json(root / EXPIRED)
    except FileNotFoundError:
        return {"expired": {}, "removing": {}}
    except ValueError as error:
        raise ValueError(f"{error}; the run's trainer writes it again when it is started") from error


def mend_expired(root: Place) -> None:
    """Writes the file of names again where it is damaged: segments below a writer's last one that are not there were removed.

    One that was only announced counts as kept then, and is removed by a later call. Only the run's trainer may call it.
    """
    try:
        _read_expired(root)
        return
    except ValueError as error:
        log.warning("%s: it does so now", error)
    there = {
        writer: [int(name) for name in places.names_in(root / writer) if name.isdecimal()] for writer in places.names_in(root)
    }
    expired = {writer: sorted({*range(max(numbers))} - {*numbers}) for writer, numbers in there.items() if numbers}
    layout.write_json(root / EXPIRED, {"expired": _merged(expired, {}), "removing": {}})


def remove_segments(root: Place, segments: Mapping[str, Sequence[int]]) -> None:
    """Removes segments, whole and for good. Only the run's trainer may call it.

    A later call with any segments completes a removal that was interrupted, or that a folder refused.

    Args: segments: writer -> numbers; those that are gone already cost nothing. A writer's last segment must not be among them:
    it tells where the log ends.
    """
    found = _read_expired(root)
    new = {writer: sorted(set(numbers) - set(found["expired"].get(writer, ()))) for writer, numbers in segments.items()}
    removing = _merged(found["removing"], new)
    if not removing:
        return
    expired = _merged(found["expired"], new)
    layout.write_json(root / EXPIRED, {"expired": expired, "removing": removing})
    left = {
        writer: [number for number in numbers if not places.remove_tree(root / writer / segment_name(number))]
        for writer, numbers in removing.items()
    }
    layout.write_json(root / EXPIRED, {"expired": expired, "removing": _merged(left, {})})


def _merged(one: Mapping[str, Sequence[int]], other: Mapping[str, Sequence[int]]) -> dict[str, list[int]]:
    merged = {writer: sorted({*one.get(writer, ()), *other.get(writer, ())}) for writer in one.keys() | other.keys()}
    return {writer: numbers for writer, numbers in merged.items() if numbers}
