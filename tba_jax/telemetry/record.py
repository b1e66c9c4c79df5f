"""What a process tells beside its metrics: its status, the shares of its time, and the traces of --profile=START:STEPS.

A trainer traces its steps START to START + STEPS − 1. A searcher traces the first STEPS batches, and an evaluator the first
evaluation, of the weights that step START begins with, or newer ones.
"""

import contextlib
import logging
import re
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax import monitoring

from tba_jax.storage import contract, layout, places
from tba_jax.telemetry import status
from tba_jax.telemetry.status import Status
from tba_jax.text.visible import visible

log = logging.getLogger(__name__)

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
        """Args: folder: of the traces; None, as window=None: nothing is traced."""
        self._folder, self._window = folder or Path(), None if folder is None else window
        self._is_tracing, self._batches = False, 0

    def step(self, number: int) -> None:
        """The trainer is at this step, or has done all before it."""
        window = self._window
        if window is not None and number >= window.start:
            if number > window.last and not self._is_tracing:
                log.warning("--profile: nothing is traced, because the run goes on from step %d; name later steps", number - 1)
            self._trace(number <= window.last)

    def batch(self, policy_step: int, *, most: int | None = None) -> None:
        """A batch of the weights of a step begins. Args: most: batches that are traced; None: the window's STEPS."""
        if self._window is not None and policy_step >= self._window.start - 1:
            self._trace(self._batches < (most or self._window.steps))
            self._batches += 1

    def _trace(self, wanted: bool) -> None:
        if not wanted:
            self.end()
        elif not self._is_tracing:
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
        self,
        folder: Path | None = None,
        *,
        traces: Path | None = None,
        profile: Window | None = None,
        devices: Sequence[Any] = (),
    ):
        """Args: folder: of the role's metrics; None: nothing is told. traces, profile: see Profiler. devices: of the process."""
        self.profiler, self._compiles, self._closed = Profiler(traces, profile), contextlib.ExitStack(), False
        if folder is None:
            self.status = Status(None)
            return
        step = 0
        with contextlib.suppress(OSError):
            places.make_folder(folder, below=2)
            step = status.read(folder).step
        self.status = Status(folder, process=status.beginning(devices), step=step)
        self._compiles.enter_context(_compilations_told(self.status))

    def close(self, reason: str) -> None:
        """Writes that the process ends, once. Args: reason: such as "finished"."""
        if not self._closed:
            self._closed = True
            self.profiler.end()
            self._compiles.close()
            self.status.close(reason)

    def end(self, run: layout.RunDir, *, role: str) -> None:
        """Closes the record of a role that no error ended, and logs whether the run is finished. Args: role: its name there."""
        try:
            steps = contract.steps_of(run) if contract.is_finished(run) else None
        except places.STORAGE_ERRORS:  # which does not say
            steps = None
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
        self.record = record or Record()
        self.restart()

    def restart(self) -> None:
        """Starts the account anew, after compilations and the first batch."""
        self._seconds: dict[str, float] = {}
        self._start = time.monotonic()

    @contextlib.contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Adds the time spent inside to `name`, which a trace of the profiler shows too. Do not nest."""
        begin = time.monotonic()
        try:
            with jax.profiler.TraceAnnotation(name):
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
