"""The compilations of a process: on the role's timeline, among its events, and its phase while one lasts.

JAX tells of every program that it compiles, or reads from the cache of compiled programs: once its lowering has ended, which is
when the compiler begins, and once it is compiled.
"""

import contextlib
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager

from jax import monitoring

from tba_jax.run.record import Record

# The function of a program -> what people call it; other programs are called as their functions.
_CALLED = {
    "train_step": "the update",
    "decode": "the decoder",
    "prefill": "the prefill",
    "score": "the scoring",
    "_score_snapshot": "the log-prob comparison",
    "row_keys": "the keys of rows",
}
# A compilation that takes less is no event.
EVENT_SECONDS = 0.5
_LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"
_BEGINS = "/jax/compilation_cache/compile_requests_use_cache"
_COMPILED = "/jax/core/compile/backend_compile_duration"


class _Watch:
    """Listens to JAX."""

    def __init__(self, record: Record):
        self._record = record
        # Of the main thread: the program that was lowered last, and the phase of its compilation.
        self._lowered = "a program"
        self._phase: AbstractContextManager[None] | None = None

    def hear(self, event: str, **about: str | int) -> None:
        if event != _BEGINS or not _is_main() or self._phase is not None:
            return
        if not self._record.status.now.startswith("compiling"):  # the role itself may know a better name of what it compiles
            # Most take a moment, and are over before anything is written.
            self._phase = self._record.status.during(f"compiling {self._lowered}", at_once=False)
            self._phase.__enter__()

    def hear_duration(self, event: str, duration_secs: float, **about: str | int) -> None:
        function = str(about.get("fun_name", "a program")).removeprefix("jit(").removesuffix(")")
        program = _CALLED.get(function, function)
        if event == _LOWERED and _is_main():
            self._lowered = program
        elif event == _COMPILED:
            self._ends(program, duration_secs)

    def _ends(self, program: str, seconds: float) -> None:
        if _is_main() and self._phase is not None:
            phase, self._phase = self._phase, None
            phase.__exit__(None, None, None)
        now = time.monotonic()
        self._record.timeline.note("compile", now - seconds, now, lane="compiler")
        if seconds >= EVENT_SECONDS:
            self._record.events.tell("compiled", step=self._record.step, what=program, seconds=round(seconds, 3))


def _is_main() -> bool:
    return threading.current_thread() is threading.main_thread()


@contextlib.contextmanager
def watched(record: Record) -> Iterator[None]:
    """What this process compiles inside is recorded."""
    watch = _Watch(record)
    monitoring.register_event_listener(watch.hear)
    monitoring.register_event_duration_secs_listener(watch.hear_duration)
    try:
        yield
    finally:
        monitoring.unregister_event_listener(watch.hear)
        monitoring.unregister_event_duration_listener(watch.hear_duration)
