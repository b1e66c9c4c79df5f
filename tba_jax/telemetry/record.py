"""What a process tells of itself beside its metrics: its status, kept up to date by a thread, and a trace of the profiler."""

import contextlib
import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from jax import monitoring

from tba_jax.run import contract, layout, places
from tba_jax.telemetry import beginnings, status
from tba_jax.telemetry.profiles import Profiler, Window
from tba_jax.telemetry.status import Status
from tba_jax.text.visible import visible

log = logging.getLogger(__name__)

# Programs whose functions people call by another name.
_CALLED = {"train_step": "the update", "decode": "the decoder", "prefill": "the prefill", "score": "the scoring"}
# Of JAX's events: a program was lowered; its compilation, or its reading from the cache, begins; it has ended.
_LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"
_BEGINS = "/jax/compilation_cache/compile_requests_use_cache"
_COMPILED = "/jax/core/compile/backend_compile_duration"


class Record:
    """The record of one process. Storage that refuses ends nobody. Attributes: status, profiler: see there."""

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
        step = 0
        if folder is not None:
            with contextlib.suppress(OSError):
                places.make_folder(folder, below=2)
                step = status.read(folder).step
        self.status = Status(folder, process=beginnings.told(devices) if folder is not None else {}, step=step)
        if folder is not None:
            self._compiles.enter_context(_compilations_told(self.status))

    def close(self, reason: str) -> None:
        """Writes that the process ends, once. Args: reason: such as "finished"."""
        if not self._closed:
            self._closed = True
            self.profiler.end()
            self._compiles.close()
            self.status.close(reason)

    def end(self, run: layout.RunDir, *, role: str) -> None:
        """Closes the record of a role that no error ended, and logs why it ends: with the run, or because it was asked to.

        Args: role: how the log calls it.
        """
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
    """What the main thread compiles inside is its phase for so long, unless the role itself says what it compiles."""
    lowered, phases = "a program", list[AbstractContextManager[None]]()

    def hear(event: str, _: float = 0.0, **about: str | int) -> None:
        nonlocal lowered
        if threading.current_thread() is not threading.main_thread():
            return
        if event == _LOWERED:
            function = str(about.get("fun_name", "a program")).removeprefix("jit(").removesuffix(")")
            lowered = _CALLED.get(function, function)
        elif event == _BEGINS and not phases and not told.now.startswith("compiling"):
            phases.append(told.during(f"compiling {lowered}"))
            phases[0].__enter__()
        elif event == _COMPILED and phases:
            phases.pop().__exit__(None, None, None)

    listener: Any = hear
    monitoring.register_event_listener(listener)
    monitoring.register_event_duration_secs_listener(listener)
    try:
        yield
    finally:
        monitoring.unregister_event_listener(listener)
        monitoring.unregister_event_duration_listener(listener)
