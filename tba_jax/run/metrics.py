"""Metrics of one role: TensorBoard events and JSON lines, and the accounting of where its time goes."""

import contextlib
import functools
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tba_jax.run import alarms, json_lines, layout, places, privacy, sinks
from tba_jax.run.cost import Cost
from tba_jax.run.event_files import EventFiles
from tba_jax.run.record import Record
from tba_jax.run.sinks.feed import CLOSE_SECONDS, Feed, missing
from tba_jax.run.sinks.roles import session_of

FLUSH_SECONDS = 5.0


class MetricWriter:
    """Writes scalars and histograms of one role to `folder`: `metrics.jsonl` and TensorBoard events.

    A line is {"step": int, "time": unix seconds, name: float, ...}. An existing file is continued, and keeps every line.
    """

    def __init__(
        self,
        folder: Path,
        *,
        event_megabytes: float,
        cost: Cost | None = None,
        feeds: Sequence[Feed] = (),
        tables: bool = True,
    ):
        """Args:
        event_megabytes: of TensorBoard events that are kept, the newest; 0: none are written.
        cost: counts the time that writing takes. feeds: of trackers; tables: whether they may see rows.
        """
        self._cost = cost or Cost()
        places.make_folder(folder, below=2)
        path = folder / "metrics.jsonl"
        torn = json_lines.is_torn(path)
        self._lines = open(path, "a", buffering=1)  # noqa: SIM115 (closed by close)
        if torn:  # a kill cut the last line short: the next one begins on a line of its own
            self._lines.write("\n")
        self._events = EventFiles(folder, megabytes=event_megabytes) if event_megabytes else None
        self._feeds, self._tables = feeds, tables
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
        values = {name: value if isinstance(value, str) else float(value) for name, value in scalars.items()}
        values = {name: value for name, value in values.items() if isinstance(value, str) or math.isfinite(value)}
        line: dict[str, Any] = {"step": int(step), "time": time.time(), **values}
        counted = {name: _histogram(array) for name, array in histograms.items()}
        line |= {f"{name}_histogram": found for name, found in counted.items()}
        self._lines.write(json.dumps(line) + "\n")
        numbers = {name: value for name, value in values.items() if not isinstance(value, str)}
        if self._events is not None:
            self._write_events(numbers, histograms, counted, line)
        for feed in self._feeds:
            feed.offer({"step": line["step"], "time": line["time"], "values": numbers, "histograms": counted, "tables": {}})

    def _write_events(
        self,
        numbers: Mapping[str, float],
        histograms: Mapping[str, np.ndarray],
        counted: Mapping[str, Any],
        line: Mapping[str, Any],
    ) -> None:
        from tensorboardX import summary

        assert self._events is not None
        points = [summary.scalar(name, value) for name, value in numbers.items()]
        points += [summary.histogram(name, array, bins=np.array(counted[name]["edges"])) for name, array in histograms.items()]
        self._events.write(points, step=line["step"], time=line["time"])
        if time.monotonic() - self._flushed > FLUSH_SECONDS:
            self._flushed = time.monotonic()
            self._events.flush()

    @property
    def shows_tables(self) -> bool:
        """Whether anybody takes what `table` is given."""
        return self._tables and bool(self._feeds)

    def table(self, name: str, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Shows rows of equal fields in trackers; they are in no file of metrics."""
        columns = list(rows[0]) if rows else []
        shown = {name: {"columns": columns, "rows": [[row[column] for column in columns] for row in rows]}}
        for feed in self._feeds if rows and self._tables else ():
            with self._cost.measure():
                feed.offer({"step": int(step), "time": time.time(), "values": {}, "histograms": {}, "tables": shown})

    def close(self) -> None:
        if self._events is not None:
            self._events.close()
        self._lines.close()
        deadline = time.monotonic() + CLOSE_SECONDS
        for feed in self._feeds:
            feed.end()
        for feed in self._feeds:
            feed.wait(deadline - time.monotonic())


def open_writer(config: Any, run: layout.RunDir, name: str, *, role: str, cost: Cost | None = None) -> MetricWriter:
    """The writer of a role, with the sinks of metrics.sinks whose packages are there.

    Rows of a run whose files are private (run/privacy.py) are in no tracker.

    Args: config: of the run; name: of the folder of the role's metrics; role: a key of sinks.session.GROUPS; cost: see
      MetricWriter.
    """
    c = config.metrics
    told = functools.partial(session_of, config, run, name, kind=role)
    names = [sink for sink in dict.fromkeys(c.sinks) if sink in sinks.TRACKERS and not missing(sink)]
    feeds = [Feed(sink, told, functools.partial(_tell_once, run.metrics(name), sink)) for sink in names]
    return MetricWriter(
        run.metrics(name),
        event_megabytes=c.event_megabytes if "tensorboard" in c.sinks else 0.0,
        cost=cost,
        feeds=feeds,
        tables=not privacy.is_private(run),
    )


def _tell_once(folder: Path, kind: str, sentence: str, advice: str) -> None:
    """Tells an alarm of a tracker, unless a role of this run has told the same."""
    with contextlib.suppress(OSError):
        told = [alarm for role in folder.parent.iterdir() for alarm in alarms.read(role)]
        if any((alarm.kind, alarm.sentence) == (kind, sentence) for alarm in told):
            return
    alarms.Alarms(folder).tell(kind=kind, sentence=sentence, advice=advice, step=0)


def _histogram(array: np.ndarray) -> dict[str, list[float]]:
    """What is written of the numbers of an array: counts between edges, of whole numbers at least 1 apart."""
    most = int(np.ptp(array)) + 1 if array.size and array.dtype.kind in "iu" else 20
    counts, edges = np.histogram(array, bins=min(20, most) if array.size else 1)
    return {"counts": counts.tolist(), "edges": edges.tolist()}


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
            with self.record.profiler.annotate(name):
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
