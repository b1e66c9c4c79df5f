"""The rows of a run for people who look at it: the figures of each, and the steps that drew it.

`RowTable` keeps 37 bytes of each row and 16 of each draw, of a bounded number of both. Tokens are read again for the rows shown.
"""

import collections
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from tba_jax.replay import journal
from tba_jax.replay.expiry import RowsExpired
from tba_jax.replay.reader import LogCorruption, LogReader, RowsPending
from tba_jax.storage.places import STORAGE_ERRORS
from tba_jax.trajectory import Rows

MOST_ROWS, MOST_READ_BYTES, MOST_DRAWS = 2_000_000, 16 << 30, 20_000_000
_BLOCK_BYTES = 8 << 20
_ROW_BITS = 40  # of a key, which is (number of the writer) << _ROW_BITS | row
# key: int64, see `RowTable.name`. newest_step, oldest_step: trainer steps of the weights of the row's tokens, -1 without a token.
# log_ratio: log π_θ − log π_ref of the response, nats, π_θ being the policy that sampled it.
FIGURES = np.dtype(
    [
        ("key", np.int64),
        ("query_id", np.uint64),
        ("reward", np.float32),
        ("newest_step", np.int32),
        ("oldest_step", np.int32),
        ("response_length", np.int32),
        ("finished", bool),
        ("log_ratio", np.float32),
    ]
)


