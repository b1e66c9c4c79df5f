"""Where the time of each role went: shares over the whole run, and the exact spans of what was recorded last.

The lines of metrics.jsonl hold shares of the wall time since the role's account began (`time_update`, `time_wait_rows` …). The
difference of two lines gives the seconds between them. The account begins anew with each start of a process; when, follows from
events.jsonl where there is one, and else from shares that cannot go on from those before.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tba_jax.reporting.series import Line, is_moment, is_number
from tba_jax.run import json_lines

FILE = "timeline.jsonl"
BUCKETS = 160
MOST_SPANS = 4000
MOST_SECONDS = 300.0
_TAIL_BYTES = 4_000_000
_PREFIX = "time_"
STARTING, DOWN = "start", "not running"
# What a role waits for, in words; a name that is not here is work.
WAITS: Mapping[str, str] = {
    "wait_rows": "rows from searchers",
    "wait_policy": "a newer policy from the trainer",
    "wait_rewards": "rewards of the task",
    "wait_storage": "the storage",
}


class Shares:
    """Seconds of a role by name, in at most BUCKETS buckets of time."""

    def __init__(self, starts: Sequence[float] = ()):
        """Args: starts: unix seconds at which processes of the role started, as far as they are known."""
        self._starts = sorted(starts)
        self._begin, self._width = 0.0, 0.25
        self._seconds: dict[str, np.ndarray] = {}
        self._account = self._previous = 0.0  # when the account began, and the line before
        self._line, self._interval = 0.0, 1.0  # when the line before was written, and the seconds between the two before
        self._step = 0.0
        self._told: dict[str, float] = {}  # seconds since the account began

    def add(self, lines: Sequence[Line]) -> None:
        for line in lines:
            shares = {name[len(_PREFIX) :]: value for name, value in line.items() if name.startswith(_PREFIX)}
            if shares and all(map(is_number, shares.values())):
                self._add(float(line["time"]), shares, fell=line["step"] < self._step)
                self._step = line["step"]

    def _add(self, at: float, shares: Mapping[str, float], *, fell: bool) -> None:
        """Args: fell: the step of the line is below that of the line before: each searcher counts its batches from its start."""
        if at <= self._previous:  # a clock that was set back
            return
        gap, self._line = at - self._line, at
        if self._previous and not fell and at - self._previous < self._width / 4:
            self._interval = gap
            return  # shares add up: a later line tells of the time before this one, too
        seconds = {name: share * (at - self._account) for name, share in shares.items()}
        if not self._previous or fell or self._is_new(at, seconds):
            self._begin_account(at, shares)
            return
        self._spread(self._previous, at, {name: value - self._told.get(name, 0.0) for name, value in seconds.items()})
        self._told, self._previous, self._interval = seconds, at, gap

    def _is_new(self, at: float, seconds: Mapping[str, float]) -> bool:
        """Whether another process wrote the line at `at`: names never leave an account, and their seconds never fall.

        Where starts are known, they alone decide: when the first account began is a guess, and seconds fall where it was wrong.
        """
        if self._starts:
            return any(self._previous < start <= at for start in self._starts)
        return any(seconds.get(name, 0.0) < before - max(0.2, 0.05 * before) for name, before in self._told.items())

    def _begin_account(self, at: float, shares: Mapping[str, float]) -> None:
        """The first line of an account. It is taken to have begun as long before the line as lines of the role are apart."""
        started = max((start for start in self._starts if self._previous < start <= at), default=0.0)
        self._account = max(started or self._previous, at - self._interval)
        if self._previous:
            down = (started or self._account) - self._previous
            self._spread(self._previous, self._previous + down, {DOWN: down})
        if started:
            self._spread(started, self._account, {STARTING: self._account - started})
        self._told = {name: share * (at - self._account) for name, share in shares.items()}
        self._spread(self._account, at, self._told)
        self._previous = at

    def _spread(self, begin: float, end: float, seconds: Mapping[str, float]) -> None:
        """Divides seconds evenly over the time from begin to end."""
        if end <= begin:
            return
        if not self._seconds:
            self._begin = begin
        while (end - self._begin) / self._width > BUCKETS:
            self._width *= 2
            for name, array in self._seconds.items():
                self._seconds[name] = np.concatenate([array[0::2] + array[1::2], np.zeros(BUCKETS // 2)])
        first, last = (int(max(0.0, each - self._begin) // self._width) for each in (begin, end))
        edges = self._begin + self._width * np.arange(first, last + 2)
        overlap = np.clip(np.minimum(edges[1:], end) - np.maximum(edges[:-1], begin), 0.0, None)
        parts = overlap / max(overlap.sum(), 1e-9)
        for name, value in seconds.items():
            array = self._seconds.setdefault(name, np.zeros(BUCKETS))
            array[first : min(last + 1, BUCKETS)] += max(0.0, value) * parts[: BUCKETS - first]

    def totals(self) -> dict[str, float]:
        """Name -> seconds of the whole run, the most first."""
        return dict(sorted(((name, float(array.sum())) for name, array in self._seconds.items()), key=lambda each: -each[1]))

    def buckets(self) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Where buckets begin, unix seconds float64[n + 1], and name -> the share of each bucket, float64[n]."""
        if not self._seconds:
            return np.zeros(0), {}
        total = np.sum([*self._seconds.values()], axis=0)
        used = int(np.flatnonzero(total).max(initial=-1)) + 1
        edges = self._begin + self._width * np.arange(used + 1)
        return edges, {name: array[:used] / np.maximum(total[:used], 1e-9) for name, array in self._seconds.items()}


@dataclasses.dataclass(frozen=True, order=True)
class Span:
    """begin: unix seconds; lane: a thread of the role; seconds: how long."""

    begin: float
    role: str
    lane: str
    name: str
    seconds: float


def spans(folders: Mapping[str, Path], *, most: int = MOST_SPANS, seconds: float = MOST_SECONDS) -> list[Span]:
    """The spans recorded last, of all roles, in the order of time: of the last `seconds`, or of fewer where they are too many.

    Args: folders: role -> the folder of its metrics.
    """
    found = sorted(span for role, folder in folders.items() for span in _recorded(role, folder))
    if not found:
        return []
    end = max(span.begin + span.seconds for span in found)
    kept = [span for span in found if span.begin + span.seconds > end - seconds]
    return kept[-most:]


def _recorded(role: str, folder: Path) -> Iterator[Span]:
    for name in (f"{FILE}.1", FILE):
        for line in tail_lines(folder / name, _TAIL_BYTES):
            at, lane, recorded = line.get("at"), line.get("lane"), line.get("spans")
            if not (is_moment(at) and isinstance(lane, str) and isinstance(recorded, list)):
                continue
            for each in recorded:
                if isinstance(each, list) and len(each) == 3 and isinstance(each[0], str) and all(map(is_moment, each[1:])):
                    yield Span(float(at) + float(each[1]), role, lane, each[0], max(0.0, float(each[2])))


def tail_lines(path: Path, most_bytes: int) -> Iterator[dict[str, Any]]:
    """The whole lines in the last bytes of a file, none where there is no file; lines that are torn are left out."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - most_bytes))
            content = file.read(most_bytes)
    except FileNotFoundError:
        return
    for number, text in enumerate(content.split(b"\n")):
        if number == 0 and size > most_bytes:
            continue
        if line := json_lines.parse_line(text.decode(errors="replace")):
            yield line
