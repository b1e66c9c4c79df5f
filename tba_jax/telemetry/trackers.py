"""Trackers that show the metrics of a run: TensorBoard, Weights & Biases, Trackio.

The libraries send points from threads and processes of their own, so that a role calls them directly, in a `try`: what one of
them raises is told once, and metrics.jsonl has every point.
"""

import dataclasses
import importlib.util
import logging
import os
import re
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from tba_jax.storage import contract, layout
from tba_jax.storage.privacy import without_secrets

log = logging.getLogger(__name__)

# A role that ends waits so long for each tracker, and wandb's own process goes on for as long as the second says.
CLOSE_SECONDS, _FINISH_SECONDS = 4.0, 60.0
# Kind of role -> the group of its metrics in wandb and trackio: train/loss, search/reward.
GROUPS = dict(trainer="train", searcher="search", evaluator="evaluate", reference="reference", supervised="supervised")
# {"step": int, "time": unix seconds, "values": {name: float}, "histograms": {name: {"counts", "edges"}},
# "tables": {name: {"columns": […], "rows": [[…], …]}}}
Point = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Session:
    """One role of a run, as trackers see it: all roles of a run are in one group, and a role that starts again has the same id.

    kind: of the role, see GROUPS. folder: of the role's metrics, for files. config: of the run, without secrets.
    """

    project: str
    group: str
    name: str
    id: str
    kind: str
    folder: str
    config: dict[str, Any]

    def grouped(self, point: Point) -> Point:
        """The point with the names of trackers, on the axis of the trainer's steps: a searcher counts batches from its start."""
        if self.kind == "searcher" and "policy_step" in (values := point["values"]):
            point = point | {"step": int(values["policy_step"]), "values": values | {"batch": point["step"]}}
        parts, group = ("values", "histograms", "tables"), GROUPS[self.kind]
        return point | {part: {f"{group}/{name}": each for name, each in point[part].items()} for part in parts}


def session_of(config: Any, run: layout.RunDir, name: str, *, kind: str) -> Session:
    """Args: config: of the run; name: of the folder of the role's metrics; kind: of the role. Raises: as contract.read."""
    identity = str(contract.read(run)["id"])
    called = f"{run.root.name}-{identity[:8]}"
    shown = dict(project=config.metrics.project, group=config.metrics.group or called, name=f"{called}-{name}", kind=kind)
    key = re.sub(r"[^\w-]", "-", f"{identity[:16]}-{name}", flags=re.ASCII)[:64]
    told = without_secrets(contract.plain(config.to_dict()))
    return Session(**shown, id=key, folder=str(run.metrics(name).absolute()), config=told)


# What hands points to a library: constructing it begins the session, then come write(point) … and end(). All may raise.
# note: what is to be told of the session, "" where all is well.


class TensorBoard:
    """Event files in the folder of the role's metrics."""

    note = ""

    def __init__(self, session: Session):
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(session.folder, flush_secs=5)

    def write(self, point: Point) -> None:
        told = dict(global_step=point["step"], walltime=point["time"])
        for name, value in point["values"].items():
            self._writer.add_scalar(name, value, **told)
        for name, each in point["histograms"].items():
            counts, edges = np.array(each["counts"], float), np.array(each["edges"])
            middles = (edges[1:] + edges[:-1]) / 2
            sums = dict(num=counts.sum(), sum=counts @ middles, sum_squares=counts @ middles**2)
            buckets = dict(bucket_limits=edges[1:].tolist(), bucket_counts=counts.tolist())
            self._writer.add_histogram_raw(name, min=edges[0], max=edges[-1], **sums, **buckets, **told)

    def end(self) -> None:
        self._writer.close()