def blocks(
    reader: LogReader, writer: str, rows: range, *, lost: Callable[[RowsExpired | LogCorruption], None], wait: bool = True
) -> Iterator[Rows]:
    """Reads rows of a writer in whole appends of about 8 MB, and goes around those that are damaged or removed.

    Args: lost: is told of such rows. wait: for storage that lags, see LogReader.read.

    Raises:
      RowsPending: storage does not give the next rows yet. ValueError: they are not committed.
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
    """The figures of a run's rows, and which steps drew them; `advance` reads what is new.

    Attributes:
      rows: FIGURES[n]. Steps of rows of mounted runs are -1 there, as they count the updates of another run.
      writers: names, by number. committed: rows of all logs. problems: sentences about what cannot be read.
      last_step: the newest journalled step, 0 without one. resumes: steps after which a trainer went on.
    """

    def __init__(self, reader: LogReader, folder: Path):
        """Args: reader: belongs to the table from now on. folder: RunDir.journal."""
        self.reader, self._folder = reader, folder
        self.rows = np.zeros(0, FIGURES)
        self.writers: list[str] = []
        self.problems: list[str] = []
        self.committed = self.last_step = 0
        self.resumes: list[int] = []
        self._next: dict[str, int] = {}  # the first row of each writer that is not read yet
        self._gone = self._damaged = 0
        self._damage = ""
        self._forget_draws()

    def name(self, key: int) -> tuple[str, int]:
        """Writer and row."""
        return self.writers[key >> _ROW_BITS], key & (1 << _ROW_BITS) - 1

    def advance(self, tell: Callable[[str], None] = lambda sentence: None) -> None:
        """Reads the rows and the journal lines that are new. Args: tell: is given a sentence now and then about how far it is."""
        self.problems = []
        try:
            self._read_rows(tell)
        except STORAGE_ERRORS as error:
            self.problems.append(f"the replay log cannot be read further: {error}")
        try:
            self._read_journal()
        except (*STORAGE_ERRORS, KeyError, TypeError, IndexError, OverflowError, RecursionError) as error:
            self.problems.append(f"the journal cannot be read, so that steps that drew rows are missing: {error}")
        self.problems += [*self.reader.problems.values()][:20]

    def counts(self) -> np.ndarray:
        """int64[n]: how often steps drew each row."""
        keys = np.sort(np.concatenate([*self._keys, np.zeros(0, np.int64)]))
        wanted = self.rows["key"]
        return np.searchsorted(keys, wanted, side="right") - np.searchsorted(keys, wanted, side="left")

    def draws_of(self, wanted: Sequence[int]) -> Mapping[int, list[int]]:
        """Key -> the steps that drew the row, ascending; a step that drew it twice stands there twice."""
        keys, steps = (np.concatenate([*each, np.zeros(0, np.int64)]) for each in (self._keys, self._steps))
        mine = np.isin(keys, np.asarray(wanted, np.int64))
        found: dict[int, list[int]] = {key: [] for key in wanted}
        for key, step in zip(keys[mine].tolist(), steps[mine].tolist(), strict=True):
            found[key].append(step)
        return found

    def _number(self, writer: str) -> int:
        if writer not in self.writers:
            self.writers.append(writer)
        return self.writers.index(writer)

    def _read_rows(self, tell: Callable[[str], None]) -> None:
        heads = self.reader.heads()
        self.committed = sum(heads.values())
        kept = {writer: self.reader.kept(writer) for writer in sorted(heads)}
        new = sum(len(each) for writer, ranges in kept.items() if writer not in self._next for each in ranges)
        most = min(MOST_ROWS, MOST_READ_BYTES // self.reader.shape.row_bytes)
        found, count = [self.rows], 0
        for writer, ranges in kept.items():
            number, own = self._number(writer), self.reader.is_own(writer)
            mine = sum(map(len, ranges))
            # Of more rows than are kept, each writer's newest, in proportion.
            begin = self._next.get(writer, heads[writer] - (mine if new <= most else mine * most // new))
            self._next[writer] = begin
            try:
                for each in ranges:
                    for rows in blocks(
                        self.reader, writer, range(max(begin, each.start), each.stop), lost=self._lose, wait=False
                    ):
                        found.append(_figures(rows, number, own=own))
                        count += len(found[-1])
                        self._next[writer] = int(rows["row"][-1]) + 1
                        tell(f"read {count:,} of at most {min(new, most):,} rows")
                self._next[writer] = heads[writer]
            except STORAGE_ERRORS as error:  # such as RowsPending: a later call may read them
                self.problems.append(f"rows of writer {writer} from {self._next[writer]} on cannot be read yet: {error}")
        self.rows = np.concatenate(found)
        if len(self.rows) > 2 * MOST_ROWS:
            self.rows = self.rows[np.sort(np.argsort(self.rows["newest_step"], kind="stable")[-MOST_ROWS:])]
        if self._damaged:
            self.problems.append(f"{self._damaged} rows are damaged and left out, such as: {self._damage}")
        if self._gone:
            self.problems.append(f"{self._gone} rows were removed by retention while they were read")
        if new > most:
            self.problems.append(
                f"about {len(self.rows):,} rows are read, the newest of each writer; {self.committed:,} are committed"
            )

    def _lose(self, error: RowsExpired | LogCorruption) -> None:
        count = error.stop - error.start
        if isinstance(error, LogCorruption):
            self._damaged, self._damage = self._damaged + count, self._damage or str(error)
        else:
            self._gone += count

    def _forget_draws(self) -> None:
        self._keys: collections.deque[np.ndarray] = collections.deque()
        self._steps: collections.deque[np.ndarray] = collections.deque()
        self._draws = self.last_step = self._epoch = 0
        self.resumes = []

    def _read_journal(self) -> None:
        """Takes the lines after `last_step`; all lines, where a later trainer has gone back behind it."""
        lines = journal.read_lineage(self._folder, after=self.last_step)
        if self.last_step and lines.epoch != self._epoch:
            self._forget_draws()
            lines = journal.read_lineage(self._folder)
        for stretch in lines.stretches:
            self.resumes += [stretch.first - 1] * (stretch.epoch != self._epoch and stretch.first > 1)
            self._epoch = stretch.epoch
        for line in lines:
            numbers = np.array([self._number(writer) for writer in line["writers"]], np.int64)
            drawn = np.array(line["rows"], np.int64).reshape(-1, 2)
            self._keys.append(numbers[drawn[:, 0]] << _ROW_BITS | drawn[:, 1] if len(drawn) else np.zeros(0, np.int64))
            self._steps.append(np.full(len(drawn), line["step"], np.int64))
            self._draws += len(drawn)
            self.last_step = int(line["step"])
            while self._draws > MOST_DRAWS:
                self._draws -= len(self._keys.popleft())
                self._steps.popleft()


def _figures(rows: Rows, writer: int, *, own: bool) -> np.ndarray:
    found = np.zeros(len(rows["row"]), FIGURES)
    found["key"] = writer << _ROW_BITS | rows["row"]
    for name in ("query_id", "reward", "response_length", "finished"):
        found[name] = rows[name]
    found["newest_step"], found["oldest_step"] = steps_of_rows(rows) if own else (-1, -1)
    found["log_ratio"] = (rows["policy_logprobs"] - rows["ref_logprobs"]).sum(axis=1, dtype=np.float64)
    return found


def read_some(reader: LogReader, ids: Sequence[tuple[str, int]]) -> tuple[Rows, list[int], list[str]]:
    """The rows named by (writer, row) with all their columns, as far as they can be read.

    Returns: rows; for each of them its place in `ids`; and a sentence about each other row.
    """
    found, there, lost = [], [], []
    for place, (writer, row) in enumerate(ids):
        try:
            found.append(reader.read_ids([(writer, row)]))
            there.append(place)
        except STORAGE_ERRORS as error:
            lost.append(f"row {writer}:{row} is not shown: {error}")
    none = {name: np.zeros((0, *size), dtype) for name, (dtype, size) in reader.shape.columns().items()}
    return {name: np.concatenate([each[name] for each in (none, *found)]) for name in none}, there, lost
