"""Metrics of one role: TensorBoard events and JSON lines, and the accounting of where its time goes."""

import contextlib
import json
import math
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tba_jax.run import json_lines, places
from tba_jax.run.cost import Cost
from tba_jax.run.event_files import EventFiles
from tba_jax.run.json_lines import parse_line as parse_line
from tba_jax.run.record import Record

FLUSH_SECONDS = 5.0


class MetricWriter:
    """Writes scalars and histograms of one role to `folder`: `metrics.jsonl` and TensorBoard events.

    A line is {"step": int, "time": unix seconds, name: float, ...}. An existing file is continued, and keeps every line.
    """

    def __init__(self, folder: Path, *, event_megabytes: float, cost: Cost | None = None):
        """Args: event_megabytes: of TensorBoard events that are kept, the newest. cost: counts the time that writing takes."""
        self._cost = cost or Cost()
        places.make_folder(folder, below=2)
        path = folder / "metrics.jsonl"
        torn = json_lines.is_torn(path)
        self._lines = open(path, "a", buffering=1)  # noqa: SIM115 (closed by close)
        if torn:  # a kill cut the last line short: the next one begins on a line of its own
            self._lines.write("\n")
        self._events = EventFiles(folder, megabytes=event_megabytes)
        self._flushed = 0.0

    def write(self, step: int, scalars: Mapping[str, Any], histograms: Mapping[str, np.ndarray] | None = None) -> None:
        """Records one point. Scalars may be Python or NumPy numbers, or strings (JSON lines only).

        Numbers that are not finite are left out: JSON has none.

        Raises:
          OSError: the storage refused.
        """
        with self._cost.measure():
            self._write(step, scalars, histograms or {})

    def _write(self, step: int, scalars: Mapping[str, Any], histograms: Mapping[str, np.ndarray]) -> None:
        from tensorboardX import summary

        values = {name: value if isinstance(value, str) else float(value) for name, value in scalars.items()}
        values = {name: value for name, value in values.items() if isinstance(value, str) or math.isfinite(value)}
        line: dict[str, Any] = {"step": int(step), "time": time.time(), **values}
        points = [summary.scalar(name, value) for name, value in values.items() if not isinstance(value, str)]
        for name, array in histograms.items():
            counts, edges = np.histogram(array, bins=min(20, max(1, int(np.ptp(array)) + 1)) if array.size else 1)
            line[f"{name}_histogram"] = {"counts": counts.tolist(), "edges": edges.tolist()}
            points.append(summary.histogram(name, array, bins=edges))
        self._lines.write(json.dumps(line) + "\n")
        self._events.write(points, step=int(step), time=line["time"])
        if time.monotonic() - self._flushed > FLUSH_SECONDS:
            self._flushed = time.monotonic()
            self._events.flush()

    def close(self) -> None:
        self._events.close()
        self._lines.close()


def read_lines(folder: Path) -> list[dict[str, Any]]:
    """All whole lines of a role's metrics.jsonl, oldest first; a line that a kill cut short is left out."""
    return [*each_line(folder)]


def each_line(folder: Path) -> Iterator[dict[str, Any]]:
    """The lines of `read_lines`, one at a time: of a long run they would take much memory."""
    return json_lines.each(folder / "metrics.jsonl")


class TimeAccount:
    """Splits a role's wall time into named shares: what it worked on, and what it waited for.

    Attributes: record: of the role. What is measured is on its timeline as well.
    """

    def __init__(self, record: Record | None = None) -> None:
        """Args: record: None: one that writes nothing."""
        self.record = record or Record()
        self._seconds: dict[str, float] = {}
        self._start, self._recorded = time.monotonic(), self.record.cost.seconds

    def restart(self) -> None:
        """Starts the account anew: the time before the first batch says nothing about the run's balance."""
        self._seconds.clear()
        self._start, self._recorded = time.monotonic(), self.record.cost.seconds

    @contextlib.contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Adds the time spent inside to `name`. Do not nest."""
        begin = time.monotonic()
        try:
            yield
        finally:
            end = time.monotonic()
            self._seconds[name] = self._seconds.get(name, 0.0) + end - begin
            self.record.timeline.note(name, begin, end)

    def total(self) -> float:
        """Seconds since the start, above 0."""
        return max(time.monotonic() - self._start, 1e-9)

    def shares(self) -> dict[str, float]:
        """name -> share of the wall time since the start, in [0, 1]; `time_other` is what no name covers.

        `time_recording`, the share that all threads together spent on metrics, status, timeline and events, is beside them: it
        is within the others, as far as it is this thread's.
        """
        total = self.total()
        shares = {f"time_{name}": seconds / total for name, seconds in self._seconds.items()}
        shares["time_other"] = max(0.0, 1.0 - sum(shares.values()))
        return shares | {"time_recording": (self.record.cost.seconds - self._recorded) / total}
