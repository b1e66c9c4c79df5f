"""Metrics of one role: a file of JSON lines, which is the durable record, and trackers that show the same points."""

import functools
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tba_jax.storage import layout, places, privacy
from tba_jax.telemetry import trackers
from tba_jax.telemetry.alarms import Alarms
from tba_jax.telemetry.status import Status
from tba_jax.telemetry.trackers import Point, Tracker

FILE = "metrics.jsonl"


class MetricWriter:
    """Writes scalars and histograms of one role to `folder`/metrics.jsonl, and shows them to trackers.

    A line is {"step": int, "time": unix seconds, name: float, ...}. A file of half the megabytes becomes `metrics.jsonl.1`.
    """

    def __init__(
        self, folder: Path, *, megabytes: float, status: Status | None = None, shown: Sequence[Tracker] = (), tables: bool = True
    ):
        """Args: megabytes: of both files. status: is told the newest figures. shown: trackers; tables: they may see rows."""
        places.make_folder(folder, below=2)
        self._path, self._half = folder / FILE, int(megabytes * 2**19)
        self._status, self._trackers, self._tables = status or Status(None), shown, tables
        self._open()

    def _open(self) -> None:
        torn = layout.is_torn(self._path)
        self._lines = open(self._path, "a", buffering=1)  # noqa: SIM115 (closed by close)
        if torn:  # a kill cut the last line short: the next one begins on a line of its own
            self._lines.write("\n")
        self._size = self._path.stat().st_size

    def write(self, step: int, scalars: Mapping[str, Any], histograms: Mapping[str, np.ndarray] | None = None) -> None:
        """Records a point. Scalars are numbers, or strings (JSON lines only); what is not finite is left out. Raises OSError."""
        values = {name: value if isinstance(value, str) else float(value) for name, value in scalars.items()}
        values = {name: value for name, value in values.items() if isinstance(value, str) or math.isfinite(value)}
        counted = {name: trackers.histogram(array) for name, array in (histograms or {}).items()}
        told = {f"{name}_histogram": dict(counts=n.tolist(), edges=edges.tolist()) for name, (n, edges) in counted.items()}
        now = time.time()
        text = json.dumps({"step": int(step), "time": now, **values, **told}) + "\n"
        if self._size and self._size + len(text) > self._half:
            self._lines.close()
            self._path.replace(self._path.with_name(f"{FILE}.1"))
            self._open()
        self._lines.write(text)
        self._size += len(text)
        numbers = {name: value for name, value in values.items() if not isinstance(value, str)}
        self._status.point(numbers)
        for tracker in self._trackers:
            tracker.write(Point(step=int(step), time=now, values=numbers, histograms=histograms or {}))

    @property
    def shows_tables(self) -> bool:
        """Whether anybody takes what `table` is given."""
        return self._tables and any(tracker.name != "tensorboard" for tracker in self._trackers)

    def table(self, name: str, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Shows rows of equal fields in trackers; they are in no file of metrics."""
        if rows and self.shows_tables:
            for tracker in self._trackers:
                tracker.write(Point(step=int(step), time=time.time(), tables={name: rows}))

    def close(self) -> None:
        self._lines.close()
        for tracker in self._trackers:
            tracker.end()


def open_writer(config: Any, run: layout.RunDir, name: str, *, role: str, status: Status | None = None) -> MetricWriter:
    """The writer of a role, with the trackers of metrics.sinks that are installed. A private run shows them no rows.

    Args: name: of the folder of the role's metrics; role: a key of trackers.GROUPS.
    """
    c, told = config.metrics, Alarms(run.metrics(name))
    session = functools.partial(trackers.session_of, config, run, name, kind=role)
    shown = [Tracker(sink, session, told) for sink in dict.fromkeys(c.sinks) if not trackers.missing(sink)]
    tables = not privacy.is_private(run)
    return MetricWriter(run.metrics(name), megabytes=c.megabytes, status=status, shown=shown, tables=tables)


def each_line(folder: Path) -> Iterator[dict[str, Any]]:
    """All whole lines that are kept of a role's metrics, oldest first."""
    for name in (f"{FILE}.1", FILE):
        yield from layout.each(folder / name)


def read_lines(folder: Path) -> list[dict[str, Any]]:
    """The lines of `each_line`; of a long run they take much memory."""
    return [*each_line(folder)]
