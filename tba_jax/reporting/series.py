"""A role's metrics for charts: one pass over metrics.jsonl, in memory that the length of a run does not change.

`read` feeds blocks of lines to consumers: `Series` keeps mean, least and greatest of every figure in buckets along an axis, and
`AgeMap` the histograms of staleness. Both fold two buckets into one whenever the run outgrows them.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeGuard

import numpy as np

from tba_jax.run import json_lines

BUCKETS = 512
MOST_NAMES = 400
MOST_AGES = 64
_LINES_PER_BLOCK = 2048
_LARGEST = 1e300  # of a figure; JSON may hold whole numbers that no float does
_MOST_MOMENTS = 1e11  # unix seconds, or steps

Line = Mapping[str, Any]


class Consumer(Protocol):
    def add(self, lines: Sequence[Line]) -> None: ...


@dataclasses.dataclass
class Read:
    """What a pass over a role's metrics.jsonl found. first, last: whole lines, {} where there is none."""

    count: int = 0
    damaged: int = 0
    first: Line = dataclasses.field(default_factory=dict)
    last: Line = dataclasses.field(default_factory=dict)


def read(folder: Path, consumers: Sequence[Consumer]) -> Read:
    """Feeds all whole lines of a role to the consumers, oldest first. Raises OSError where the storage refuses."""
    found = Read()
    for block in _blocks(folder, found):
        found.count += len(block)
        found.first = found.first or block[0]
        found.last = block[-1]
        for consumer in consumers:
            consumer.add(block)
    return found


def _blocks(folder: Path, found: Read) -> Iterator[list[Line]]:
    block: list[Line] = []
    try:
        with open(folder / "metrics.jsonl", encoding="utf-8", errors="replace") as file:
            for text in file:
                line = _parsed(text)
                if line:
                    block.append(line)
                elif text.endswith("\n") and text.strip():  # the last line of a live run may be half written
                    found.damaged += 1
                if len(block) == _LINES_PER_BLOCK:
                    yield block
                    block = []
    except FileNotFoundError:
        return
    if block:
        yield block


def _parsed(text: str) -> Line:
    """The line, {} where it is none of metrics."""
    line = json_lines.parse_line(text)
    return line if is_moment(line.get("time")) and is_moment(line.get("step")) else {}


