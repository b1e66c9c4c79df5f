"""The rows of a run for a report: the figures of each, and the steps that drew it. Memory is bounded."""

import collections
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from tba_jax.replay import journal
from tba_jax.replay.reader import LogCorruption, LogReader, RowsPending
from tba_jax.replay.segment import RowsExpired
from tba_jax.storage.places import STORAGE_ERRORS
from tba_jax.trajectory import Rows

log = logging.getLogger(__name__)

MOST_ROWS, MOST_READ_BYTES, MOST_DRAWS = 2_000_000, 16 << 30, 20_000_000
_BLOCK_BYTES, _MANY_ROWS = 8 << 20, 100_000
_ROW_BITS = 40  # of a key, which is (number of the writer) << _ROW_BITS | row
# key: int64, see `RowTable.name`. newest_step, oldest_step: trainer steps of the weights of the row's tokens, -1 without a token.
FIGURES = np.dtype([
    ("key", "i8"), ("query_id", "u8"), ("reward", "f4"), ("newest_step", "i4"), ("oldest_step", "i4"), ("finished", "?"),
])  # fmt: skip


def blocks(
    reader: LogReader, writer: str, rows: range, *, lost: Callable[[RowsExpired | LogCorruption], None], wait: bool = True
) -> Iterator[Rows]:
    """Reads rows of a writer in whole appends of about 8 MB, and goes around those that are damaged or removed.

    Args: lost: is told of such rows. wait: for storage that lags, see LogReader.read. Raises RowsPending, ValueError: as there.
    """
    size = reader.schema(writer).rows_per_append
    size *= max(1, _BLOCK_BYTES // (reader.shape.row_bytes * size))
    start = end = rows.start
    while start < rows.stop:
        end = end if end > start else min(rows.stop, (start // size + 1) * size)
        try:
            read = reader.read(writer, start, end, wait=wait)
        except (RowsExpired, LogCorruption, RowsPending) as error:
            if error.start > start:
                end = error.start
            elif isinstance(error, RowsPending):
                raise
            else:
                lost(error)
                start = max(error.stop, start + 1)
            continue
        yield read
        start = end


def steps_of_rows(rows: Rows) -> tuple[np.ndarray, np.ndarray]:
    """int32[B] each: the newest and the oldest policy step of the tokens of each row, -1 without a token."""
    steps = rows["policy_step"]
    newest = steps.max(axis=1, initial=-1)
    oldest = np.where(steps < 0, np.iinfo(np.int32).max, steps).min(axis=1, initial=np.iinfo(np.int32).max)
    return newest, np.where(newest < 0, -1, oldest).astype(np.int32)


class RowTable:
    """The figures of a run's rows, and which steps drew them.

    Attributes:
      rows: FIGURES[n]. Steps of rows of mounted runs are -1 there, as they count the updates of another run.
      writers: names, by number. committed: rows of all logs. problems: sentences about what cannot be read.
      last_step: the newest journalled step, 0 without one. resumes: steps after which a trainer went on.
    """

    def __init__(self, reader: LogReader, folder: Path):
        """Reads both. Args: folder: RunDir.journal."""
        self.reader = reader
        self.rows = np.zeros(0, FIGURES)
        self.writers: list[str] = []
        self.problems: list[str] = []
        self.resumes: list[int] = []
        self.committed = self.last_step = 0
        self._draws = np.zeros((2, 0), np.int64)  # the row's key, and the step, of each draw
        try:
            self._read_rows()
        except STORAGE_ERRORS as error:
            self.problems.append(f"the replay log cannot be read further: {error}")
        try:
            self._read_journal(folder)
        except (*STORAGE_ERRORS, KeyError, TypeError, IndexError, OverflowError, RecursionError) as error:
            self.problems.append(f"the journal cannot be read, so that steps that drew rows are missing: {error}")
        self.problems += [*self.reader.problems.values()][:20]

    def name(self, key: int) -> tuple[str, int]:
        """Writer and row."""
        return self.writers[key >> _ROW_BITS], key & (1 << _ROW_BITS) - 1

    def of_writer(self, name: str) -> np.ndarray:
        """bool[n]: which rows are of a writer."""
        return self.rows["key"] >> _ROW_BITS == self.writers.index(name)

    def counts(self) -> np.ndarray:
        """int64[n]: how often steps drew each row."""
        keys, wanted = np.sort(self._draws[0]), self.rows["key"]
        return np.searchsorted(keys, wanted, side="right") - np.searchsorted(keys, wanted, side="left")

    def draws_of(self, wanted: Sequence[int]) -> Mapping[int, list[int]]:
        """Key -> the steps that drew the row, ascending; a step that drew it twice stands there twice."""
        found: dict[int, list[int]] = {key: [] for key in wanted}
        for key, step in self._draws.T[np.isin(self._draws[0], np.asarray(wanted, np.int64))].tolist():
            found[key].append(step)
        return found

    def _number(self, writer: str) -> int:
        if writer not in self.writers:
            self.writers.append(writer)
        return self.writers.index(writer)

    def _read_rows(self) -> None:
        heads = self.reader.heads()
        self.committed = sum(heads.values())
        kept = {writer: self.reader.kept(writer) for writer in sorted(heads)}
        there = sum(len(each) for ranges in kept.values() for each in ranges)
        most = min(MOST_ROWS, MOST_READ_BYTES // self.reader.shape.row_bytes)
        if there > _MANY_ROWS:
            log.info("reading the newest %d of %d rows", min(there, most), there)
        found = [self.rows]
        lost: list[RowsExpired | LogCorruption] = []
        for writer, ranges in kept.items():
            number, own, mine = self._number(writer), self.reader.is_own(writer), sum(map(len, ranges))
            # Of more rows than are kept, each writer's newest, in proportion.
            begin = heads[writer] - (mine if there <= most else mine * most // there)
            try:
                for each in ranges:
                    for rows in blocks(
                        self.reader, writer, range(max(begin, each.start), each.stop), lost=lost.append, wait=False
                    ):
                        found.append(_figures(rows, number, own=own))
            except STORAGE_ERRORS as error:
                self.problems.append(f"further rows of writer {writer} cannot be read yet: {error}")
        self.rows = np.concatenate(found)
        damaged = [error for error in lost if isinstance(error, LogCorruption)]
        if damaged:
            rows_lost = sum(error.stop - error.start for error in damaged)
            self.problems.append(f"{rows_lost} rows are damaged and left out, such as: {damaged[0]}")
        if there > most:
            self.problems.append(
                f"about {len(self.rows):,} rows are read, the newest of each writer; {self.committed:,} are committed"
            )

    def _read_journal(self, folder: Path) -> None:
        lines = journal.read_lineage(folder)
        self.resumes = [stretch.first - 1 for stretch in lines.stretches if stretch.first > 1]
        draws, count = collections.deque([self._draws]), 0
        for line in lines:
            numbers = np.array([self._number(writer) for writer in line["writers"]], np.int64)
            which, rows = np.array(line["rows"], np.int64).reshape(-1, 2).T
            draws.append(np.stack([numbers[which] << _ROW_BITS | rows, np.full(len(rows), line["step"])]))
            count, self.last_step = count + len(rows), int(line["step"])
            while count > MOST_DRAWS:
                count -= draws.popleft().shape[1]
        self._draws = np.concatenate(draws, axis=1)


def _figures(rows: Rows, writer: int, *, own: bool) -> np.ndarray:
    found = np.zeros(len(rows["row"]), FIGURES)
    found["key"] = writer << _ROW_BITS | rows["row"]
    for name in ("query_id", "reward", "finished"):
        found[name] = rows[name]
    found["newest_step"], found["oldest_step"] = steps_of_rows(rows) if own else (-1, -1)
    return found
