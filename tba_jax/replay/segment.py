"""One segment of a writer's log: an OCDBT database with one zarr3 array a column and a head.

A segment holds a fixed number of appends. Every append is one chunk of every array plus the key `head`, committed in
one atomic transaction: a reader sees all of it or nothing. A column whose rows are empty (a run without reward parts)
has no bytes and is not stored.
"""

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

from tba_jax.trajectory import Rows, RowShape

# What tensorstore raises on storage trouble; the message usually begins with the status code.
STORAGE_ERRORS = (ValueError, OSError, NotImplementedError)

_HEAD = "head"
# An append rewrites the B-tree nodes that it touches: small nodes keep that below the size of the rows.
_MAX_NODE_BYTES = 16384


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogSchema:
    """What `writer.json` says about the rows of a log.

    columns: column name -> (dtype, shape of one row). rows_per_append and segment_appends fix where a row is stored.
    """

    rows_per_append: int
    segment_appends: int
    columns: Mapping[str, tuple[str, tuple[int, ...]]]
    reward_parts: tuple[str, ...]

    @property
    def segment_rows(self) -> int:
        return self.rows_per_append * self.segment_appends

    def to_json(self) -> dict[str, Any]:
        return {
            "rows_per_append": self.rows_per_append,
            "segment_appends": self.segment_appends,
            "columns": {name: [dtype, list(shape)] for name, (dtype, shape) in self.columns.items()},
            "reward_parts": list(self.reward_parts),
        }

    @staticmethod
    def from_json(value: Any) -> "LogSchema":
        """Raises ValueError naming what is missing or malformed."""
        try:
            schema = LogSchema(
                rows_per_append=int(value["rows_per_append"]),
                segment_appends=int(value["segment_appends"]),
                columns={name: (str(dtype), tuple(map(int, shape))) for name, (dtype, shape) in value["columns"].items()},
                reward_parts=tuple(value["reward_parts"]),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"it lacks the schema of a replay log ({type(error).__name__}: {error})") from error
        if schema.rows_per_append < 1 or schema.segment_appends < 1:
            raise ValueError(
                f"rows_per_append={schema.rows_per_append} and segment_appends={schema.segment_appends} must be at least 1"
            )
        return schema

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


def _array_spec(schema: LogSchema, name: str) -> dict[str, Any]:
    dtype, shape = schema.columns[name]
    return {
        "driver": "zarr3",
        "metadata": {
            "shape": [schema.segment_rows, *shape],
            "data_type": dtype,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [schema.rows_per_append, *shape]}},
            "codecs": [
                {"name": "bytes", "configuration": {"endian": "little"}},
                {"name": "zstd", "configuration": {"level": 1}},
                {"name": "crc32c"},
            ],
        },
        # A missing chunk must be an error and never read as zeros.
        "fill_missing_data_reads": False,
        "store_data_equal_to_fill_value": True,
    }


class Segment:
    """An open segment. Raises STORAGE_ERRORS as tensorstore words them."""

    def __init__(self, folder: Path, schema: LogSchema, *, create: bool = False):
        """Args: create: commits the empty arrays first; the arrays of an earlier, interrupted creation are reused."""
        self.folder = folder
        self._schema = schema
        # One context for all arrays: without it every array gets a B-tree writer of its own and one commit of n columns
        # writes n²/2 files.
        self._context = ts.Context()
        database = {
            "driver": "ocdbt",
            "base": {"driver": "file", "path": f"{folder.absolute()}/"},
            "config": {"max_decoded_node_bytes": _MAX_NODE_BYTES},
        }
        if not create:
            del database["config"]
        self._database = ts.KvStore.open(database, context=self._context).result()
        if create:
            transaction = ts.Transaction(atomic=True)
            self._open_arrays(create=True, transaction=transaction)
            transaction.commit_sync()
        self._arrays: dict[str, Any] | None = None

    def _open_arrays(self, **options: Any) -> dict[str, Any]:
        futures = {
            name: ts.open(
                _array_spec(self._schema, name),
                kvstore=self._database / f"{name}/",
                open=True,
                context=self._context,
                **options,
            )
            for name, (_, shape) in self._schema.columns.items()
            if math.prod(shape)
        }
        return {name: future.result() for name, future in futures.items()}

    @property
    def arrays(self) -> dict[str, Any]:
        """Column name -> tensorstore array [segment_rows, *row_shape], opened at first use."""
        if self._arrays is None:
            self._arrays = self._open_arrays()
        return self._arrays

    def append(self, position: int, rows: Rows, head: Mapping[str, int]) -> None:
        """Commits append number `position` of this segment and the head, durably and atomically."""
        size = self._schema.rows_per_append
        transaction = ts.Transaction(atomic=True)
        try:
            writes = [
                array.with_transaction(transaction)[position * size : (position + 1) * size].write(rows[name])
                for name, array in self.arrays.items()
            ]
            self._database.with_transaction(transaction)[_HEAD] = json.dumps(head).encode()
            transaction.commit_sync()
            for write in writes:
                write.result()
        except BaseException:
            transaction.abort()
            raise

    def head(self) -> dict[str, int] | None:
        """The committed head, None before the first append. Raises ValueError if it is not a head."""
        content = self._database.read(_HEAD).result()
        if content.state != "value":
            return None
        head = json.loads(content.value)
        if not isinstance(head, dict) or not isinstance(head.get("rows"), int):
            raise ValueError(f"DATA_LOSS: {self.folder} has the head {head!r}")
        return head

    def start_read(self, position: int) -> dict[str, Any]:
        """Starts reading append number `position`; `finish_read` waits for it."""
        size = self._schema.rows_per_append
        # The columns of an append lie side by side in one file: a batch reads them together.
        with ts.Batch() as batch:
            return {name: array[position * size : (position + 1) * size].read(batch=batch) for name, array in self.arrays.items()}

    def finish_read(self, reads: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Rows of the append, every column [rows_per_append, *row_shape]."""
        size = self._schema.rows_per_append
        return {
            name: np.asarray(reads[name].result()) if name in reads else np.zeros((size, *shape), dtype)
            for name, (dtype, shape) in self._schema.columns.items()
        }
