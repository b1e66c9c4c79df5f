"""What recording costs a process."""

import contextlib
import threading
import time
from collections.abc import Iterator


class Cost:
    """Seconds that a process has spent on recording itself, in all of its threads.

    Waiting counts: for storage, and for other threads that hold the interpreter.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def measure(self) -> Iterator[None]:
        """Adds the time spent inside. Do not nest."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            with self._lock:
                self.seconds += time.perf_counter() - begin
