"""Whether a searcher's rows get rewards: where they do not, it says so, writes few useless rows, and gives up at last."""

import time
from collections.abc import Callable

from tba_jax.roles.searcher.appender import SearchReport
from tba_jax.run.processes import NoRewards

# The searcher pauses after this many batches in a row in which no row has a reward.
_BATCHES = 3
# Seconds of the first pause, after which one batch is tried; each further pause is twice as long, up to the longest.
FIRST_PAUSE, LONGEST_PAUSE = 5.0, 60.0
# Batches that have waited longer than this for their rewards are a trouble.
_SLOW_SECONDS = 20.0


class RewardWatch:
    """Looks at the batches that a searcher has appended, and at those that wait for their rewards."""

    def __init__(self, *, give_up_seconds: float, clock: Callable[[], float] = time.monotonic):
        """Args: give_up_seconds: searchers.give_up_seconds."""
        self._give_up_seconds, self._clock = give_up_seconds, clock
        self._rows = self._unscored = 0
        self._reason = ""
        # Batches without a reward since the last that had some; when the first of them came; the next try.
        self._streak, self._since, self._next = 0, 0.0, 0.0
        self._waiting, self._waits_since, self._grades = 0, clock(), 0

    def note(self, report: SearchReport) -> None:
        """A batch was appended."""
        self._rows, self._unscored = self._rows + report.rows, self._unscored + report.unscored
        self._waits_since = now = self._clock()
        self._reason = self._reason or report.failure
        self._since = self._since if self._streak else now
        self._streak = 0 if report.unscored < report.rows else self._streak + 1
        self._next = now + min(FIRST_PAUSE * 2 ** min(max(self._streak - _BATCHES, 0), 99), LONGEST_PAUSE)

    def look(self, *, waiting: int, grades: int = 0) -> None:
        """Looks at how many batches wait for their rewards. Raises NoRewards where no reward has come for too long.

        Args: grades: how many responses the task has graded so far, if it counts them (tasks.interface.CountsGrades).
        """
        if not (waiting and self._waiting) or grades > self._grades:
            self._waits_since = self._clock()
        self._waiting, self._grades = waiting, grades
        limit = f"searchers.give_up_seconds={self._give_up_seconds:g}"
        if self._waited > self._give_up_seconds:
            raise NoRewards(f"{self._slow}, and none came within {limit}; raise it if rewards take so long")
        if self._streak and self._clock() - self._since > self._give_up_seconds:
            raise NoRewards(f"{self.trouble}; nothing has had a reward for {limit}")

    @property
    def may_search(self) -> bool:
        """Whether another batch is to be decoded: not where the last had no rewards, until it is time for another try."""
        return self._streak < _BATCHES or (not self._waiting and self._clock() >= self._next)

    @property
    def _waited(self) -> float:
        """Seconds for which batches have waited without any of them being done."""
        return self._clock() - self._waits_since if self._waiting else 0.0

    @property
    def _slow(self) -> str:
        return f"{self._waiting} batches have waited {self._waited:.0f} s for their rewards"

    @property
    def trouble(self) -> str:
        """One sentence that names the trouble with rewards, "" if there is none."""
        if self._waited > _SLOW_SECONDS:
            return self._slow
        if not self._unscored:
            return ""
        which = "no row has a" if self._unscored == self._rows else f"{'the last' if self._streak else 'some'} rows have no"
        pause = "; the searcher pauses, and tries a batch now and then" if self._streak >= _BATCHES else ""
        reason = f", {self._reason}" if self._reason else ""
        return f"{which} reward: {self._unscored:,} of {self._rows:,} failed{reason}{pause}"
