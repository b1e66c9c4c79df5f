"""Rewards by a Python function that may be slow, hang or crash: worker processes call it, each call under a time limit.

Workers are spawned, never forked, since the parent runs JAX's threads; they import the function themselves. They run in sessions
of their own, so that a Ctrl-C reaches only the parent. They end when the parent ends, even if it is killed.
"""

import abc
import concurrent.futures
import functools
import importlib
import importlib.util
import logging
import math
import multiprocessing.connection
import multiprocessing.context
import operator
import os
import resource
import signal
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tba_jax.run import processes
from tba_jax.tasks.interface import Query, Scores

log = logging.getLogger(__name__)

Grade = Callable[[Query, str], float]
# Where a worker finds a function: module, file of the module, qualified name.
Reference = tuple[str, str, str]

_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0  # seconds before the first retry, doubled with each further retry, and their limit
_GRACE = 3.0  # seconds beyond the time limit after which a worker without a parent ends by itself
_STALLED = 300.0  # seconds beyond the time limit without any result, after which the workers are replaced
_FLOAT32_MAX = float(np.finfo(np.float32).max)


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
          time_limit: seconds that a call may take before its worker is killed.
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
        self._pool: _Pool | None = None
        self._grades = 0

    @property
    def grades(self) -> int:
        """How many calls have given a grade so far."""
        return self._grades

    def _count(self, call: "concurrent.futures.Future[float | str]") -> None:
        if not call.cancelled() and call.exception() is None and isinstance(call.result(), float):
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

    def _running_pool(self) -> "_Pool":
        with self._lock:
            if self._pool is not None and not self._pool.usable:
                self._pool.close()
                self._pool = None
            if self._pool is None:
                self._pool = _Pool(
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


class _Pool:
    """Worker processes that share a queue of calls."""

    def __init__(self, reference: Reference, *, concurrency: int, time_limit: float, memory_megabytes: int):
        import pebble

        self._reference, self._time_limit = reference, time_limit
        self._progress = time.monotonic()
        self._stalled = False
        self._context = _Context()
        # Workers read from this pipe, whose only writer is the parent. They end when the parent's death closes it.
        self._lifeline, self._alive = self._context.Pipe(duplex=False)
        self._processes = pebble.ProcessPool(
            max_workers=concurrency,
            initializer=_begin,
            initargs=(self._lifeline, reference, memory_megabytes),
            context=self._context,
        )
        _ = self.usable  # starts the workers

    @property
    def usable(self) -> bool:
        return self._processes.active and not self._stalled

    def outcomes(
        self, calls: Sequence[tuple[Query, str]], done: "Callable[[concurrent.futures.Future[float | str]], None]"
    ) -> list[float | str | None]:
        """For each call its result, None if it exceeded the time limit, or the reason why it failed. done: told of each call."""
        futures: list[concurrent.futures.Future[float | str]] = []
        lost = "the worker processes ended; their errors are in the output above"
        self._progress = time.monotonic()
        try:
            for query, response in calls:
                arguments = (self._reference, query, response, self._time_limit)
                futures.append(self._processes.schedule(_call, args=arguments, timeout=self._time_limit))
                futures[-1].add_done_callback(self._note_progress)
                futures[-1].add_done_callback(done)
        except RuntimeError as error:  # the pool was closed, or all workers died
            lost = str(error)
        waiting = set(futures)
        # Futures stay pending for ever in a broken pool, and if a worker dies before it acknowledges a call.
        while waiting and self.usable:
            _, waiting = concurrent.futures.wait(waiting, timeout=1.0)
            self._stalled |= time.monotonic() - self._progress > self._time_limit + _STALLED
        outcomes = [_outcome(future) if future.done() else lost for future in futures]
        return outcomes + [lost] * (len(calls) - len(futures))

    def _note_progress(self, _: object) -> None:
        self._progress = time.monotonic()

    def close(self) -> None:
        self._processes.stop()
        self._context.end()
        self._processes.join()
        self._alive.close()
        self._lifeline.close()


def _outcome(future: "concurrent.futures.Future[float | str]") -> float | str | None:
    """See _Pool.outcomes."""
    if future.cancelled():
        return "its worker process was ended"
    error = future.exception()
    if error is None:
        return future.result()
    if isinstance(error, TimeoutError):
        return None
    code = getattr(error, "exitcode", None)
    return f"its worker process died with code {code}" if code is not None else f"{type(error).__name__}: {error}"


class _Process(multiprocessing.context.SpawnProcess):
    """A spawned process that does not import the parent's main module, which multiprocessing would do."""

    context: "_Context"

    def start(self) -> None:
        with _STARTING:
            if self.context.ended:
                raise OSError("the workers are being ended")
            main = sys.modules["__main__"]
            sys.modules["__main__"] = types.ModuleType("__main__")
            try:
                _starter(super().start)
            finally:
                sys.modules["__main__"] = main
            self.context.started.add(self)

    def __getstate__(self) -> dict[str, Any]:
        """The attributes without the context, which stays in the parent."""
        return {name: value for name, value in self.__dict__.items() if name != "context"}


_STARTING = threading.Lock()
_PARENTS_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# A worker inherits blocked signals, so it never receives signals that are meant for its parent.
_starter = processes.Starter(blocked=_PARENTS_SIGNALS)


class _Context(multiprocessing.context.SpawnContext):
    """Keeps the processes that it made, so that they can be killed at any moment, even while workers start."""

    def __init__(self) -> None:
        super().__init__()
        self.started: weakref.WeakSet[_Process] = weakref.WeakSet()
        self.ended = False

    def Process(self, *args: Any, **kwargs: Any) -> _Process:  # type: ignore[override]
        process = _Process(*args, **kwargs)
        process.context = self
        return process

    def end(self) -> None:
        with _STARTING:
            self.ended = True
            for process in self.started:
                process.kill()


def _refer(function: Grade) -> Reference:
    """Where workers find a function. Raises ValueError if they could not import it."""
    name, module = getattr(function, "__qualname__", ""), sys.modules.get(getattr(function, "__module__", ""))
    file = getattr(module, "__file__", None)
    if not name or "<" in name or module is None or file is None:
        raise ValueError(
            f"the grading function {name or str(function)!r} must stand at the top level of a file: worker processes import it"
        )
    return module.__name__, str(Path(file).resolve()), name


def _begin(parent: multiprocessing.connection.Connection, reference: Reference, memory_megabytes: int) -> None:
    """Prepares a worker before its first call."""
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # discards a pending signal
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _PARENTS_SIGNALS)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # ends the process at once, even during a long call into C
    started_by = multiprocessing.parent_process()
    assert started_by is not None and started_by.pid is not None
    processes.die_with(os.dup(parent.fileno()), parent=started_by.pid)
    if memory_megabytes and sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_DATA, (memory_megabytes * 2**20,) * 2)
    try:
        _find(reference)  # the import does not count against a call's time limit
    except BaseException:
        log.debug("grading function", exc_info=True)  # each call raises this error again, and the parent reports it


@functools.cache
def _find(reference: Reference) -> Grade:
    """Imports a function: its module by name if that is the same file, else from the file."""
    name, file, qualified = reference
    return operator.attrgetter(qualified)(_module(name, file))


def _module(name: str, file: str) -> Any:
    try:
        module = importlib.import_module(name)
        if str(Path(module.__file__ or "").resolve()) == file:
            return module
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
    except AttributeError:  # the worker's own __main__ has no file
        pass
    spec = importlib.util.spec_from_file_location(f"graded_{Path(file).stem}", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _call(reference: Reference, query: Query, response: str, time_limit: float) -> float | str:
    """Runs one call in a worker. Returns its result, or an error as text, since the parent may not know the exception's class."""
    # If the parent is gone while C code holds the interpreter's lock, only a signal of the kernel can end this process.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, time_limit + _GRACE)
    try:
        value = _find(reference)(query, response)
        if not isinstance(value, int | float | np.number | np.bool_) or not abs(value) <= _FLOAT32_MAX:
            return f"{reference[2]} returned {repr(value)[:60]}, not a finite number"
        return float(value)
    except BaseException as error:
        return " ".join(f"{type(error).__name__}: {error}".split())[:300]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
