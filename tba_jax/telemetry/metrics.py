"""Metrics of one role: a file of JSON lines, which is the durable record, and trackers that show the same points.

Each tracker has a thread, which hands it the points: a slow library or a full disk holds up no role.
"""

import dataclasses
import functools
import importlib.util
import json
import logging
import math
import os
import platform
import queue
import re
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tba_jax.storage import contract, layout, places
from tba_jax.telemetry.alarms import Alarms
from tba_jax.telemetry.status import Status

log = logging.getLogger(__name__)

FILE = "metrics.jsonl"
# Seconds for which a role that ends waits for each tracker, and for which wandb's own process goes on.
CLOSE_SECONDS, _FINISH_SECONDS = 4.0, 60.0
_MOST_WAITING = 1000  # points that wait for a tracker
# Kind of role -> the group of its metrics in wandb and trackio: train/loss, search/reward.
GROUPS = dict(trainer="train", searcher="search", evaluator="evaluate", reference="reference", supervised="supervised")
HIDDEN = "(not told)"
# Parts of names of settings whose texts are hidden.
_SECRET = re.compile(r"token|secret|password|credential|api_?key", re.IGNORECASE)
# User and password in an address, such as https://user:password@host.
_USER = re.compile(r"(?<=://)[^/@\s]+(?=@)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point:
    """time: unix seconds. histograms: name -> the numbers that are counted. tables: name -> rows, all of the same fields."""

    step: int
    time: float
    values: Mapping[str, float] = dataclasses.field(default_factory=dict)
    histograms: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    tables: Mapping[str, Sequence[Mapping[str, Any]]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Session:
    """One role of a run, as trackers see it: roles of a run are one group, and a role that starts again has the same id.

    kind: see GROUPS. folder: of the role's metrics. config: of the run, without secrets.
    """

    project: str
    group: str
    name: str
    id: str
    kind: str
    folder: str
    config: dict[str, Any]

    def shown(self, library: Any, point: Point) -> dict[str, Any]:
        """A point under the names of the role's group, with "step", the trainer's. Args: library: wandb or trackio."""
        step, found = point.step, {**point.values}
        if self.kind == "searcher" and "policy_step" in found:
            step, found["batch"] = int(found["policy_step"]), step
        found |= {name: library.Histogram(np_histogram=histogram(each)) for name, each in point.histograms.items()}
        for name, rows in point.tables.items():
            found[name] = library.Table(columns=[*rows[0]], data=[[*row.values()] for row in rows])
        return {"step": step} | {f"{GROUPS[self.kind]}/{name}": each for name, each in found.items()}


def without_secrets(tree: Any, *, name: str = "") -> Any:
    """The same settings, where texts under a name that says so, and users of addresses, are HIDDEN.

    Args: tree: of dictionaries, lists and plain values; name: of the setting that `tree` is the value of.
    """
    if isinstance(tree, dict):
        return {
            key: without_secrets(value, name=f"{name}.{key}" if _SECRET.search(name) else str(key)) for key, value in tree.items()
        }
    if isinstance(tree, list | tuple):
        return [without_secrets(each, name=name) for each in tree]
    if isinstance(tree, str) and tree:
        return HIDDEN if _SECRET.search(name) else _USER.sub(HIDDEN, tree)
    return tree


def session_of(config: Any, run: layout.RunDir, name: str, *, kind: str) -> Session:
    """Args: name: of the folder of the role's metrics; kind: of the role. Raises: as contract.read."""
    identity = str(contract.read(run)["id"])
    called = f"{run.root.name}-{identity[:8]}"
    shown = dict(project=config.metrics.project, group=config.metrics.group or called, name=f"{called}-{name}", kind=kind)
    key = re.sub(r"[^\w-]", "-", f"{identity[:16]}-{name}", flags=re.ASCII)[:64]
    told = without_secrets(contract.plain(config.to_dict()))
    return Session(**shown, id=key, folder=str(run.metrics(name).absolute()), config=told)


def histogram(array: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Counts between edges, which for whole numbers are at least 1 apart."""
    most = int(np.ptp(array)) + 1 if array.size and array.dtype.kind in "iu" else 20
    return np.histogram(array, bins=min(20, most) if array.size else 1)


# What takes points, and what ends the session.
Sink = tuple[Callable[[Point], Any], Callable[[], Any]]


def _tensorboard(session: Session) -> Sink:
    """An event file in the folder of the role's metrics. tensorboardX's own thread ends where the disk is full, then its queue
    blocks."""
    from tensorboardX import record_writer, summary
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.proto.summary_pb2 import Summary

    name = f"events.out.tfevents.{time.time():.6f}.{platform.node()}"
    # Whole records that a full disk refuses stay in the buffer, and the next point writes them.
    file = open(Path(session.folder) / name, "wb", buffering=1 << 20)  # noqa: SIM115 (closed by the sink's end)

    def add(event: Any) -> None:
        content = event.SerializeToString()
        parts = struct.pack("<Q", len(content)), content
        file.write(b"".join(part + struct.pack("<I", record_writer.masked_crc32c(part)) for part in parts))
        file.flush()

    def write(point: Point) -> None:
        shown = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in point.values.items()])
        for name, each in point.histograms.items():
            if each.size:
                shown.value.extend(summary.histogram(name, each, bins=histogram(each)[1]).value)
        add(Event(step=point.step, wall_time=point.time, summary=shown))

    add(Event(wall_time=time.time(), file_version="brain.Event:2"))
    return write, file.close


def _wandb(session: Session) -> Sink:
    """A run of Weights & Biases; with WANDB_MODE=offline its points are kept in the folder, and `wandb sync` sends them."""
    import wandb

    told: dict[str, Any] = {name: vars(session)[name] for name in ("project", "group", "name", "id", "config")}
    # Several roles may be in one process, each with a run of its own.
    limits: dict[str, Any] = dict(init_timeout=30.0, finish_timeout=_FINISH_SECONDS, reinit="create_new")
    settings = wandb.Settings(silent=True, console="off", save_code=False, **limits)
    run = wandb.init(**told, job_type=session.kind, dir=session.folder, resume="allow", settings=settings)
    # A trainer that resumes does steps again. wandb's own step only grows, so the axis is a metric like any other.
    run.define_metric("step", hidden=True)
    run.define_metric("*", step_metric="step")
    return lambda point: run.log(session.shown(wandb, point)), run.finish


def _trackio(session: Session) -> Sink:
    """A run of Trackio: in TRACKIO_DIR on this machine, or at the space or server that the environment names."""
    import trackio

    told: dict[str, Any] = {name: vars(session)[name] for name in ("project", "group", "name", "config")}
    run = trackio.init(**told, resume="allow", embed=False, auto_log_gpu=False, auto_log_cpu=False)

    def write(point: Point) -> None:
        shown = session.shown(trackio, point)
        run.log(shown, step=shown.pop("step"))

    return write, run.finish


# The values of metrics.sinks, and what begins a session of each.
TRACKERS: dict[str, Callable[[Session], Sink]] = {"tensorboard": _tensorboard, "wandb": _wandb, "trackio": _trackio}
_PACKAGES = {"tensorboard": "tensorboardX"}


def missing(name: str) -> str:
    """The sentence about a tracker whose package is not installed, "" where it is."""
    package = _PACKAGES.get(name, name)
    found = importlib.util.find_spec(package)
    if found is not None and found.origin is not None:  # wandb and others make folders of their name, which are no packages
        return ""
    return f"metrics.sinks names {name}, which is not installed (pip install {package}); the run goes on without it"


def refused_names(metrics: Any) -> list[str]:
    """A sentence about each name that trackers do not take. Args: metrics: the section of the config."""
    named = (("project", r"[\w. -]{1,100}"), ("group", r"[\w. -]{0,100}"))
    wrong = [name for name, pattern in named if not re.fullmatch(pattern, metrics[name])]
    return [f"metrics.{name}={metrics[name]!r} must be 1 to 100 letters, digits, spaces, and _ - ." for name in wrong]


class Tracker:
    """Hands points to one tracker, from a thread. What its library raises is an alarm, and the role goes on: metrics.jsonl has
    every point."""

    def __init__(self, name: str, session: Callable[[], Session], alarms: Alarms):
        """Args: name: in TRACKERS; session: asked with the first point. alarms: of the role."""
        self.name, self._session, self._alarms = name, session, alarms
        self._points = queue.Queue[Point | None](_MOST_WAITING)
        self._thread: threading.Thread | None = None
        self._begun = False

    def write(self, point: Point) -> None:
        """Shows a point; the first one begins the session. A point that finds the queue full is left out."""
        if not self._begun:
            self._begun = True
            if sink := self._attempt(lambda: TRACKERS[self.name](self._session())):
                self._thread = threading.Thread(target=self._show, args=sink, name=self.name, daemon=True)
                self._thread.start()
        if self._thread is not None:
            self._put(point)

    def end(self) -> None:
        """No more points come. The library has CLOSE_SECONDS for those that it has not sent: a role may have to stop."""
        if self._thread is not None:
            self._put(None)
            self._thread.join(CLOSE_SECONDS)

    def _put(self, point: Point | None) -> None:
        try:
            self._points.put_nowait(point)
        except queue.Full:
            self._tell(f"{_MOST_WAITING} points wait for it, and newer ones are left out")

    def _show(self, show: Callable[[Point], Any], end: Callable[[], Any]) -> None:
        while (point := self._points.get()) is not None:
            self._attempt(show, point)
        self._attempt(end)

    def _attempt(self, call: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return call(*arguments)
        except Exception as error:  # of the tracker's library: nobody else knows its errors
            self._tell(str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__)
            return None

    def _tell(self, reason: str) -> None:
        for name, value in os.environ.items():  # what would be a secret in a log
            if re.search("KEY|TOKEN|SECRET|PASSWORD|URL", name.upper()) and len(value) > 5:
                reason = reason.replace(value, f"({name})")
        reason = "".join(letter if letter.isprintable() else " " for letter in reason)[:500]
        advice = "nothing has to be done, since metrics.jsonl has every point; or log in, or leave it out of metrics.sinks"
        self._alarms.tell(kind=self.name, sentence=f"{self.name}: {reason}", advice=advice, step=0)


class MetricWriter:
    """Writes scalars and histograms of one role to `folder`/metrics.jsonl, and shows them to trackers.

    A line is {"step": int, "time": unix seconds, name: float, ...}. A file of half the megabytes becomes `metrics.jsonl.1`.
    """

    def __init__(self, folder: Path, *, megabytes: float, status: Status | None = None, shown: Any = (), tables: bool = True):
        """Args: megabytes: of both files. status: is told the newest figures. shown: Trackers; tables: they may see rows."""
        places.make_folder(folder, below=2)
        self._path, self._half, self._tables = folder / FILE, int(megabytes * 2**19), tables
        self._status, self._trackers = status or Status(None), tuple[Tracker, ...](shown)
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
        counted = {name: histogram(array) for name, array in (histograms or {}).items()}
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

    Args: name: of the folder of the role's metrics; role: a key of GROUPS.
    """
    c, told = config.metrics, Alarms(run.metrics(name))
    session = functools.partial(session_of, config, run, name, kind=role)
    shown = [Tracker(sink, session, told) for sink in dict.fromkeys(c.sinks) if not missing(sink)]
    tables = not contract.is_private(run)
    return MetricWriter(run.metrics(name), megabytes=c.megabytes, status=status, shown=shown, tables=tables)


def each_line(folder: Path) -> Iterator[dict[str, Any]]:
    """All whole lines that are kept of a role's metrics, oldest first."""
    for name in (f"{FILE}.1", FILE):
        yield from layout.each(folder / name)


def read_lines(folder: Path) -> list[dict[str, Any]]:
    """The lines of `each_line`; of a long run they take much memory."""
    return [*each_line(folder)]


class Peaks(NamedTuple):
    """flops: operations a second of dense products of bfloat16, or float16 where there is none. bandwidth: bytes a second."""

    flops: float
    bandwidth: float


# device_kind as JAX and nvidia-smi write it -> its peaks. TPUs are counted by chips.
PEAKS = {
    "TPU v4": Peaks(275e12, 1228e9),
    "TPU v5 lite": Peaks(197e12, 819e9),
    "TPU v5e": Peaks(197e12, 819e9),
    "TPU v5": Peaks(459e12, 2765e9),
    "TPU v5p": Peaks(459e12, 2765e9),
    "TPU v6 lite": Peaks(918e12, 1640e9),
    "TPU v6e": Peaks(918e12, 1640e9),
    "NVIDIA B200": Peaks(2250e12, 8000e9),
    "NVIDIA H200": Peaks(989e12, 4800e9),
    "NVIDIA H200 NVL": Peaks(835e12, 4800e9),
    "NVIDIA GH200 480GB": Peaks(989e12, 4000e9),
    "NVIDIA H100 80GB HBM3": Peaks(989e12, 3352e9),
    "NVIDIA H100 NVL": Peaks(835e12, 3938e9),
    "NVIDIA H100 PCIe": Peaks(756e12, 2039e9),
    "NVIDIA A100-SXM4-80GB": Peaks(312e12, 2039e9),
    "NVIDIA A100-SXM4-40GB": Peaks(312e12, 1555e9),
    "NVIDIA A100 80GB PCIe": Peaks(312e12, 1935e9),
    "NVIDIA A100-PCIE-40GB": Peaks(312e12, 1555e9),
    "NVIDIA L40S": Peaks(362e12, 864e9),
    "NVIDIA A10G": Peaks(70e12, 600e9),
    "NVIDIA L4": Peaks(121e12, 300e9),
    "Tesla T4": Peaks(65e12, 320e9),
}


def peaks_of(devices: Sequence[Any], *, flops: float = 0.0, bandwidth: float = 0.0) -> Peaks:
    """The peaks of all these devices together; 0 where it is not known, which is said in the log.

    Args: devices: of one kind; flops, bandwidth: of one device, before those of the table (metrics.peak_flops, .peak_bandwidth).
    """
    table = PEAKS.get(kind := devices[0].device_kind, Peaks(0.0, 0.0))
    each = Peaks(flops or table.flops, bandwidth or table.bandwidth)
    if lacks := [name for name, peak in (("mfu", each.flops), ("bandwidth_share", each.bandwidth)) if not peak]:
        told = "the metrics have no %s: set metrics.peak_flops and metrics.peak_bandwidth, since the peaks of %s are not known"
        log.info(told, " and no ".join(lacks), kind)
    return Peaks(len(devices) * each.flops, len(devices) * each.bandwidth)
