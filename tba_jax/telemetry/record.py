"""What a process tells of itself beside its metrics: its status, kept up to date by a thread, and a trace of the profiler."""

import contextlib
import logging
import threading
import weakref
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

FLUSH_SECONDS = 1.0
# The function of a program -> what people call it; other programs are called as their functions.
_CALLED = {
    "train_step": "the update",
    "decode": "the decoder",
    "prefill": "the prefill",
    "score": "the scoring",
    "_score_snapshot": "the log-prob comparison",
    "row_keys": "the keys of rows",
}
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
        """
        Args:
          folder: of the role's metrics; None: nothing is recorded.
          traces: folder of the traces of jax.profiler; profile: what they are of, see Profiler. devices: of the process.
        """
        self.profiler = Profiler(traces, profile)
        self._stopping = threading.Event()
        self._compiles = contextlib.ExitStack()
        if folder is None:
            self.status = Status(None)
            return
        step = 0
        with contextlib.suppress(OSError):
            places.make_folder(folder, below=2)
            step = status.read(folder).step
        self.status = Status(folder, process=beginnings.told(devices), step=step)
        self._compiles.enter_context(_compilations_told(self.status))
        # A daemon thread: the end of the process does not wait for storage that hangs.
        arguments = weakref.ref(self), self._stopping
        threading.Thread(target=_flush_now_and_then, args=arguments, name="record", daemon=True).start()

    def close(self, reason: str) -> None:
        """Writes that the process ends. Args: reason: such as "finished"."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        self.profiler.end()
        self._compiles.close()
        self.status.waits("", seconds=0.0)
        self.status.phase(reason)

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


def _flush_now_and_then(reference: "weakref.ref[Record]", stopping: threading.Event) -> None:
    """Args: reference: weak, so that the thread ends with a record that nobody closes."""
    while not stopping.wait(FLUSH_SECONDS):
        record = reference()
        if record is None:
            return
        record.status.flush()
        del record


@contextlib.contextmanager
def _compilations_told(told: Status) -> Iterator[None]:
    """What the main thread compiles inside is its phase for so long, unless the role itself says what it compiles."""
    lowered, phases = "a program", list[AbstractContextManager[None]]()

    def hear(event: str, **about: str | int) -> None:
        is_main = threading.current_thread() is threading.main_thread()
        if event == _BEGINS and is_main and not phases and not told.now.startswith("compiling"):
            # Most compilations take a moment, and are over before anything is written.
            phases.append(told.during(f"compiling {lowered}", at_once=False))
            phases[0].__enter__()

    def hear_duration(event: str, duration_secs: float, **about: str | int) -> None:
        nonlocal lowered
        if threading.current_thread() is not threading.main_thread():
            return
        if event == _LOWERED:
            function = str(about.get("fun_name", "a program")).removeprefix("jit(").removesuffix(")")
            lowered = _CALLED.get(function, function)
        elif event == _COMPILED and phases:
            phases.pop().__exit__(None, None, None)

    monitoring.register_event_listener(hear)
    monitoring.register_event_duration_secs_listener(hear_duration)
    try:
        yield
    finally:
        monitoring.unregister_event_listener(hear)
        monitoring.unregister_event_duration_listener(hear_duration)
