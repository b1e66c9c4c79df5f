"""What keeps a run going where rows do not come: a trainer that has waited too long publishes, or lets searchers go on.

A searcher leaves with part of its quota, rewards fail, rows grow too old: then the trainer waits for rows, and searchers with
backpressure wait for a newer snapshot. Newer weights end both waits. Where nothing was trained since the last snapshot there are
none, and a grant ends the searchers' wait (run/grants.py).
"""

import time
from collections.abc import Callable


class Relief:
    """Counts how long a trainer has waited, and brings relief each time another `seconds` have passed without a step."""

    def __init__(
        self,
        *,
        seconds: float,
        publish: Callable[[], bool],
        grant: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ):
        """Args:
        seconds: publish.at_most_seconds.
        publish: publishes the weights unless they are published; returns whether it did. grant: lets waiting searchers go on.
        """
        self._seconds, self._publish, self._grant, self._clock = seconds, publish, grant, clock
        self._since: float | None = None
        self._next = 0.0

    @property
    def waited(self) -> float:
        """Seconds since the trainer began to wait; 0 where it does not."""
        return 0.0 if self._since is None else self._clock() - self._since

    @property
    def due_in(self) -> float:
        """Seconds until the next relief."""
        return max(0.0, self._next - self._clock())

    def stepped(self) -> None:
        """The trainer does a step: nothing is waited for."""
        self._since = None

    def waits(self) -> bool:
        """The trainer finds too few rows. Brings relief where that is so for long enough; returns whether it did now."""
        now = self._clock()
        if self._since is None:
            self._since, self._next = now, now + self._seconds
        if now < self._next:
            return False
        self._next = now + self._seconds
        if not self._publish():
            self._grant()
        return True
