"""Follows a role's metrics.jsonl while it grows: curves, the newest line, and where the line of a step is."""

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from tba_jax.reporting.series import Series, is_number
from tba_jax.run.json_lines import parse_line

_LINES_AT_ONCE = 512
MOST_LINES = 4_000_000  # whose places are kept, 16 bytes each


class MetricLines:
    """One thread advances it; any thread may look up.

    Attributes:
      last: the newest whole line, {} before there is one. damaged: lines that are none.
    """

    def __init__(self, folder: Path, *, axis: str = "step"):
        """Args: folder: of the role's metrics, which need not be there. axis: of the curves."""
        self.last: dict[str, Any] = {}
        self.damaged = 0
        self._path, self._at = folder / "metrics.jsonl", 0
        self._series = Series(axis)
        self._steps, self._places, self._count = np.zeros(0, np.int64), np.zeros(0, np.int64), 0
        self._lock = threading.Lock()

    def advance(self, *, seconds: float = float("inf")) -> bool:
        """Reads the lines that are new, for about so many seconds. Returns whether all are read. Raises OSError."""
        deadline = time.monotonic() + seconds
        try:
            with open(self._path, "rb") as file:
                if file.seek(0, 2) < self._at:
                    self._at = 0  # another file is in its place
                file.seek(self._at)
                while lines := self._whole_lines(file):
                    self._take(lines)
                    if time.monotonic() > deadline:
                        return False
        except FileNotFoundError:
            pass
        return True

    def curve(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """x and mean of a figure, float64[n] each, without what is not finite; both empty where no line has it."""
        with self._lock:
            if name not in self._series:
                return np.zeros(0), np.zeros(0)
            x, y = self._series.column(self._series.axis).mean, self._series.column(name).mean
        there = np.isfinite(x) & np.isfinite(y)
        return x[there], y[there]

    def names(self) -> list[str]:
        """The figures of any line."""
        with self._lock:
            return self._series.names

    def of_step(self, step: int) -> dict[str, Any]:
        """The newest line of the first step from `step` on that has one, {} where there is none or it cannot be read."""
        with self._lock:
            steps, places = self._steps[: self._count], self._places[: self._count]
            later = np.flatnonzero(steps >= step)
            if not len(later):
                return {}
            nearest = steps[later].min()
            place = int(places[later[steps[later] == nearest][-1]])
        try:
            with open(self._path, "rb") as file:
                file.seek(place)
                return parse_line(file.readline().decode("utf-8", errors="replace"))
        except OSError:
            return {}

    def _whole_lines(self, file: Any) -> list[tuple[int, bytes]]:
        """(place, content) of the next lines that have an end."""
        found: list[tuple[int, bytes]] = []
        while len(found) < _LINES_AT_ONCE and (content := file.readline()).endswith(b"\n"):
            found.append((self._at, content))
            self._at += len(content)
        return found

    def _take(self, lines: list[tuple[int, bytes]]) -> None:
        parsed = [(place, parse_line(content.decode("utf-8", errors="replace"))) for place, content in lines]
        good = [(place, line) for place, line in parsed if is_number(line.get("step")) and is_number(line.get("time"))]
        self.damaged += len(lines) - len(good) - sum(not content.strip() for _, content in lines)
        if not good:
            return
        self.last = good[-1][1]
        with self._lock:
            self._series.add([line for _, line in good])
            total = min(MOST_LINES, self._count + len(good))
            if total > len(self._steps):
                self._steps, self._places = (np.resize(each, total + total // 2) for each in (self._steps, self._places))
            kept = good[: total - self._count]
            self._steps[self._count : total] = [min(int(line["step"]), 2**62) for _, line in kept]
            self._places[self._count : total] = [place for place, _ in kept]
            self._count = total
