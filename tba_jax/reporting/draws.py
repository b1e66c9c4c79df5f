"""Which steps drew which rows: the journal as two arrays, read once and kept up to date.

A draw costs 12 bytes: 100,000 steps of 64 rows are 77 MB. Unlike a trainer, which must not go on with a journal that is damaged,
the reader leaves out lines that are damaged, and names them.
"""

import dataclasses
import json
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from tba_jax.replay import journal

# Draws that are kept; of more, those of the newer half of the steps stay.
MOST_DRAWS = 64_000_000
# A draw is an int64: the number of its writer, then 40 bits of the row.
_ROW_BITS = 40
_UNSORTED = 500_000  # draws that a look-up may go through one by one
_MOST_MISSING = 1_000_000  # steps that the journal may lack in one place
_TOLD = 20  # sentences about lines, at most


@dataclasses.dataclass
class _File:
    """One file of the journal.

    at, lines: bytes and lines that are read. first: its first step, 0 before there is one. ahead: a step of the file minus the
    number of its line, which is the same for all. odd: what is wrong with a line, as long as it is the last so far.
    """

    path: Path
    at: int = 0
    lines: int = 0
    first: int = 0
    ahead: int = 0
    odd: str = ""


class Draws:
    """The draws of a run. One thread advances them; any thread may look up.

    Attributes:
      writers: names, in the order in which they were first drawn from; names are only added.
      first_step: the first step whose draws are kept. last_step: the last journalled step, 0 where there is none.
      problems: sentences about what could not be read.
    """

    def __init__(self, folder: Path, *, most_draws: int = MOST_DRAWS):
        """Args: folder: `RunDir.journal`, which need not be there."""
        self.writers: list[str] = []
        self.first_step, self.last_step = 1, 0
        self.problems: list[str] = []
        self._folder, self._most_draws = folder, most_draws
        self._numbers: dict[str, int] = {}
        self._files: dict[int, _File] = {}
        self._lock = threading.RLock()
        # Draws in the order of the steps; _begins[i]: of step first_step + i; one more entry ends the last step.
        self._keys, self._begins = np.zeros(0, np.int64), np.zeros(1, np.int64)
        # The first of the draws, in the order of their keys.
        self._sorted = np.zeros(0, np.int32)

    def __len__(self) -> int:
        return int(self._begins[self._steps])

    @property
    def _steps(self) -> int:
        return self.last_step - self.first_step + 1

    def advance(self, *, seconds: float = float("inf")) -> bool:
        """Reads the lines that are new, for so many seconds at most. Returns whether all lines are read."""
        deadline = time.monotonic() + seconds
        try:
            files = journal.epoch_files(self._folder)
        except OSError as error:
            self._tell(f"the journal cannot be read: {error}")
            return True
        for epoch, path in files.items():
            file = self._files.setdefault(epoch, _File(path))
            try:
                if not self._read(file, epoch, deadline):
                    self._sort(at=max(_UNSORTED, len(self._sorted)))
                    return False
            except OSError as error:
                self._tell(f"{path} cannot be read further: {error}")
        self._sort(at=min(_UNSORTED, len(self) // 4))
        return True

    def rows_of(self, step: int) -> list[tuple[str, int]]:
        """(writer, row) of a step's batch, in order; [] where the journal has no such step."""
        with self._lock:
            if not self.first_step <= step <= self.last_step:
                return []
            begin, end = self._begins[step - self.first_step : step - self.first_step + 2]
            keys = self._keys[begin:end]
            return [(self.writers[key >> _ROW_BITS], key & (1 << _ROW_BITS) - 1) for key in keys.tolist()]

    def steps_of(self, writer: str, row: int) -> list[int]:
        """The steps that drew a row, ascending; a step that drew it twice stands there twice."""
        with self._lock:
            if writer not in self._numbers:
                return []
            key = np.int64(self._numbers[writer] << _ROW_BITS | row)
            begin, end = self._span(np.array([key]))
            new = len(self._sorted) + np.flatnonzero(self._keys[len(self._sorted) : len(self)] == key)
            draws = np.sort(np.concatenate([self._sorted[begin[0] : end[0]], new]))
            return (np.searchsorted(self._begins[: self._steps + 1], draws, side="right") - 1 + self.first_step).tolist()

    def counts(self, writers: Sequence[str], numbers: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """int64[n]: how often each of these rows was drawn. Args: numbers: int[n], indices into `writers`; rows: int64[n]."""
        with self._lock:
            mine = np.array([self._numbers.get(writer, -1) for writer in writers], np.int64)
            keys = (
                np.where(mine[numbers] >= 0, mine[numbers] << _ROW_BITS | rows, -1) if len(writers) else -np.ones(len(rows), int)
            )
            wanted, of_key = np.unique(keys, return_inverse=True)
            begin, end = self._span(wanted)
            new = self._keys[len(self._sorted) : len(self)]
            if len(new) and len(wanted):
                places = np.minimum(np.searchsorted(wanted, new), len(wanted) - 1)
                added = np.bincount(places[wanted[places] == new], minlength=len(wanted))
            else:
                added = np.zeros(len(wanted), np.int64)
            return (end - begin + added)[of_key]

    def per_step(self) -> np.ndarray:
        """int64[steps]: rows that each step from first_step on drew."""
        with self._lock:
            return np.diff(self._begins[: self._steps + 1])

    def all_draws(self) -> tuple[np.ndarray, np.ndarray]:
        """int32[n], int64[n]: writer (index into `writers`) and row of every draw, in the order of the steps (`per_step`)."""
        with self._lock:
            keys = self._keys[: len(self)]
        return (keys >> _ROW_BITS).astype(np.int32), keys & (1 << _ROW_BITS) - 1

    def _read(self, file: _File, epoch: int, deadline: float) -> bool:
        """Takes the whole lines that a file has beyond what was read. Returns whether there is none left."""
        until = min((other.first for number, other in self._files.items() if number > epoch and other.first), default=sys.maxsize)
        with open(file.path, "rb") as opened:
            size = opened.seek(0, 2)
            if size < file.at:
                self._tell(f"{file.path} has become shorter: steps that it held are shown as they were")
                file.at = size
            opened.seek(file.at)
            while (content := opened.readline()).endswith(b"\n"):
                file.lines += 1
                try:
                    step, writers, rows = _parsed(content, epoch)
                    self._check(step, file)
                except (ValueError, KeyError, TypeError, IndexError, OverflowError, RecursionError) as error:
                    # A device may persist the newline of the last line before the line itself: no update followed it.
                    file.odd = file.odd or f"{file.path} line {file.lines} is not a journal line, its draws are left out: {error}"
                else:
                    if file.odd:
                        self._tell(file.odd)
                        file.odd = ""
                    if step < until:
                        self._add(step, writers, rows)
                file.at += len(content)
                if file.lines % 256 == 0 and time.monotonic() > deadline:
                    return False
        return True

    def _check(self, step: int, file: _File) -> None:
        """Raises ValueError where a step cannot stand in this line."""
        if file.first and step - file.lines != file.ahead:
            raise ValueError(f"it says step {step}, expected {file.lines + file.ahead}")
        if not file.first:
            if self.last_step and step > self.last_step + _MOST_MISSING:
                raise ValueError(f"it says step {step}, and the last step before is {self.last_step}")
            file.first, file.ahead = step, step - file.lines

    def _add(self, step: int, writers: Sequence[str], rows: np.ndarray) -> None:
        """Takes up a step. Args: rows: int64[n, 2], index into `writers` and row."""
        for writer in writers:
            if writer not in self._numbers:
                self._numbers[writer] = len(self.writers)
                self.writers.append(writer)
        numbers = np.array([self._numbers[writer] for writer in writers], np.int64)
        keys = numbers[rows[:, 0]] << _ROW_BITS | rows[:, 1] if len(rows) else np.zeros(0, np.int64)
        with self._lock:
            if step <= self.last_step:  # a later epoch went on from an earlier step: what follows it was abandoned
                self._cut(max(step, self.first_step))
            elif step > self.last_step + 1 and self.last_step:
                self._tell(f"the journal in {self._folder} lacks steps {self.last_step + 1} to {step - 1}")
            if not self.last_step:
                self.first_step, self.last_step = step, step - 1
            if step < self.first_step:
                return
            if len(self) + len(keys) > self._most_draws:
                self._forget_old()
            begin, steps = len(self), step - self.first_step + 1
            self._keys, self._begins = _grown(self._keys, begin + len(keys)), _grown(self._begins, steps + 1)
            self._keys[begin : begin + len(keys)] = keys
            self._begins[self._steps + 1 : steps] = begin
            self._begins[steps] = begin + len(keys)
            self.last_step = step

    def _cut(self, step: int) -> None:
        """Forgets this step and all after it."""
        count = int(self._begins[step - self.first_step])
        self._sorted = self._sorted[self._sorted < count]
        self.last_step = step - 1

    def _forget_old(self) -> None:
        half = self._steps // 2
        cut = int(self._begins[half])
        self._keys = self._keys[cut : len(self)].copy()
        self._begins = self._begins[half : self._steps + 1] - cut
        self._sorted = self._sorted[self._sorted >= cut] - np.int32(cut)
        self.first_step += half
        self._tell(f"draws of steps before {self.first_step} are left out: {self._most_draws} draws are kept")

    def _sort(self, *, at: int) -> None:
        """Sorts the draws once more than `at` are not; look-ups go on meanwhile."""
        if len(self) - len(self._sorted) > at:
            order = np.argsort(self._keys[: len(self)], kind="stable").astype(np.int32)
            with self._lock:
                self._sorted = order

    def _span(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """int64[n] each: where in `_sorted` the draws with these keys begin and end (np.searchsorted would copy its sorter)."""
        begin, end = np.zeros(len(keys), np.int64), np.full(len(keys), len(self._sorted))
        return self._first(begin, end, lambda draws: self._keys[draws] >= keys), self._first(
            begin, end, lambda draws: self._keys[draws] > keys
        )

    def _first(self, low: np.ndarray, high: np.ndarray, is_beyond: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        """int64[n]: the first places from `low` to `high` in `_sorted` whose draws are beyond."""
        for _ in range(len(self._sorted).bit_length()):
            middle = (low + high) // 2
            beyond = is_beyond(self._sorted[np.minimum(middle, len(self._sorted) - 1)]) | (middle == high)
            low, high = np.where(beyond, low, middle + 1), np.where(beyond, middle, high)
        return low

    def _tell(self, sentence: str) -> None:
        if sentence not in self.problems:
            self.problems = [*self.problems[-_TOLD + 1 :], sentence]


def _parsed(content: bytes, epoch: int) -> tuple[int, list[str], np.ndarray]:
    """Step, writers and rows (int64[n, 2]) of a journal line. Raises what `_read` names where it is none."""
    line = json.loads(content)
    step, writers, rows = line["step"], line["writers"], np.array(line["rows"], np.int64).reshape(-1, 2)
    if line["epoch"] != epoch or not isinstance(step, int) or step < 1:
        raise ValueError(f"it says step {step} of epoch {line['epoch']}")
    if not (isinstance(writers, list) and all(isinstance(writer, str) for writer in writers)):
        raise ValueError("its writers are no names")
    if len(rows) and not ((rows >= 0) & (rows < [len(writers), 1 << _ROW_BITS])).all():
        raise ValueError("its rows name writers that it does not have")
    return step, writers, rows


def _grown(array: np.ndarray, wanted: int) -> np.ndarray:
    """The array, or a copy with room for `wanted` entries and a quarter more."""
    if wanted <= len(array):
        return array
    grown = np.zeros(wanted + wanted // 4, array.dtype)
    grown[: len(array)] = array
    return grown
