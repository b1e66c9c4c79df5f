"""What a role says of itself: `metrics/<role>/status.json`, which the role alone writes and whoever shows the run reads."""

import contextlib
import dataclasses
import importlib.metadata
import json
import os
import platform
import subprocess
import threading
import time
import tomllib
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

_FILE = "status.json"
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "tensorstore", "transformers", "numpy")
# Where this package is in a checkout of the project.
_CHECKOUT = Path(__file__).resolve().parents[2]
# What has changed is written after this time, and what has not after the other: readers see that the process lives.
FLUSH_SECONDS, HEARTBEAT_SECONDS = 1.0, 10.0
_PHASE = ("phase", "phase_since", "done", "total")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Told:
    """The fields of the file; times are unix seconds.

    waits, since: what the role waits for. trouble: what is wrong with its rewards. phase, phase_since: what else it does. done,
    total: parts of the phase. time: of this writing. step: of the trainer. figures: of the newest point of metrics. process: see
    `beginning`.
    """

    waits: str = ""
    since: float = 0.0
    trouble: str = ""
    phase: str = ""
    phase_since: float = 0.0
    done: int = 0
    total: int = 0
    time: float = 0.0
    pid: int = 0
    step: int = 0
    figures: Mapping[str, float] = dataclasses.field(default_factory=dict)
    process: Mapping[str, Any] = dataclasses.field(default_factory=dict)


_NOTHING = Told()


class Status:
    """A role's status, which a thread writes: the role does not wait for storage, and what storage refuses is lost."""

    def __init__(self, folder: Path | None, *, process: Mapping[str, Any] | None = None, step: int = 0):
        """Args: folder: None: nothing is written. process: see `beginning`. step: of the trainer, which the role keeps up."""
        self._folder, self.step = folder, step
        self._told = dataclasses.asdict(Told(process=process or {}, pid=os.getpid()))
        self._written, self._at = "", 0.0
        self._writing, self._stopping = threading.Lock(), threading.Event()
        if folder is not None:
            self.flush()
            arguments = weakref.ref(self), self._stopping
            threading.Thread(target=_flush_now_and_then, args=arguments, name="status", daemon=True).start()

    def waits(self, sentence: str, *, seconds: float) -> None:
        """The role has waited so long for what `sentence` says; "": it works."""
        self._told |= {"waits": sentence, "since": round(time.time() - seconds) if sentence else 0.0}

    def trouble(self, sentence: str) -> None:
        """Tells what keeps the role's work from being of use; "": nothing does."""
        self._told["trouble"] = sentence

    def phase(self, sentence: str, *, done: int = 0, total: int = 0) -> None:
        """Tells what the role does other than its work; "": it is at work. Args: done, total: see Told."""
        since = self._told["phase_since"] if sentence == self.now else round(time.time(), 1)
        self._told |= {"phase": sentence, "phase_since": since if sentence else 0.0, "done": done, "total": total}

    @property
    def now(self) -> str:
        """The phase that was told last."""
        return str(self._told["phase"])

    @contextlib.contextmanager
    def during(self, sentence: str) -> Iterator[None]:
        """The role is in this phase inside, and afterwards in the one before."""
        before = {name: self._told[name] for name in _PHASE}
        self.phase(sentence)
        try:
            yield
        finally:
            self._told |= before

    def point(self, figures: Mapping[str, float]) -> None:
        """Takes the figures of a point of metrics."""
        self._told["figures"] = figures

    def flush(self) -> None:
        """Writes what has changed, and now and then what has not."""
        with self._writing:
            told, now = {**self._told, "step": self.step}, time.time()
            text = json.dumps(told)
            if self._folder is None or (text == self._written and now < self._at + HEARTBEAT_SECONDS):
                return
            with contextlib.suppress(OSError):
                temporary = self._folder / f".{_FILE}.{os.getpid()}"
                temporary.write_text(json.dumps({**told, "time": now}))
                temporary.replace(self._folder / _FILE)
                self._written, self._at = text, now

    def close(self, reason: str) -> None:
        """Writes that the process ends. Args: reason: such as "finished"."""
        self._stopping.set()
        self.waits("", seconds=0.0)
        self.phase(reason)
        self.flush()


def _flush_now_and_then(reference: "weakref.ref[Status]", stopping: threading.Event) -> None:  # weak: nobody may close it
    while not stopping.wait(FLUSH_SECONDS) and (status := reference()) is not None:
        status.flush()
        del status


def read(folder: Path) -> Told:
    """What a role said last; Told() where the file is damaged. Raises OSError where the storage refuses."""
    try:
        told = Told(**json.loads((folder / _FILE).read_text()))
    except (FileNotFoundError, ValueError, TypeError, RecursionError):
        return _NOTHING
    whole = all(_fits(value, vars(_NOTHING)[name]) for name, value in vars(told).items())
    return told if whole and all(_fits(value, 0.0) for value in told.figures.values()) else _NOTHING


def _fits(value: object, like: object) -> bool:
    """Whether a value is of the kind of another. JSON knows integers of any length, and NaN."""
    if isinstance(like, int | float):
        return isinstance(value, int | float) and -1e300 < value < 1e300
    return isinstance(value, type(like))


def beginning(devices: Sequence[Any]) -> dict[str, Any]:
    """pid, host, devices (text), started (unix seconds), versions {package: version} and code. Args: devices: of the process."""
    names = [device.device_kind for device in devices]
    kinds = " + ".join(f"{names.count(name)} × {name}" for name in dict.fromkeys(names))
    here = {"pid": os.getpid(), "host": platform.node(), "devices": kinds, "started": time.time()}
    return {**here, "versions": versions(), "code": code()}


def versions() -> dict[str, str]:
    """The versions of Python and of the packages that decide what a run computes. Imports none."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def code() -> dict[str, str]:
    """The version of this package, and the git commit of its checkout, "" without one."""
    version = ""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        version = importlib.metadata.version("tba_jax")
    with contextlib.suppress(OSError, ValueError, KeyError):  # of a checkout, beside which an older version may be installed
        version = tomllib.loads((_CHECKOUT / "pyproject.toml").read_text())["project"]["version"]
    return {"version": version, "commit": commit(_CHECKOUT)}


def commit(checkout: Path) -> str:
    """The git commit of a checkout, "" where the folder is none or git is not installed."""
    if not (checkout / ".git").exists():  # git would look for a repository in the folders above
        return ""
    asked = ["git", "-C", str(checkout), "rev-parse", "--verify", "HEAD"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(asked, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    return ""
