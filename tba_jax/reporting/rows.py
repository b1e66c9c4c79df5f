"""What all rows of a run say of themselves, but for their tokens: one table in memory, read once and kept up to date.

A row costs 45 bytes and 4 for each part of its reward, so a million rows of three parts cost 57 MB. The newest rows are read
first, so that a reader of a long run has something to show at once. Tokens stay in the log: who shows a row reads it there.
"""

import dataclasses
import threading
import time
from collections.abc import Mapping, Sequence

import numpy as np

from tba_jax.replay.expiry import RowsExpired
from tba_jax.replay.reader import LogCorruption, LogReader, RowsPending
from tba_jax.run import places
from tba_jax.run.places import STORAGE_ERRORS
from tba_jax.trajectory import Rows

# Rows that are kept; of more, the half with the newest weights stays.
MOST_ROWS = 10_000_000
# Bytes of rows that are read at once: what a thread that stops waits for.
_BLOCK_BYTES = 8_000_000
# Writers that are all asked for news each time.
_MOST_ASKED = 256
_STRANGERS_TOLD = 20  # sentences about what is not read, at most
# Name -> dtype of the columns with one value a row.
_DTYPES: dict[str, str] = {
    "writer": "int32",
    "row": "int64",
    "query_id": "uint64",
    "reward": "float32",
    "newest_step": "int32",
    "oldest_step": "int32",
    "response_length": "int32",
    "finished": "bool",
    "policy_logprob_sum": "float32",
    "ref_logprob_sum": "float32",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Columns:
    """The rows that are read so far, in the order of reading. Rows come at the end; a table that is full begins anew.

    writer: int32[n], index into RowTable.writers. row: int64[n], within the writer. query_id: uint64[n]. reward: float32[n].
    reward_parts: float32[n, M]. newest_step, oldest_step: int32[n], trainer steps of the weights of the row's tokens, -1 without
    a token. response_length: int32[n]. finished: bool[n]. policy_logprob_sum, ref_logprob_sum: float32[n], nats, of the response.
    """

    writer: np.ndarray
    row: np.ndarray
    query_id: np.ndarray
    reward: np.ndarray
    reward_parts: np.ndarray
    newest_step: np.ndarray
    oldest_step: np.ndarray
    response_length: np.ndarray
    finished: np.ndarray
    policy_logprob_sum: np.ndarray
    ref_logprob_sum: np.ndarray

    def __len__(self) -> int:
        return len(self.row)

    def first(self, count: int) -> "Columns":
        """The first rows of the table, as it was when it had `count` of them."""
        return Columns(**{field.name: getattr(self, field.name)[:count] for field in dataclasses.fields(self)})


class RowTable:
    """The table of a run's rows. One thread advances it; any thread may read `columns`, `progress` and `problems`.

    Attributes:
      writers: names, in the order in which their first rows were read; names are only added.
    """

    def __init__(self, reader: LogReader, *, most_rows: int = MOST_ROWS):
        """Args: reader: belongs to the table from now on. most_rows: that are kept, the newest."""
        self.writers: list[str] = []
        self._reader, self._most_rows = reader, most_rows
        self._numbers: dict[str, int] = {}
        # Committed rows of each writer. Whether writers without news are asked less often: many of them, or an object store's.
        self._heads: dict[str, int] = {}
        self._spares = False
        # Writer -> row numbers that need no reading any more, ascending ranges that do not touch.
        self._done: dict[str, list[range]] = {}
        self._committed = self._expired = self._damaged = self._left_out = 0
        self._told: dict[str, str] = {}
        self._pending: dict[str, str] = {}
        self._lock = threading.Lock()
        parts = len(reader.shape.reward_parts)
        self._arrays = {name: np.zeros(0, dtype) for name, dtype in _DTYPES.items()}
        self._arrays["reward_parts"] = np.zeros((0, parts), np.float32)
        self._count = 0

    @property
    def columns(self) -> Columns:
        """The rows that are read so far."""
        with self._lock:
            return Columns(**{name: array[: self._count] for name, array in self._arrays.items()})

    def is_own(self, writer: str) -> bool:
        """Whether a writer's rows are of this run, and not of one that it mounts."""
        return self._reader.is_own(writer)

    @property
    def progress(self) -> tuple[int, int]:
        """Committed rows that are done with (read, or known to be unreadable), and all committed rows."""
        done = sum(len(each) for ranges in list(self._done.values()) for each in tuple(ranges))
        return min(done, self._committed), self._committed

    @property
    def problems(self) -> list[str]:
        """Sentences about what the table lacks, and why."""
        counts = (
            (self._expired, "rows were removed by retention"),
            (self._damaged, "rows are damaged and left out"),
            (self._left_out, f"older rows are left out: the table holds {self._most_rows}"),
        )
        sentences = [f"{count} {what}" for count, what in counts if count]
        told = [*self._pending.values(), *self._told.values(), *self._reader.problems.values()]
        more = [f"and {len(told) - _STRANGERS_TOLD} more"] if len(told) > _STRANGERS_TOLD else []
        return [*sentences, *told[:_STRANGERS_TOLD], *more]

    def advance(self, *, seconds: float = float("inf"), wait: bool = False) -> bool:
        """Reads rows that are committed and not read yet, the newest of every writer first.

        Args:
          seconds: after which no further block of rows is begun; one is read in any case.
          wait: for storage that lags, as LogReader.read does; else what is not there yet is left to a later call.

        Returns whether nothing is left to read now; what storage does not give yet (`problems`) counts as read.
        """
        try:
            self._heads |= self._reader.news(spare_quiet=True) if self._spares else self._reader.heads()
        except (*STORAGE_ERRORS, ValueError) as error:
            self._told["heads"] = f"no new rows are read: {error}"
            return True
        self._told.pop("heads", None)
        heads = self._heads
        self._spares = len(heads) > _MOST_ASKED or any(isinstance(self._reader.folder(each), places.Bucket) for each in heads)
        self._committed = sum(heads.values())
        self._pending = {}
        unread = {writer: ranges for writer in sorted(heads) if (ranges := self._unread(writer))}
        deadline = time.monotonic() + seconds
        while unread:
            for writer in tuple(unread):
                newest = unread[writer].pop()
                size = self._block_rows(writer)
                start = max(newest.start, (newest.stop - 1) // size * size)
                if start > newest.start:
                    unread[writer].append(range(newest.start, start))
                left_out = self._left_out
                self._take(writer, start, newest.stop, wait=wait)
                if self._left_out > left_out:  # what is older would be left out as well
                    return False
                if not unread[writer]:
                    del unread[writer]
                if unread and time.monotonic() > deadline:
                    return False
        return True

    def _unread(self, writer: str) -> list[range]:
        """Committed rows that are kept and not done with, ascending."""
        done = self._done.setdefault(writer, [])
        kept = self._reader.kept(writer)
        begin = 0
        for each in kept:
            self._expired += self._mark(writer, begin, each.start)
            begin = each.stop
        return [left for each in kept for left in _without(each, done)]

    def _block_rows(self, writer: str) -> int:
        """Rows of a writer that are read at once: whole appends."""
        size = self._reader.schema(writer).rows_per_append
        return max(1, _BLOCK_BYTES // (self._reader.shape.row_bytes * size)) * size

    def _take(self, writer: str, start: int, stop: int, *, wait: bool) -> None:
        """Reads rows [start, stop), and goes around those that cannot be read."""
        while start < stop:
            end = stop
            while start < end:
                try:
                    rows = self._reader.read(writer, start, end, wait=wait)
                    break
                except (RowsExpired, LogCorruption, RowsPending) as error:
                    stands, gone = max(start, error.start), error
                    self._note(writer, stands, min(stop, error.stop), error)
                    end = stands
                except (*STORAGE_ERRORS, ValueError) as error:
                    self._pending[writer] = f"rows {start} to {stop - 1} of writer {writer} are not read: {error}"
                    return
            if start < end:
                self._mark(writer, start, end)
                self._add(writer, rows)
            start = stop if end == stop else min(stop, max(gone.stop, end + 1))

    def _note(self, writer: str, start: int, stop: int, error: RowsExpired | LogCorruption | RowsPending) -> None:
        if isinstance(error, RowsPending):
            self._pending[writer] = str(error)
            return
        count = self._mark(writer, start, stop)
        if isinstance(error, RowsExpired):
            self._expired += count
        else:
            self._damaged += count
            self._told.setdefault(f"{writer}:{start}", str(error))

    def _mark(self, writer: str, start: int, stop: int) -> int:
        """Notes that rows [start, stop) are done with. Returns how many were not before."""
        new = [each for each in _without(range(start, stop), self._done[writer]) if each]
        if new:
            joined: list[range] = []
            for each in sorted([*self._done[writer], *new], key=lambda each: each.start):
                if joined and joined[-1].stop == each.start:
                    joined[-1] = range(joined[-1].start, each.stop)
                else:
                    joined.append(each)
            self._done[writer] = joined
        return sum(map(len, new))

    def _add(self, writer: str, rows: Rows) -> None:
        if writer not in self._numbers:
            self._numbers[writer] = len(self.writers)
            self.writers.append(writer)
        new = _values(rows, self._numbers[writer])
        count = len(rows["row"])
        with self._lock:
            total = self._count + count
            if total > len(self._arrays["row"]):
                self._arrays = {name: _grown(array, self._count, total) for name, array in self._arrays.items()}
            for name, array in self._arrays.items():
                array[self._count : total] = new[name]
            self._count = total
            if total > self._most_rows:
                self._forget_old()

    def _forget_old(self) -> None:
        """Keeps the newer half, and reads nothing older of any writer. Who holds `columns` still has them all."""
        keep = min(self._count, self._most_rows // 2)
        newest = np.sort(np.argsort(self._arrays["newest_step"][: self._count], kind="stable")[self._count - keep :])
        self._left_out += self._count - keep
        self._left_out += sum(self._mark(writer, 0, done[-1].stop) for writer, done in tuple(self._done.items()) if done)
        self._arrays = {name: array[newest] for name, array in self._arrays.items()}
        self._count = keep


def with_steps_of_run(columns: Columns, own: Sequence[bool]) -> Columns:
    """The columns with -1 as the steps of mounted rows, whose steps are those of another run.

    Args: own: for each writer of the table, whether its rows are of this run.
    """
    mine = np.asarray(own, bool)[columns.writer]
    steps = {name: np.where(mine, getattr(columns, name), -1).astype(np.int32) for name in ("newest_step", "oldest_step")}
    return dataclasses.replace(columns, **steps)


def prompt_rows(columns: Columns) -> dict[int, int]:
    """query_id -> index of its newest row, from which the prompt can be read as long as retention keeps any row of the query."""
    order = np.lexsort((columns.newest_step, columns.query_id))
    ids = columns.query_id[order]
    last = np.flatnonzero(np.append(ids[1:] != ids[:-1], True)) if len(ids) else np.zeros(0, np.int64)
    return dict(zip(ids[last].tolist(), order[last].tolist(), strict=True))


def read_some(reader: LogReader, ids: Sequence[tuple[str, int]]) -> tuple[Rows, list[int], dict[tuple[str, int], str]]:
    """The rows named by (writer, row) with all their columns, as far as they can be read.

    Returns:
      rows; for each of them its place in `ids`; and (writer, row) -> why it is not among them.
    """
    left, lost = list(range(len(ids))), dict[tuple[str, int], str]()
    while True:
        try:
            return reader.read_ids([ids[i] for i in left]), left, lost
        except (RowsExpired, LogCorruption, RowsPending) as error:
            gone = {i for i in left if ids[i][0] == error.writer and error.start <= ids[i][1] < error.stop}
            why = str(error)
        except (*STORAGE_ERRORS, ValueError) as error:
            gone, why = _unknown(reader, ids, left), str(error)
        gone = gone or set(left)
        lost |= {ids[i]: why for i in gone}
        left = [i for i in left if i not in gone]


def _unknown(reader: LogReader, ids: Sequence[tuple[str, int]], left: Sequence[int]) -> set[int]:
    """Returns the ids among `ids` that name no committed row."""
    try:
        heads = reader.heads()
    except (*STORAGE_ERRORS, ValueError):
        return set()
    return {i for i in left if not 0 <= ids[i][1] < heads.get(ids[i][0], 0)}


def _values(rows: Rows, number: int) -> Mapping[str, np.ndarray | int]:
    """Name -> values of the table's columns. Args: number: of the writer."""
    steps = rows["policy_step"]
    known = np.where(steps >= 0, steps, np.iinfo(np.int32).max)
    newest = steps.max(axis=1, initial=-1)
    oldest = np.where(newest >= 0, known.min(axis=1, initial=np.iinfo(np.int32).max), -1)
    sums = {f"{name}_sum": rows[f"{name}s"].sum(axis=1, dtype=np.float64) for name in ("policy_logprob", "ref_logprob")}
    same = ("row", "query_id", "reward", "reward_parts", "response_length", "finished")
    return {"writer": number, "newest_step": newest, "oldest_step": oldest, **sums, **{name: rows[name] for name in same}}


def _grown(array: np.ndarray, count: int, wanted: int) -> np.ndarray:
    """A copy of the first `count` entries with room for `wanted` and a half more."""
    grown = np.zeros((wanted + wanted // 2, *array.shape[1:]), array.dtype)
    grown[:count] = array[:count]
    return grown


def _without(whole: range, holes: Sequence[range]) -> list[range]:
    """What ascending ranges leave of a range, ascending."""
    left, begin = [], whole.start
    for hole in holes:
        if hole.stop > begin and hole.start < whole.stop:
            left.append(range(begin, hole.start))
            begin = hole.stop
    left.append(range(begin, whole.stop))
    return [each for each in left if each]
