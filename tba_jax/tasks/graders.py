"""Rewards by a Python function that may be slow, hang or crash: worker processes call it, each call under a time limit.

grading_workers.py has the workers.
"""

import abc
import logging
import math
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from tba_jax.tasks.grading_workers import Grade, Pool, Reference
from tba_jax.tasks.interface import Query, Scores

log = logging.getLogger(__name__)


_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0  # seconds before the first retry, doubled with each further retry, and their limit


class Graders:
    """Calls `function(query, response)` in up to `concurrency` worker processes. Several threads may call it at once.

    The first call starts the workers. A worker that exceeds the time limit or dies is replaced.
    """

    def __init__(
        self,
        function: Grade,
        *,
        time_limit: float,
        retries: int,
        concurrency: int,
        over_limit: float = math.nan,
        memory_megabytes: int = 0,
        prefix: str = "",
    ):
        """Args:
          function: a function at the top level of a file, or of a class there, that returns a finite number. If it starts
            processes, it has to end them: killing its worker does not.
          time_limit: seconds that a call may take before its worker is killed. The time for which this process or the worker is
            stopped (SIGSTOP) does not count; elsewhere than on Linux, a stopped worker's does.
          retries: how often a failed call is repeated, after pauses of 0.5 s, 1 s, 2 s …
          over_limit: the reward of a response whose call exceeds the time limit; NaN: such a call has failed.
          memory_megabytes: memory that a worker may allocate before a call raises MemoryError; 0: no limit. Only on Linux.
          prefix: beginning of the settings' names in messages, such as "task.math.".

        Raises:
          ValueError: a limit is out of range, or workers could not import the function.
        """
        if not 0 < time_limit < math.inf:
            raise ValueError(f"{prefix}time_limit={time_limit} must be above 0 seconds and finite")
        if retries < 0:
            raise ValueError(f"{prefix}retries={retries} must not be negative")
        if concurrency < 1:
            raise ValueError(f"{prefix}concurrency={concurrency} must be at least 1 process")
        self._reference = _refer(function)
        self._time_limit, self._retries, self._concurrency = time_limit, retries, concurrency
        self._over_limit, self._memory_megabytes, self._prefix = over_limit, memory_megabytes, prefix
        self._lock = threading.Lock()
        self._pool: Pool | None = None
        self._grades = 0

    @property
    def grades(self) -> int:
        """How many calls have given a grade so far."""
        return self._grades

    def _count(self) -> None:
        self._grades += 1

    def __call__(self, queries: Sequence[Query], responses: Sequence[str]) -> np.ndarray:
        """float32[n]: the grades of response i to query i; see `graded`."""
        return self.graded(queries, responses)[0]

    def graded(self, queries: Sequence[Query], responses: Sequence[str]) -> tuple[np.ndarray, str]:
        """Grades response i to query i.

        Returns:
          float32[n]; NaN if every try of a call failed: by an exception, the time limit, a worker's death, or a result that is
          not a finite number. One warning gives the number of such calls and the first one's reason, which is returned as well,
          "" where no call failed.
        """
        result = np.full(len(queries), np.nan, np.float32)
        late: list[int] = []
        failed = dict.fromkeys(range(len(queries)), "")
        for attempt in range(self._retries + 1):
            if not failed:
                break
            if attempt:
                time.sleep(min(_FIRST_PAUSE * 2 ** (attempt - 1), _LONGEST_PAUSE))
            calls = {i: (queries[i], responses[i]) for i in failed}
            failed = {}
            for i, outcome in zip(calls, self._running_pool().outcomes(list(calls.values()), self._count), strict=True):
                if isinstance(outcome, float):
                    result[i] = outcome
                elif outcome is None and not math.isnan(self._over_limit):
                    result[i] = self._over_limit
                    late.append(i)
                else:
                    failed[i] = outcome or f"it took more than {self._prefix}time_limit={self._time_limit:g} s"
        self._warn(queries, late, failed)
        return result, next(iter(failed.values()), "")

    def _warn(self, queries: Sequence[Query], late: Sequence[int], failed: Mapping[int, str]) -> None:
        n, limit = len(queries), f"{self._prefix}time_limit={self._time_limit:g} s"
        if late:
            log.warning(
                "%d of %d responses took more than %s to grade: reward %g; the first of them answers %r",
                *(len(late), n, limit, self._over_limit, queries[late[0]].prompt[:60]),
            )
        if failed:
            i, reason = next(iter(failed.items()))
            log.warning(
                "%d of %d responses could not be graded: reward NaN; the first of them answers %r: %s",
                *(len(failed), n, queries[i].prompt[:60], reason),
            )

    def close(self) -> None:
        """Ends the workers. Running calls fail; a later call starts new workers."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool:
            pool.close()

    def _running_pool(self) -> Pool:
        with self._lock:
            if self._pool is not None and not self._pool.usable:
                self._pool.close()
                self._pool = None
            if self._pool is None:
                self._pool = Pool(
                    self._reference,
                    concurrency=self._concurrency,
                    time_limit=self._time_limit,
                    memory_megabytes=self._memory_megabytes,
                )
            return self._pool


class GradedTask(abc.ABC):
    """A task whose reward is a function `grade` of one query and one response, called in worker processes.

    A subclass sets `grade = staticmethod(function)` with a function at the top level of its file, calls this constructor and
    implements `queries`. For `score_name`, `reward_parts` (one name) and `reward_version` see Task.
    """

    score_name: str = "reward"
    reward_parts: tuple[str, ...] = ("reward",)
    reward_version: int = 1
    grade: Grade

    _graders: Graders | None = None

    def __init__(self, *, time_limit: float = 10.0, retries: int = 1, concurrency: int = 2):
        """Args and errors: see Graders."""
        if not hasattr(type(self), "grade"):
            raise ValueError(
                f"{type(self).__name__} must set grade = staticmethod(function), the function that grades a response"
            )
        self._graders = Graders(type(self).grade, time_limit=time_limit, retries=retries, concurrency=concurrency)

    @property
    def grades(self) -> int:
        """How many responses have been graded so far."""
        return 0 if self._graders is None else self._graders.grades

    @abc.abstractmethod
    def queries(self, split: str) -> Sequence[Query]:
        """All queries of "train" or "heldout", in a fixed order."""

    def rewards(self, queries: Sequence[Query], responses: Sequence[str], finished: np.ndarray) -> Scores:
        """The results of `grade`, NaN for calls that failed. finished: bool[n], ignored."""
        if self._graders is None:
            raise ValueError(f"{type(self).__name__}.__init__ must call super().__init__(time_limit=…, retries=…, concurrency=…)")
        reward, failure = self._graders.graded(queries, responses)
        return Scores(reward=reward, parts=reward[:, None], failure=failure)

    def worked_examples(self, rng: np.random.Generator, count: int) -> list[tuple[str, str]]:
        raise ValueError(
            f"task {type(self).__name__} has no worked examples: set model.path to a pretrained model and warm_start.steps=0"
        )

    def close(self) -> None:
        """Ends the worker processes."""
        if self._graders is not None:
            self._graders.close()


def _refer(function: Grade) -> Reference:
    """Where workers find a function. Raises ValueError if they could not import it."""
    name, module = getattr(function, "__qualname__", ""), sys.modules.get(getattr(function, "__module__", ""))
    file = getattr(module, "__file__", None)
    if not name or "<" in name or module is None or file is None:
        raise ValueError(
            f"the grading function {name or str(function)!r} must stand at the top level of a file: worker processes import it"
        )
    return module.__name__, str(Path(file).resolve()), name