class Wandb:
    """A run of Weights & Biases. Without login or network its points are kept in the folder, and `wandb sync` sends them."""

    note = ""

    def __init__(self, session: Session):
        import wandb

        self._session = session
        # Several roles may be in one process, each with a run of its own.
        limits: dict[str, Any] = dict(init_timeout=30.0, finish_timeout=_FINISH_SECONDS, reinit="create_new")
        told: dict[str, Any] = dict(
            **{name: vars(session)[name] for name in ("project", "group", "name", "id", "config")},
            **dict(job_type=session.kind, dir=session.folder, resume="allow"),
            settings=wandb.Settings(silent=True, console="off", save_code=False, **limits),
        )
        try:
            self._run = wandb.init(**told)
        except (wandb.errors.UsageError, wandb.errors.CommError, wandb.errors.AuthenticationError) as error:
            self._run = wandb.init(**told, mode="offline")
            reason = str(error).partition("\n")[0].rstrip(".")
            self.note = f"it is not reached ({reason}); `wandb sync {session.folder}/wandb/offline-run-*` sends its points"
        # A trainer that resumes does steps again. wandb's own step only grows, so the axis is a metric like any other.
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def write(self, point: Point) -> None:
        import wandb

        point = self._session.grouped(point)
        self._run.log({"step": point["step"], **point["values"], **_shown(wandb, point)})

    def end(self) -> None:
        self._run.finish()


class Trackio:
    """A run of Trackio: in TRACKIO_DIR on this machine, or at the space or server that the environment names."""

    note = ""

    def __init__(self, session: Session):
        import trackio

        self._session = session
        told: dict[str, Any] = {name: vars(session)[name] for name in ("project", "group", "name", "config")}
        self._run = trackio.init(**told, resume="allow", embed=False, auto_log_gpu=False, auto_log_cpu=False)

    def write(self, point: Point) -> None:
        import trackio

        point = self._session.grouped(point)
        self._run.log({**point["values"], **_shown(trackio, point)}, step=point["step"])

    def end(self) -> None:
        self._run.finish()


def _shown(library: Any, point: Point) -> dict[str, Any]:
    """The histograms and tables of a point. Args: library: wandb, or trackio, which has the same names."""
    counted = {name: (np.array(each["counts"]), np.array(each["edges"])) for name, each in point["histograms"].items()}
    tables = {name: library.Table(columns=each["columns"], data=each["rows"]) for name, each in point["tables"].items()}
    return {name: library.Histogram(np_histogram=each) for name, each in counted.items()} | tables


# The values of metrics.sinks, and what hands points to each.
TRACKERS: dict[str, type[TensorBoard | Wandb | Trackio]] = {"tensorboard": TensorBoard, "wandb": Wandb, "trackio": Trackio}
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
    """Hands points to one tracker. What its library raises is told once, and the role goes on: metrics.jsonl has every point."""

    def __init__(self, name: str, session: Callable[[], Session], tell: Callable[[str], None]):
        """Args: name: in TRACKERS; session: asked with the first point. tell: takes what is wrong, once."""
        self.name, self._session, self._tell = name, session, tell
        self._sink: TensorBoard | Wandb | Trackio | None = None
        self._begun = self._told = False

    def offer(self, point: Point) -> None:
        """Shows a point; the first one begins the session."""
        if not self._begun:
            self._begun = True
            self._sink = self._attempt(lambda: TRACKERS[self.name](self._session()))
            if self._sink is not None and self._sink.note:
                self._fails(self._sink.note)
        if self._sink is not None:
            self._attempt(self._sink.write, point)

    def end(self) -> None:
        """No more points come. The library has CLOSE_SECONDS for those that it has not sent: a role may have to stop."""
        if self._sink is not None:
            ending = threading.Thread(target=self._attempt, args=(self._sink.end,), name=f"end of {self.name}", daemon=True)
            ending.start()
            ending.join(CLOSE_SECONDS)

    def _attempt(self, call: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return call(*arguments)
        except Exception as error:  # of the tracker's library: nobody else knows its errors
            self._fails(str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__)
            return None

    def _fails(self, reason: str) -> None:
        if not self._told:
            self._told = True
            self._tell(_one_line(reason))


def _one_line(sentence: str) -> str:
    """The sentence on one line, without what would be a secret in a log."""
    for name, value in os.environ.items():
        if any(word in name.upper() for word in ("KEY", "TOKEN", "SECRET", "PASSWORD", "URL")) and len(value) > 5:
            sentence = sentence.replace(value, f"({name})")
    return "".join(letter if letter.isprintable() else " " for letter in sentence)[:500]
