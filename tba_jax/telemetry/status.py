"""What a process tells beside its metrics: its status.json, the shares of its time, and traces of --profile=START:STEPS.

A trainer traces its steps START to START + STEPS − 1. A searcher traces the first STEPS batches, and an evaluator the first
evaluation, of the weights that step START begins with, or newer ones. `version` imports this where JAX is broken.
"""

import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import logging
import os
import platform
import re
import subprocess
import threading
import time
import tomllib
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tba_jax.outputs import visible
from tba_jax.storage import contract, layout, places

log = logging.getLogger(__name__)

_FILE = "status.json"
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "tensorstore", "transformers", "numpy")
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
        """Args: folder: None: nothing is written. process: see `beginning`. step: of the trainer; the role keeps it up."""
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
    """pid, host, devices (text), started (unix seconds), versions {package: version} and code."""
    names = [device.device_kind for device in devices]
    kinds = " + ".join(f"{names.count(name)} × {name}" for name in dict.fromkeys(names))
    here = {"pid": os.getpid(), "host": platform.node(), "devices": kinds, "started": time.time()}
    return {**here, "versions": versions(), "code": code()}


# What the numbers of a step come from.
_OF_A_STEP = ("learner", "models", "objectives", "replay", "roles/trainer", "packing.py", "sharding.py", "trajectory.py")


