"""The write-ahead journal of the trainer: one durable line a step, before anything shows the update.

Each trainer process writes its own file, `epoch-000001.jsonl`, under the epoch its lease gave it. `read_lineage` joins
the files to the one history that a resumed trainer replays.
"""

import concurrent.futures
import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tba_jax.run import places
from tba_jax.trajectory import Rows

_JOURNAL_NAME = re.compile(r"epoch-(\d{6})\.jsonl")


def journal_line(
    *,
    step: int,
    visible: Sequence[Mapping[str, Any]],
    ids: Sequence[tuple[str, int]],
    reward_version: int,
    key: int,
    rows: Rows,
) -> dict[str, Any]:
    """One step's line; the journal adds the epoch.

    Args:
      step: trainer step, from 1.
      visible: what this step integrated, in order, each a gaps.visible; writers without news may be left out.
      ids: (writer, row) of the batch, in order.
      reward_version: version of the reward that scored the batch.
      key: what the step's random key was folded with.
      rows: the batch, whose hash the line holds.
    """
    numbers: dict[str, int] = {}
    drawn = [[numbers.setdefault(writer, len(numbers)), int(row)] for writer, row in ids]
    return {
        "step": step,
        "visible": [dict(each) for each in visible],
        "writers": list(numbers),
        "rows": drawn,
        "reward_version": reward_version,
        "key": key,
        "batch": batch_hash(rows),
    }


def line_ids(line: Mapping[str, Any]) -> list[tuple[str, int]]:
    """(writer, row) of a line's batch, in order."""
    return [(line["writers"][number], row) for number, row in line["rows"]]


def batch_hash(rows: Rows) -> str:
    """SHA-256 in hex over name, dtype, shape and bytes of every column, in sorted order."""
    digest = hashlib.sha256()
    for name in sorted(rows):
        column = np.ascontiguousarray(rows[name])
        digest.update(f"{name}|{column.dtype.str}|{list(column.shape)}|".encode())
        digest.update(column.tobytes())
    return digest.hexdigest()


class Journal:
    """Appends lines to the journal file of one epoch."""

    def __init__(self, folder: Path, epoch: int):
        """Args: folder: `RunDir.journal`; epoch: of the lease. Raises FileExistsError if the epoch has a journal already."""
        places.make_folder(folder)
        self.epoch = epoch
        self.path = folder / f"epoch-{epoch:06d}.jsonl"
        self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o644)
        self._length = 0
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="journal")

    def append(self, line: Mapping[str, Any]) -> None:
        """Returns once the line is on the device. Raises OSError; the trainer must stop then, and a torn line is ignored."""
        content = (json.dumps({**line, "epoch": self.epoch}, separators=(",", ":")) + "\n").encode()
        try:
            written = 0
            while written < len(content):
                written += os.write(self._file, content[written:])
            os.fsync(self._file)
            if self._length == 0:
                places.sync_folder(self.path.parent)
        except OSError:
            # A partial line would make the next line unreadable.
            os.ftruncate(self._file, self._length)
            raise
        self._length += len(content)

    def submit(self, make_line: Callable[[], Mapping[str, Any]]) -> concurrent.futures.Future[None]:
        """Makes a line and appends it in a thread of the journal, one after the other. The result raises as `append`."""
        return self._thread.submit(lambda: self.append(make_line()))

    def close(self) -> None:
        """Closes the file; the journal cannot be appended to afterwards."""
        self._thread.shutdown()
        os.close(self._file)


def read_lineage(folder: Path, *, must_exist: bool = False) -> list[dict[str, Any]]:
    """The lines of steps 1, 2, … that count: a step recorded by several epochs belongs to the highest.

    Lines of an epoch at or after the first step of a later epoch were abandoned and are left out. The last line of a
    file that a crash tore is ignored: no update followed it. Without a folder there are no lines.

    Args: must_exist: the caller knows that there is a folder.

    Raises:
      FileNotFoundError: the folder must exist and does not.
      ValueError: a malformed line before the last (file and line number), or a missing step.
    """
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        if must_exist:
            raise
        return []
    epochs = sorted((int(match[1]) for name in names if (match := _JOURNAL_NAME.fullmatch(name))), reverse=True)
    lineage: list[dict[str, Any]] = []
    for epoch in epochs:
        lines = _read_epoch(folder / f"epoch-{epoch:06d}.jsonl", epoch)
        first = lineage[0]["step"] if lineage else None
        lineage = [line for line in lines if first is None or line["step"] < first] + lineage
    for expected, line in enumerate(lineage, start=1):
        if line["step"] != expected:
            raise ValueError(
                f"the journal in {folder} lacks step {expected}: epoch {line['epoch']} goes on with step {line['step']}"
            )
    return lineage


def _read_epoch(path: Path, epoch: int) -> list[dict[str, Any]]:
    *complete, torn = path.read_bytes().split(b"\n")
    lines: list[dict[str, Any]] = []
    for number, content in enumerate(complete, start=1):
        try:
            line = json.loads(content)
            step, written_by = int(line["step"]), int(line["epoch"])
            line_ids(line)
        except (ValueError, KeyError, TypeError, IndexError) as error:
            # A device may persist the newline of a torn line before the line itself.
            if number == len(complete) and not torn:
                break
            raise ValueError(f"{path} line {number} is not a journal line: {error}") from error
        if written_by != epoch or (lines and step != lines[-1]["step"] + 1):
            after = f"step {lines[-1]['step']}" if lines else "nothing"
            raise ValueError(f"{path} line {number}: step {step} of epoch {written_by} follows {after}")
        lines.append(line)
    return lines
