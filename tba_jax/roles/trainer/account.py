"""Where a trainer's time goes, and for how much of it the devices wait for the host."""

import time

from tba_jax.run.metrics import TimeAccount

# Time between two updates that has a share of its own and is no delay of the trainer's making.
_EXCUSED = ("wait_rows", "publish", "checkpoint", "logprob_gap")


class TrainerAccount(TimeAccount):
    """A time account that also adds up the time from the result of an update to the dispatch of the next one.

    The time in which the trainer waits for rows, publishes, saves a checkpoint or compares log-probs is left out.
    """

    def __init__(self) -> None:
        super().__init__()
        self._waited, self._ready, self._excused_before = 0.0, 0.0, 0.0

    def restart(self) -> None:
        super().restart()
        self._waited, self._ready, self._excused_before = 0.0, time.monotonic(), 0.0

    def result_is_ready(self, moment: float) -> None:
        """The devices finished an update. Args: moment: when that was, seconds of time.monotonic."""
        self._ready, self._excused_before = moment, self.seconds(*_EXCUSED)

    def is_dispatched(self) -> None:
        """The devices have the next update."""
        if self._ready:
            excused = self.seconds(*_EXCUSED) - self._excused_before
            self._waited += max(0.0, time.monotonic() - self._ready - excused)
        self._ready = 0.0

    def shares(self) -> dict[str, float]:
        """As of TimeAccount, and `devices_wait_for_host`: the share in which the devices wait for the trainer's own host work."""
        return super().shares() | {"devices_wait_for_host": self._waited / self.total()}
