"""Trackers that show the metrics of a run: TensorBoard, Weights & Biases, Trackio.

A role calls the libraries directly in a `try`, as they send points from threads and processes of their own.
"""

import dataclasses
import importlib.util
import os
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tba_jax.storage import contract, layout
from tba_jax.storage.privacy import without_secrets
from tba_jax.telemetry.alarms import Alarms

# Seconds for which a role that ends waits for each tracker, and for which wandb's own process goes on.
CLOSE_SECONDS, _FINISH_SECONDS = 4.0, 60.0
# Kind of role -> the group of its metrics in wandb and trackio: train/loss, search/reward.
GROUPS = dict(trainer="train", searcher="search", evaluator="evaluate", reference="reference", supervised="supervised")


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


class TensorBoard:
    """Event files in the folder of the role's metrics."""

    def __init__(self, session: Session):
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(session.folder, flush_secs=5)

    def write(self, point: Point) -> None:
        told = dict(global_step=point.step, walltime=point.time)
        for name, value in point.values.items():
            self._writer.add_scalar(name, value, **told)
        for name, array in point.histograms.items():
            self._writer.add_histogram(name, array, bins=histogram(array)[1], **told)

    def end(self) -> None:
        self._writer.close()


class Wandb:
    """A run of Weights & Biases; with WANDB_MODE=offline its points are kept in the folder, and `wandb sync` sends them."""

    def __init__(self, session: Session):
        import wandb

        self._session = session
        # Several roles may be in one process, each with a run of its own.
        told: dict[str, Any] = {name: vars(session)[name] for name in ("project", "group", "name", "id", "config")}
        limits: dict[str, Any] = dict(init_timeout=30.0, finish_timeout=_FINISH_SECONDS, reinit="create_new")
        settings = wandb.Settings(silent=True, console="off", save_code=False, **limits)
        self._run = wandb.init(**told, job_type=session.kind, dir=session.folder, resume="allow", settings=settings)
        # A trainer that resumes does steps again. wandb's own step only grows, so the axis is a metric like any other.
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def write(self, point: Point) -> None:
        import wandb

        self._run.log(self._session.shown(wandb, point))

    def end(self) -> None:
        self._run.finish()


class Trackio:
    """A run of Trackio: in TRACKIO_DIR on this machine, or at the space or server that the environment names."""

    def __init__(self, session: Session):
        import trackio

        self._session = session
        told: dict[str, Any] = {name: vars(session)[name] for name in ("project", "group", "name", "config")}
        self._run = trackio.init(**told, resume="allow", embed=False, auto_log_gpu=False, auto_log_cpu=False)

    def write(self, point: Point) -> None:
        import trackio

        shown = self._session.shown(trackio, point)
        self._run.log(shown, step=shown.pop("step"))

    def end(self) -> None:
        self._run.finish()


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
    """Hands points to one tracker. What its library raises is an alarm, and the role goes on: metrics.jsonl has every point."""

    def __init__(self, name: str, session: Callable[[], Session], alarms: Alarms):
        """Args: name: in TRACKERS; session: asked with the first point. alarms: of the role."""
        self.name, self._session, self._alarms = name, session, alarms
        self._sink: TensorBoard | Wandb | Trackio | None = None
        self._begun = False

    def write(self, point: Point) -> None:
        """Shows a point; the first one begins the session."""
        if not self._begun:
            self._begun = True
            self._sink = self._attempt(lambda: TRACKERS[self.name](self._session()))
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
            reason = str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
        for name, value in os.environ.items():  # what would be a secret in a log
            if re.search("KEY|TOKEN|SECRET|PASSWORD|URL", name.upper()) and len(value) > 5:
                reason = reason.replace(value, f"({name})")
        reason = "".join(letter if letter.isprintable() else " " for letter in reason)[:500]
        advice = "nothing has to be done, since metrics.jsonl has every point; or log in, or leave it out of metrics.sinks"
        self._alarms.tell(kind=self.name, sentence=f"{self.name}: {reason}", advice=advice, step=0)
        return None
