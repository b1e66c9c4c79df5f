"""Where a trainer's time goes, and for how much of it the devices wait for the host."""

import contextlib
import time
from collections.abc import Callable, Iterator

from tba_jax.telemetry.status import Record, TimeAccount

# Time between two updates that has a share of its own and is no delay of the trainer's making.
_LEFT_OUT = ("wait_rows", "compile", "publish", "checkpoint", "logprob_gap")


class TrainerAccount(TimeAccount):
    """A time account that also adds up the time from the end of an update to the dispatch of the next one, without _LEFT_OUT. An
    update that ends while the host is at work counts as done from when the host last saw it under way."""

    def __init__(self, record: Record | None = None) -> None:
        super().__init__(record)
        # Tells whether the update that the devices compute is done; None: they compute none.
        self._is_done: Callable[[], bool] | None = None
        self._seen_under_way = 0.0
        # Since when the devices are idle, and the seconds since then that are left out.
        self._idle_since, self._left_out = time.monotonic(), 0.0
        self._waited = 0.0

    def restart(self) -> None:
        super().restart()
        self._idle_since, self._left_out, self._waited = time.monotonic(), 0.0, 0.0

    @contextlib.contextmanager
    def measure(self, name: str) -> Iterator[None]:
        begin = time.monotonic()
        try:
            with super().measure(name):
                yield
        finally:
            self.look()
            if name in _LEFT_OUT and self._is_done is None:
                self._left_out += time.monotonic() - begin

    def is_dispatched(self, is_done: Callable[[], bool]) -> None:
        """The devices have the next update. Args: is_done: tells whether it is done, at once."""
        now = time.monotonic()
        self._waited += max(0.0, now - self._idle_since - self._left_out)
        self._is_done, self._seen_under_way = is_done, now

    def look(self) -> None:
        """Looks whether the update is done, if there is one under way."""
        if self._is_done is None:
            return
        if self._is_done():
            self._is_idle_since(self._seen_under_way)
        else:
            self._seen_under_way = time.monotonic()

    def is_done_now(self) -> None:
        """The host waited for the update, which has just ended. Does nothing where it was seen to be done before."""
        if self._is_done is not None:
            self._is_idle_since(time.monotonic())

    def _is_idle_since(self, moment: float) -> None:
        self._is_done, self._idle_since, self._left_out = None, moment, 0.0

    def shares(self) -> dict[str, float]:
        """As of TimeAccount, and `devices_wait_for_host`: the share in which the devices wait for the trainer's own host work."""
        return super().shares() | {"devices_wait_for_host": self._waited / self.total()}