def is_number(value: Any) -> TypeGuard[float]:
    """Whether a value of JSON is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _LARGEST


def is_moment(value: Any) -> TypeGuard[float]:
    """Whether a value of JSON is a time or a step that can be: damage may leave any number."""
    return is_number(value) and abs(value) < _MOST_MOMENTS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Column:
    """A figure by bucket, float64[n] each: NaN where no line of the bucket has it."""

    mean: np.ndarray
    least: np.ndarray
    greatest: np.ndarray


class Series:
    """All numbers of a role's lines, in at most BUCKETS buckets along `axis`, a name in the lines such as step or time."""

    def __init__(self, axis: str, *, width: float = 1.0):
        """Args: width: of a bucket at first."""
        self.axis, self._width = axis, width
        self._begin: float | None = None
        # Name -> count, sum, least and greatest by bucket, float64[BUCKETS] each.
        self._names: dict[str, tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]] = {}
        self._used = np.zeros(BUCKETS, bool)

    @property
    def names(self) -> list[str]:
        return [*self._names]

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def column(self, name: str) -> Column:
        """A figure, with one entry for each bucket that any line is in; all NaN where no line has it."""
        if name not in self._names:
            nothing = np.full(int(self._used.sum()), np.nan)
            return Column(mean=nothing, least=nothing, greatest=nothing)
        count, total, least, greatest = (array[self._used] for array in self._names[name])
        there = count > 0
        mean = np.divide(total, count, out=np.full(len(count), np.nan), where=there)
        return Column(mean=mean, least=np.where(there, least, np.nan), greatest=np.where(there, greatest, np.nan))

    def add(self, lines: Sequence[Line]) -> None:
        at: dict[str, list[int]] = {}
        values: dict[str, list[float]] = {}
        for i, line in enumerate(lines):
            for name, value in line.items():
                if (type(value) is float or type(value) is int) and -_LARGEST < value < _LARGEST:
                    at.setdefault(name, []).append(i)
                    values.setdefault(name, []).append(value)
        if self.axis not in at:
            return
        x = np.full(len(lines), np.nan)
        x[at[self.axis]] = values[self.axis]
        there = np.isfinite(x)
        if not there.any():
            return
        bucket = self._buckets(x, there)
        self._used[bucket[there]] = True
        for name, where in at.items():
            self._put(name, bucket[where], np.asarray(values[name], np.float64), there[where])

    def _buckets(self, x: np.ndarray, there: np.ndarray) -> np.ndarray:
        """int[n]: the bucket of each value, of buckets that are wide enough for all of them."""
        if self._begin is None:
            self._begin = float(x[there].min())
        while (float(x[there].max()) - self._begin) // self._width >= BUCKETS:
            self._fold()
        # Before the beginning: a clock that was set back.
        return np.clip(np.nan_to_num((x - self._begin) // self._width), 0, BUCKETS - 1).astype(np.int64)

    def _fold(self) -> None:
        self._width *= 2
        self._used = _folded(self._used, np.logical_or, False)
        for name, (count, total, least, greatest) in self._names.items():
            self._names[name] = (
                _folded(count, np.add, 0.0),
                _folded(total, np.add, 0.0),
                _folded(least, np.minimum, np.inf),
                _folded(greatest, np.maximum, -np.inf),
            )

    def _put(self, name: str, bucket: np.ndarray, values: np.ndarray, there: np.ndarray) -> None:
        if name not in self._names:
            if len(self._names) == MOST_NAMES:
                return
            self._names[name] = (np.zeros(BUCKETS), np.zeros(BUCKETS), np.full(BUCKETS, np.inf), np.full(BUCKETS, -np.inf))
        keep = there & np.isfinite(values)
        count, total, least, greatest = self._names[name]
        np.add.at(count, bucket[keep], 1.0)
        np.add.at(total, bucket[keep], values[keep])
        np.minimum.at(least, bucket[keep], values[keep])
        np.maximum.at(greatest, bucket[keep], values[keep])


class AgeMap:
    """How many trained rows had which staleness at which step, from the histograms of the lines."""

    def __init__(self, name: str = "staleness_histogram"):
        self._name = name
        self._steps, self._ages = 1, 1  # per bucket
        self._counts = np.zeros((BUCKETS // 2, MOST_AGES))

    def add(self, lines: Sequence[Line]) -> None:
        for line in lines:
            histogram = line.get(self._name)
            if not isinstance(histogram, dict) or line["step"] < 0:
                continue
            counts, edges = histogram.get("counts"), histogram.get("edges")
            if not (isinstance(counts, list) and isinstance(edges, list) and len(edges) == len(counts) + 1):
                continue
            for count, low, high in zip(counts, edges, edges[1:], strict=False):
                if is_number(count) and is_number(low) and is_number(high) and count > 0:
                    self._put(int(line["step"]), count, low, high)

    def _put(self, step: int, count: float, low: float, high: float) -> None:
        """Divides `count` among the whole ages within [low, high]."""
        first, last = max(0, math.ceil(low)), max(0, math.floor(high))
        while step // self._steps >= len(self._counts):
            self._counts, self._steps = _folded(self._counts, np.add, 0.0), 2 * self._steps
        while last // self._ages >= MOST_AGES:
            self._counts, self._ages = _folded(self._counts.T, np.add, 0.0).T.copy(), 2 * self._ages
        begin, end = min(first, last) // self._ages, last // self._ages + 1
        self._counts[step // self._steps, begin:end] += count / (end - begin)

    def shares(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Steps int[n], ages int[m] (where their buckets begin), and of the rows of these steps the share of each age,
        float64[m, n]."""
        total = self._counts.sum(axis=1)
        told = np.flatnonzero(total)
        last = int(np.flatnonzero(self._counts.sum(axis=0)).max(initial=0)) + 1
        shares = (self._counts[told, :last] / np.maximum(total[told, None], 1e-9)).T
        return told * self._steps, np.arange(last) * self._ages, shares


def _folded(array: np.ndarray, join: np.ufunc, empty: Any) -> np.ndarray:
    """The array with two neighbours of its first axis joined to one, and as many empty places behind them."""
    joined = join(array[0::2], array[1::2])
    return np.concatenate([joined, np.full_like(array[: len(array) - len(joined)], empty)])
