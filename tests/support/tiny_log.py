"""Rows whose every value follows from their number."""

import os
from pathlib import Path
from typing import Any

import numpy as np

from tba_jax.replay.index import ReplayIndex
from tba_jax.replay.journal import Again
from tba_jax.replay.ledger import Gap, Losses
from tba_jax.replay.log import LogWriter
from tba_jax.replay.reader import LogReader
from tba_jax.trajectory import RowShape

SHAPE = RowShape(prompt_length=4, response_length=6, reward_parts=("a", "b"))


def make_rows(start: int, count: int, shape: RowShape = SHAPE) -> dict[str, np.ndarray]:
    """Rows whose every value follows from the row number; zeros included, since a fill value must survive as well."""
    numbers = np.arange(start, start + count)
    rows = {}
    for name, (dtype, row) in shape.columns().items():
        values = numbers.reshape(-1, *[1] * len(row)) + np.arange(int(np.prod(row))).reshape(row)
        rows[name] = (values % 7).astype(dtype)
    rows["row"] = numbers
    rows["response_length"] = (numbers % 7).astype(np.int32)
    rows["prompt_length"] = np.full(count, 4, np.int32)
    return rows


def writer(root: Path, name: str = "w0", shape: RowShape = SHAPE) -> LogWriter:
    return LogWriter(root, name, shape, info={"pid": os.getpid()})


def objects(root: Path, name: str = "w0") -> list[Path]:
    """The appends of a writer in a folder, in their order."""
    return sorted(root.glob(f"*/{name}.*-*"), key=lambda path: int(path.name.split(".")[1].split("-")[0]))


def damage(root: Path, append: int) -> None:
    """Cuts the object of one of the four appends of w0, of four rows each."""
    log = writer(root)
    for number in range(4):
        log.append(make_rows(4 * number, 4))
    file = objects(root)[append]
    file.write_bytes(file.read_bytes()[:40])


def assert_rows(rows, expected):
    for name, column in expected.items():
        assert rows[name].dtype == column.dtype
        np.testing.assert_array_equal(rows[name], column, err_msg=name)


def integrate_again(index: ReplayIndex, reader: LogReader, *records: dict[str, Any], step: int) -> list[Gap]:
    """Does journalled integrations of one step again. Returns the gaps that are new."""
    again = Again(index, reader, Losses(), step=step)
    again.do({"step": step + 1, "visible": records, "writers": [], "rows": []})
    return again.lost
