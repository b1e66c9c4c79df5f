"""The accounting of where a role's time goes: what it works on, and what it waits for."""

import contextlib
import time
from collections.abc import Iterator

import jax

from tba_jax.telemetry.record import Record


class TimeAccount:
    """Splits a role's wall time into named shares. Attributes: record: of the role."""

    def __init__(self, record: Record | None = None) -> None:
        """Args: record: None: one that writes nothing."""
        self.record = record or Record()
        self._seconds: dict[str, float] = {}
        self._start = time.monotonic()

    def restart(self) -> None:
        """Starts the account anew: the time before the first batch says nothing about the run's balance."""
        self._seconds.clear()
        self._start = time.monotonic()

    @contextlib.contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Adds the time spent inside to `name`, which a trace of the profiler names as well. Do not nest."""
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