def versions() -> dict[str, str]:
    """The versions of Python and of the packages that decide what a run computes. Imports none."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


@functools.cache
def code_digest() -> str:
    """16 hex digits of all that decides what a trainer's step computes: sources of this package, and `versions`."""
    package, digest = _CHECKOUT / "tba_jax", hashlib.sha256(repr(sorted(versions().items())).encode())
    rooms = [package / room for room in _OF_A_STEP]
    for path in sorted(path for room in rooms for path in ([room] if room.suffix else room.rglob("*.py"))):
        digest.update(path.relative_to(package).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def code() -> dict[str, str]:
    """The version of this package, and the git commit of its checkout, "" without one."""
    version = ""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        version = importlib.metadata.version("tba_jax")
    with contextlib.suppress(OSError, ValueError, KeyError):  # of a checkout, beside which an older version may be installed
        version = tomllib.loads((_CHECKOUT / "pyproject.toml").read_text())["project"]["version"]
    commit = ""
    if (_CHECKOUT / ".git").exists():  # else git would look for a repository in the folders above
        asked = ["git", "-C", str(_CHECKOUT), "rev-parse", "--verify", "HEAD"]
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            commit = subprocess.run(asked, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    return {"version": version, "commit": commit}


# Events of JAX: a compilation, or its reading from the cache, begins; it has ended.
_BEGINS = "/jax/compilation_cache/compile_requests_use_cache"
_COMPILED = "/jax/core/compile/backend_compile_duration"


class Window(NamedTuple):
    """Steps of a trainer, from 1: `start`, and `steps` − 1 after it."""

    start: int
    steps: int

    @property
    def last(self) -> int:
        return self.start + self.steps - 1


def parse_window(text: str, *, steps: int) -> Window | None:
    """The window of --profile, None for "". Args: steps: learner.steps. Raises ValueError where it is past their end, or none."""
    if not text:
        return None
    found = re.fullmatch(r"0*([1-9][0-9]{0,11}):0*([1-9][0-9]{0,11})", text)
    if found is None:
        raise ValueError(f"--profile={text} is not START:STEPS, two numbers from 1 on, such as --profile=100:5")
    window = Window(int(found[1]), int(found[2]))
    if window.last > steps:
        told = f"--profile={window.start}:{window.steps} asks for steps up to {window.last}"
        raise ValueError(f"{told}, and learner.steps={steps} ends the run before: ask for less")
    return window


class Profiler:
    """Traces the process while it is in the window. A failure of the storage or the profiler costs the trace alone."""

    def __init__(self, folder: Path | None, window: Window | None):
        """Args: folder: of the traces; window: None: nothing is traced."""
        self._folder, self._window = folder or Path(), window
        self._is_tracing, self._is_first, self._batches = False, True, 0

    def step(self, number: int) -> None:
        """The trainer is at this step, or has done all before it."""
        if self._window is not None and number >= self._window.start:
            self._trace(number - 1, wanted=number <= self._window.last)

    def batch(self, policy_step: int, *, most: int | None = None) -> None:
        """A batch of the weights of a step begins. Args: most: batches that are traced; None: the window's STEPS."""
        window, first, self._is_first = self._window, self._is_first, False
        if window is not None and policy_step >= window.start - 1:
            is_late = first and policy_step >= window.last  # a role that dies often would fill the disk with traces
            self._trace(policy_step, wanted=not is_late and self._batches < (most or window.steps))
            self._batches += 1

    def _trace(self, step: int, *, wanted: bool) -> None:
        if not wanted:
            if not self._is_tracing:
                log.warning("--profile: nothing is traced, because the run goes on from step %d; name later steps", step)
            self.end()
        elif not self._is_tracing:
            import jax

            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # every call of Python would slow the host down
            with self._told_failures():
                places.make_folder(self._folder, below=2)
                jax.profiler.start_trace(self._folder, profiler_options=options)
                self._is_tracing = True

    def end(self) -> None:
        """Writes the trace that was begun, if any. There is no other after it."""
        self._window = None
        if self._is_tracing:
            import jax

            self._is_tracing = False
            with self._told_failures():
                jax.profiler.stop_trace()
                log.info("a trace of the profiler is in %s", self._folder)

    @contextlib.contextmanager
    def _told_failures(self) -> Iterator[None]:
        try:
            yield
        except (OSError, RuntimeError) as error:  # RuntimeError: jax.profiler passes on what it met
            self._window = None
            log.warning("--profile: no trace in %s: %s", self._folder, (str(error).splitlines() or [type(error).__name__])[0])


class Record:
    """The status and the profiler of one process."""

    def __init__(
        self, folder: Path | None = None, *, traces: Path | None = None, profile: Any = None, devices: Sequence[Any] = ()
    ):
        """Args: folder: of the role's metrics; None: nothing is told. traces, profile: see Profiler. devices: of the process."""
        self.profiler, self.status = Profiler(traces, profile), Status(None)
        self._ends, self._closed = contextlib.ExitStack(), False
        if folder is not None:
            step = 0
            with contextlib.suppress(OSError):
                places.make_folder(folder, below=2)
                step = read(folder).step
            self.status = Status(folder, process=beginning(devices), step=step)
            self._ends.enter_context(_compilations_told(self.status))

    def close(self, reason: str) -> None:
        """Writes that the process ends, once. Args: reason: such as "finished"."""
        if not self._closed:
            self._closed = True
            self.profiler.end()
            self._ends.close()
            self.status.close(reason)

    def end(self, run: layout.RunDir, *, role: str) -> None:
        """Closes the record of a role that no error ended, and logs whether the run is finished. Args: role: its name there."""
        steps = None
        with contextlib.suppress(*places.STORAGE_ERRORS):  # which does not say
            steps = contract.steps_of(run) if contract.is_finished(run) else None
        self.close("stopped" if steps is None else "finished")
        if steps is None:
            log.info("stopped; the same command starts this %s again", role)
        else:
            log.info("the run in %s has finished its %d steps: this %s is done", run.shared, steps, role)

    @contextlib.contextmanager
    def told_failures(self) -> Iterator[None]:
        """An error that ends the process is what its status says last."""
        try:
            yield
        except BaseException as error:
            first = (str(error).strip().splitlines() or [""])[0]
            self.close(visible(f"{type(error).__name__}: {first}".removesuffix(": ")))
            raise


@contextlib.contextmanager
def _compilations_told(told: Status) -> Iterator[None]:
    """A compilation of the main thread is its phase meanwhile, unless the role itself says what it compiles."""
    from jax import monitoring

    phase = contextlib.ExitStack()

    def hear(event: str, _: float = 0.0, **about: str | int) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        if event == _BEGINS and not told.now.startswith("compiling"):
            phase.enter_context(told.during("compiling a program"))
        elif event == _COMPILED:
            phase.close()

    listener: Any = hear
    monitoring.register_event_listener(listener)
    monitoring.register_event_duration_secs_listener(listener)
    try:
        yield
    finally:
        monitoring.unregister_event_listener(listener)
        monitoring.unregister_event_duration_listener(listener)


class TimeAccount:
    """Splits a role's wall time into named shares: what it works on, and what it waits for."""

    def __init__(self, record: Record | None = None) -> None:
        """Args: record: of the role; None: one that writes nothing."""
        import jax

        self.record, self._traced = record or Record(), jax.profiler.TraceAnnotation
        self.restart()

    def restart(self) -> None:
        """Starts the account anew, after compilations and the first batch."""
        self._seconds, self._start = dict[str, float](), time.monotonic()

    @contextlib.contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Adds the time spent inside to `name`, which a trace of the profiler shows too. Do not nest."""
        begin = time.monotonic()
        try:
            with self._traced(name):
                yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.monotonic() - begin

    def total(self) -> float:
        """Seconds since the start, above 0."""
        return max(time.monotonic() - self._start, 1e-9)

    def shares(self) -> dict[str, float]:
        """name -> share of the wall time since the start, in [0, 1]; `time_other` is what no name covers."""
        shares = {f"time_{name}": seconds / self.total() for name, seconds in self._seconds.items()}
        return shares | {"time_other": max(0.0, 1.0 - sum(shares.values()))}
