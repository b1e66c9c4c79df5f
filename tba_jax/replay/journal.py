"""The write-ahead journal of the trainer: one durable line a step, before anything shows the update.

Each trainer writes its own file, `epoch-000001.jsonl`, under the epoch its lease gave it. `read_lineage` joins the files to the
one history that a resumed trainer replays, and `Again` gives an index the rows of its lines.
"""

import concurrent.futures
import dataclasses
import hashlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from tba_jax.replay.index import ReplayIndex
from tba_jax.replay.ledger import Gap, KnownGaps, Losses
from tba_jax.replay.reader import LogReader, Unreadable
from tba_jax.replay.tail import read_part, take_part
from tba_jax.storage import places
from tba_jax.trajectory import Rows

_ADVICE = "Restore the file from a copy, or begin a new run from a snapshot (--init_from=RUN@STEP)"
_JOURNAL_NAME = re.compile(r"epoch-(\d{6})\.jsonl")
_BLOCK = 1 << 18  # bytes that are read at once


def journal_line(
    *,
    step: int,
    visible: Sequence[Mapping[str, Any]],
    ids: Sequence[tuple[str, int]],
    reward_version: int,
    key: int,
    rows: Rows,
) -> dict[str, Any]:
    """One step's line; the journal adds the epoch, and the digest of the code.

    Args: step: from 1. visible: what this step integrated, in order, each a ledger.integration. ids: (writer, row) of the batch,
    in order. key: what the step's random key was folded with. rows: the batch, whose hash the line holds.
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

    def __init__(self, folder: Path, epoch: int, *, code: str = ""):
        """Args: folder: `RunDir.journal`; epoch: of the lease; code: digest of what computes the steps.
        Raises FileExistsError: the epoch has a journal already."""
        places.make_folder(folder)
        self.epoch, self._code = epoch, code
        self.path = folder / f"epoch-{epoch:06d}.jsonl"
        self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o644)
        self._length = 0
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="journal")

    def append(self, line: Mapping[str, Any]) -> None:
        """Returns once the line is on the device. Raises OSError; the trainer must stop then, and a torn line is ignored."""
        content = (json.dumps({**line, "epoch": self.epoch, "code": self._code}, separators=(",", ":")) + "\n").encode()
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
        self._thread.shutdown()
        os.close(self._file)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Stretch:
    """Lines of consecutive steps in the file of one epoch. first: their first step; begin, end: where they are, in bytes."""

    path: Path
    epoch: int
    first: int
    begin: int
    end: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lineage:
    """Where the lines that count are, of the steps after one step. The lines stay in their files: a pass holds one at a time.

    after: that step. epoch: the epoch that recorded it, 0 where none did.
    last: the last step of the whole journal, 0 where it is empty. A journal that was cut may end before `after`.
    """

    after: int
    epoch: int
    last: int
    stretches: tuple[_Stretch, ...]

    @property
    def epochs(self) -> list[int]:
        """The epochs that the lines are of, ascending."""
        return [stretch.epoch for stretch in self.stretches]

    def __len__(self) -> int:
        return max(0, self.last - self.after)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for stretch in self.stretches:
            with open(stretch.path, "rb", buffering=_BLOCK) as file:
                at = file.seek(stretch.begin)
                while at < stretch.end:
                    content = file.readline()
                    at += len(content)
                    yield json.loads(content)


def read_lineage(folder: Path, *, after: int = 0, must_exist: bool = False) -> Lineage:
    """The lines of the steps `after` + 1, `after` + 2, … that count: a step recorded by several epochs belongs to the highest.

    Lines of an epoch at or after the first step of a later epoch were abandoned and are left out. The last line of a file that
    a crash tore is ignored: no update followed it. Without a folder there are no lines, unless it must exist.

    The files are read from their ends back to the step `after`: damage before it does no harm.

    Raises: FileNotFoundError: the folder must exist and does not. ValueError: after `after`, a line is malformed (file and line
    number) or a step is missing.
    """
    if must_exist:
        os.listdir(folder)
    found: list[_Stretch] = []
    last = epoch_of_after = 0
    for epoch, path in reversed(epoch_files(folder).items()):
        before = found[0].first if found else sys.maxsize
        stretch, newest, lowest = _find_stretch(path, epoch, after=after, before=before)
        if found and 0 < newest < before - 1:
            break
        if stretch is not None:
            found.insert(0, stretch)
        last = last or newest
        if lowest == after > 0:
            epoch_of_after = epoch
        if newest and lowest <= after:
            break
    if found and found[0].first > after + 1:
        following = f"epoch {found[0].epoch} goes on with step {found[0].first}"
        raise ValueError(f"the journal in {folder} lacks step {found[0].first - 1}: {following}")
    return Lineage(after=after, epoch=epoch_of_after, last=last, stretches=tuple(found))


def epoch_files(folder: Path) -> dict[int, Path]:
    """Epoch -> the file of its trainer, in the order of the epochs; {} without a folder."""
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    epochs = sorted(int(match[1]) for name in names if (match := _JOURNAL_NAME.fullmatch(name)))
    return {epoch: folder / f"epoch-{epoch:06d}.jsonl" for epoch in epochs}


def last_step(folder: Path) -> int:
    """The last journalled step, 0 where there is none. Reads one line. Raises ValueError where that is malformed."""
    return read_lineage(folder, after=sys.maxsize).last


def _find_stretch(path: Path, epoch: int, *, after: int, before: int) -> tuple[_Stretch | None, int, int]:
    """The lines of an epoch whose steps are above `after` and below `before`, None where there are none.

    Returns also the last step of the file and the first that was looked for, 0 where the file has no lines.
    """
    newest = step = first = begin = end = 0
    for step, line_begin, line_end in _steps_from_the_end(path, epoch, after=after, before=before):
        newest = newest or step
        if after < step < before:
            first, begin, end = step, line_begin, end or line_end
    stretch = _Stretch(path=path, epoch=epoch, first=first, begin=begin, end=end) if end else None
    return stretch, newest, step


def _steps_from_the_end(path: Path, epoch: int, *, after: int, before: int) -> Iterator[tuple[int, int, int]]:
    """Step, begin and end in bytes of each whole line, the last first, down to the first line that is not above `after`.

    Steps of a file are consecutive: the lines that are not between `after` and `before` have their steps whatever is in them.
    """
    with open(path, "rb") as file:
        lines = _lines_from_the_end(file)
        torn = bool(next(lines)[1])
        following = 0
        for at, content in lines:
            step = following - 1
            if not following or after < step < before:
                try:
                    step, written_by = _parsed(content)
                except (ValueError, KeyError, TypeError, IndexError) as error:
                    # A device may persist the newline of a torn line before the line itself.
                    if not following and not torn:
                        torn = True
                        continue
                    raise ValueError(f"{path} line {_line_number(file, at)} is not a journal line: {error}. {_ADVICE}") from error
                if written_by != epoch or (following and step != following - 1):
                    place = f"before step {following}" if following else "at the end"
                    raise ValueError(f"{path} line {_line_number(file, at)}: step {step} of epoch {written_by} stands {place}")
            yield step, at, at + len(content) + 1
            if step <= after:
                return
            following = step


def _parsed(content: bytes) -> tuple[int, int]:
    """Step and epoch of a line. Raises ValueError, KeyError, TypeError or IndexError where it is no journal line."""
    line = json.loads(content)
    line_ids(line)
    return int(line["step"]), int(line["epoch"])


def _lines_from_the_end(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """What follows the last newline, then each whole line, the last first: where it begins, and its content."""
    at = file.seek(0, os.SEEK_END)
    rest = b""
    while at:
        begin = max(0, at - _BLOCK)
        file.seek(begin)
        rest, *others = (file.read(at - begin) + rest).split(b"\n")
        end = begin + len(rest) + sum(map(len, others)) + len(others)
        for content in reversed(others):
            end -= len(content)
            yield end, content
            end -= 1
        at = begin
    yield 0, rest


def _line_number(file: BinaryIO, at: int) -> int:
    file.seek(0)
    return 1 + file.read(at).count(b"\n")


class RowsLost(ValueError):
    """A row that a journalled step drew cannot be read any more."""


class Again:
    """Brings an index through journal lines, one after the other.

    Attributes: lost: gaps that are new: rows that could be read when they were journalled, and cannot be read any more.
    """

    def __init__(self, index: ReplayIndex, reader: LogReader, losses: Losses, *, step: int):
        """Args: losses: of the lines that follow; step: where the index stands."""
        self._index, self._reader, self._losses = index, reader, losses
        self._counted = losses.until(step)
        self._lost_before = KnownGaps(self._counted)
        self.lost: list[Gap] = []

    def do(self, line: Mapping[str, Any]) -> np.ndarray:
        """Integrates what a line tells of. Returns the slots of its batch, int64[B].

        Raises: RowsLost: a row of the batch cannot be read any more; names it. ValueError: it is not resident although it can be
        read. RowsPending: storage does not answer.
        """
        self._lose_what_was_lost(line["step"] - 1)
        for record in line["visible"]:
            self._integrate(record, step=line["step"] - 1)
        slots = self._index.slots_of(line_ids(line))
        if (slots < 0).any():
            raise _not_resident(self._reader, line, slots)
        return slots

    def _lose_what_was_lost(self, step: int) -> None:
        counted = self._losses.until(step)
        for record in counted[len(self._counted) :]:
            for writer, ranges in record["skipped"].items():
                for start, stop, _ in ranges:
                    self._index.lose(writer, start, stop)
        if len(counted) > len(self._counted):
            self._counted, self._lost_before = counted, KnownGaps(counted)

    def _integrate(self, record: Mapping[str, Any], *, step: int) -> None:
        """What ReplayBuffer.integrate did when it made the record."""
        own = KnownGaps([record])
        self._reader.expect(record["heads"])
        for writer, head in sorted(record["heads"].items()):
            if (begin := self._index.head(writer)) >= head:
                continue
            known = [*own.within(writer, begin, head), *self._lost_before.within(writer, begin, head)]
            known.sort(key=lambda gap: gap.start)
            part = read_part(self._reader, writer, begin, head, known, wait=True)
            take_part(self._index, self._reader, writer, part, step=step)
            self.lost += [gap for gap in part.gaps if gap not in known]
        if "closed" in record:
            self._index.close([writer for writer, head in record["closed"].items() if self._index.heads.get(writer) == head])
        if "late" in record:
            self._integrate_late(*record["late"], step=step)
        if "merged_before" in record:
            self._index.merge(before=record["merged_before"])

    def _integrate_late(self, writer: str, start: int, stop: int, *, step: int) -> None:
        """Rows that were pending. A checkpoint may have them already."""
        if not any(begin <= start and stop <= end for begin, end in self._index.pending.get(writer, ())):
            return
        known = self._lost_before.within(writer, start, stop)
        part = read_part(self._reader, writer, start, stop, known, wait=True)
        for gap in part.gaps:
            self._index.take_pending(writer, gap.start, gap.stop)
        take_part(self._index, self._reader, writer, part, step=step)
        self.lost += [gap for gap in part.gaps if gap not in known]


def _not_resident(reader: LogReader, line: Mapping[str, Any], slots: np.ndarray) -> ValueError:
    """Why a journalled batch cannot be drawn again. Args: slots: int64[B]; −1 where a row is not resident."""
    writer, row = line_ids(line)[int((slots < 0).argmax())]
    try:
        reader.read_ids([(writer, row)])
    except (ValueError, Unreadable) as error:
        return RowsLost(
            f"step {line['step']} drew row {writer}:{row}, which cannot be read any more: {error}. Restore it, or begin a new "
            "run from a snapshot (--init_from=RUN@STEP)"
        )
    return ValueError(f"step {line['step']} drew row {writer}:{row}, which was not resident: log and journal disagree")
