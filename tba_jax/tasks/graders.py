"""Rewards by a Python function that may be slow, hang or crash: worker processes call it, each call under a time limit.

Workers are fresh interpreters, since the parent runs JAX's threads, and import the function themselves. They run in sessions of
their own, so that a Ctrl-C reaches only the parent, and end with the parent, even if it is killed.
"""

import abc
import concurrent.futures
import contextlib
import functools
import importlib
import logging
import math
import multiprocessing
import operator
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import numpy as np

from tba_jax.run import processes, user_code
from tba_jax.tasks.interface import Query, Scores

log = logging.getLogger(__name__)

Grade = Callable[[Query, str], float]
# Where a worker finds a function: module, file of the module, qualified name.
Reference = tuple[str, str, str]
# The result of a call, None if it exceeded the time limit, or the reason why it failed.
Outcome = float | str | None

_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0  # seconds before the first retry, doubled with each further retry, and their limit
_TICK = 0.1  # seconds between two looks at a worker that computes
_IMPORT_SECONDS = 300.0  # time limit of a worker's start
_FLOAT32_MAX = float(np.finfo(np.float32).max)
# What a worker's interpreter runs: it finds modules where its parent does, but never runs the parent's script.
_PROGRAM = (
    "import sys; from multiprocessing.connection import Connection; calls = Connection(int(sys.argv[1])); "
    "sys.path[:] = calls.recv(); from tba_jax.tasks import graders; graders.work(calls, *calls.recv())"
)


class Graders:
    """Calls `function(query, response)` in up to `concurrency` worker processes. Several threads may call it at once.

    The first call starts the workers. A worker that exceeds the time limit or dies is replaced. grades: of all calls so far.
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
          function: at the top level of a file, or of a class there; returns a finite number, and ends processes that it starts.
          time_limit: seconds of a call before its worker is killed. retries: of a failed call, after pauses of 0.5 s, 1 s, 2 s …
          over_limit: the reward of a response whose call exceeds the time limit; NaN: such a call has failed.
          memory_megabytes: that a worker may allocate before a call raises MemoryError; 0: no limit. Only on Linux.
          prefix: of the settings' names, such as "task.math.".

        Raises ValueError: a limit is out of range, or workers could not import the function.
        """
        if not 0 < time_limit < math.inf:
            raise ValueError(f"{prefix}time_limit={time_limit} must be above 0 seconds and finite")
        if retries < 0:
            raise ValueError(f"{prefix}retries={retries} must not be negative")
        if concurrency < 1:
            raise ValueError(f"{prefix}concurrency={concurrency} must be at least 1 process")
        self._limit_setting, self._retries, self._over_limit = f"{prefix}time_limit={time_limit:g} s", retries, over_limit
        self._start = functools.partial(_Worker, refer(function), time_limit, memory_megabytes)
        self._concurrency, self._lock = concurrency, threading.Lock()
        self._pool: _Pool | None = None
        self.grades = 0

    def _count(self) -> None:
        self.grades += 1

    def graded(self, queries: Sequence[Query], responses: Sequence[str]) -> tuple[np.ndarray, str]:
        """Grades response i to query i: float32[n], NaN if every try of a call failed (by an exception, the time limit, a
        worker's death, or a result that is not a finite number), and the first failure's reason, "" without one."""
        result, late, failed = np.full(len(queries), np.nan, np.float32), list[int](), dict.fromkeys(range(len(queries)), "")
        for attempt in range(self._retries + 1 if failed else 0):
            if attempt:
                time.sleep(min(_FIRST_PAUSE * 2 ** (attempt - 1), _LONGEST_PAUSE))
            with self._lock:
                pool = self._pool = self._pool or _Pool(self._start, self._concurrency, self._count)
            tried, failed = list(failed), {}
            for i, outcome in zip(tried, pool.outcomes([(queries[i], responses[i]) for i in tried]), strict=True):
                if isinstance(outcome, float):
                    result[i] = outcome
                elif outcome is None and not math.isnan(self._over_limit):
                    result[i] = self._over_limit
                    late.append(i)
                else:
                    failed[i] = outcome or f"it took more than {self._limit_setting}"
            if not failed:
                break
        if late:
            log.warning(
                "%d of %d responses took more than %s to grade: reward %g; the first of them answers %r",
                *(len(late), len(queries), self._limit_setting, self._over_limit, queries[late[0]].prompt[:60]),
            )
        for i, reason in list(failed.items())[:1]:
            told = "%d of %d responses could not be graded: reward NaN; the first of them answers %r: %s"
            log.warning(told, len(failed), len(queries), queries[i].prompt[:60], reason)
        return result, next(iter(failed.values()), "")

    def close(self) -> None:
        """Ends the workers. Running calls fail; a later call starts new workers."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool:
            pool.close()


class GradedTask(abc.ABC):
    """A task whose reward is a function `grade` of one query and one response, called in worker processes.

    A subclass sets `grade = staticmethod(function)` with a function at the top level of its file, calls this constructor and
    implements `queries`. Other attributes: see Task.
    """

    score_name: str = "reward"
    reward_parts: tuple[str, ...] = ("reward",)
    reward_version: int = 1
    grade: Grade

    _graders: Graders | None = None

    def __init__(self, *, time_limit: float = 10.0, retries: int = 1, concurrency: int = 2):
        """Args and errors: see Graders."""
        if not hasattr(type(self), "grade"):
            raise ValueError(f"{type(self).__name__} must set grade = staticmethod(function), which grades a response")
        self._graders = Graders(type(self).grade, time_limit=time_limit, retries=retries, concurrency=concurrency)

    @property
    def grades(self) -> int:
        """How many responses have been graded so far."""
        return 0 if self._graders is None else self._graders.grades

    @abc.abstractmethod
    def queries(self, split: str) -> Sequence[Query]:
        """All queries of "train" or "heldout", in a fixed order."""

    def rewards(self, queries: Sequence[Query], responses: Sequence[str], finished: np.ndarray) -> Scores:
        """The results of `grade`, NaN for calls that failed."""
        if self._graders is None:
            raise ValueError(f"{type(self).__name__}.__init__ must call super().__init__(time_limit=…, retries=…, concurrency=…)")
        return Scores.of_one(*self._graders.graded(queries, responses))

    def worked_examples(self, rng: np.random.Generator, count: int) -> list[tuple[str, str]]:
        raise ValueError(
            f"task {type(self).__name__} has no worked examples: set model.path to a pretrained model and warm_start.steps=0"
        )

    def close(self) -> None:
        """Ends the worker processes."""
        if self._graders is not None:
            self._graders.close()


class _Pool:
    """Threads that share a queue of calls, each with a worker. The kernel ends a worker with the thread that started it."""

    def __init__(self, start: "Callable[[processes.Lifeline], _Worker]", concurrency: int, count: Callable[[], None]):
        self._start, self._count, self._lifeline = start, count, processes.Lifeline()
        self._threads = concurrent.futures.ThreadPoolExecutor(concurrency, thread_name_prefix="grades")
        self._lock, self._closed, self._lost = threading.Lock(), False, ""
        self._workers: dict[int, _Worker] = {}  # by thread

    def outcomes(self, calls: Sequence[tuple[Query, str]]) -> list[Outcome]:
        """The outcome of each call. Where one worker cannot be started, the calls that wait are not tried with another one."""
        with self._lock:
            self._lost = self._lost if self._closed else ""
            futures = [] if self._closed else [self._threads.submit(self._outcome, *call) for call in calls]
        return [future.result() for future in futures] or [self._lost] * len(calls)

    def _outcome(self, query: Query, response: str) -> Outcome:
        worker = self._worker()
        outcome = self._lost if worker is None else worker.outcome_of(query, response)
        if isinstance(outcome, float):
            self._count()
        return outcome

    def _worker(self) -> "_Worker | None":
        """This thread's worker, which has imported the function; None if it cannot be had, for the reason in `_lost`."""
        with self._lock:  # so that close() sees each worker
            worker = self._workers.get(threading.get_ident())
            if self._lost or (worker is not None and not worker.ended):
                return None if self._lost else worker
            try:
                worker = self._workers[threading.get_ident()] = self._start(self._lifeline)
            except OSError as error:
                self._lost = f"no worker process can be started: {error}"
                return None
        if worker.is_ready():
            return worker
        self._lost = self._lost or "the worker processes ended; their errors are in the output above"
        return None

    def close(self) -> None:
        """Ends the workers. Calls that run or wait fail."""
        with self._lock:
            self._closed, self._lost = True, "the worker processes were ended"
            for worker in self._workers.values():
                worker.end()
        self._threads.shutdown()
        for worker in self._workers.values():
            worker.kill()
        self._lifeline.close()


class _Worker:
    """A worker process, and this end of the pipe of its calls. One thread uses it."""

    def __init__(self, reference: Reference, time_limit: float, memory_megabytes: int, lifeline: processes.Lifeline):
        self._time_limit = time_limit
        self._calls, its = multiprocessing.Pipe()
        with its:
            command = [sys.executable, "-c", _PROGRAM, str(its.fileno())]
            fds = (its.fileno(), *lifeline.child_fds)
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=fds, start_new_session=True)
        with contextlib.suppress(OSError):  # it died, which is_ready() tells
            self._calls.send(sys.path)
            self._calls.send((reference, *lifeline.child_fds, os.getpid(), memory_megabytes))

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def is_ready(self) -> bool:
        """Whether the worker has imported the function. Waits until it has, or has ended."""
        return self._answer(_IMPORT_SECONDS) is True

    def outcome_of(self, query: Query, response: str) -> Outcome:
        """The outcome of a call. If it is no answer of the worker, the worker has ended."""
        try:
            self._calls.send((query, response))
        except OSError:  # it died
            pass
        except Exception as error:  # a query of a class of its own that cannot be pickled
            return f"{type(error).__name__}: {error}"
        return cast(Outcome, self._answer(self._time_limit))

    def _answer(self, limit: float) -> object:
        """What the worker sends; None where it takes longer than `limit` seconds; why there is no answer where it dies."""
        taken, last = 0.0, time.monotonic()
        while not self._calls.poll(_TICK):
            now = time.monotonic()
            # A longer tick is time for which this process was stopped, and could not see what the worker did.
            taken, last = taken + min(now - last, 2 * _TICK), now
            if self.ended and not self._calls.poll():
                return self._died()  # a process that it forked may hold the pipe open, which would then never end
            if taken > limit:
                self.kill()
                return None
        try:
            return self._calls.recv()
        except (EOFError, OSError):
            return self._died()

    def _died(self) -> str:
        self.kill()
        return f"its worker process died with code {self._process.returncode}"

    def end(self) -> None:
        """Kills the process. Any thread may call this; the worker's own thread then sees that it died."""
        self._process.kill()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._calls.close()


def work(calls: Connection, reference: Reference, lifeline: int, parent: int, memory_megabytes: int) -> None:
    """The worker: answers calls until it is killed. It says True when it is ready for the first.

    Args: lifeline: a pipe whose only writer is the parent; parent: its process id.
    """
    processes.die_with(lifeline, parent=parent)
    if memory_megabytes and sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_DATA, (memory_megabytes * 2**20,) * 2)
    with contextlib.suppress(BaseException):  # each call raises this error again, and the parent reports it
        find(reference)  # the import does not count against a call's time limit
    calls.send(True)
    with contextlib.suppress(EOFError, OSError):  # the parent is gone
        while True:
            query, response = calls.recv()
            calls.send(_call(reference, query, response))


def _call(reference: Reference, query: Query, response: str) -> float | str:
    """Runs one call in a worker. Returns its result, or an error as text, since the parent may not know the exception's class."""
    try:
        value: float = find(reference)(query, response)
        if not isinstance(value, int | float | np.number | np.bool_) or not abs(value) <= _FLOAT32_MAX:
            return f"{reference[2]} returned {repr(value)[:60]}, not a finite number"
        return float(value)
    except BaseException as error:
        return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def refer(function: Callable[..., Any], *, called: str = "the grading function") -> Reference:
    """Where workers find a function. Raises ValueError if they could not import it."""
    name, module = getattr(function, "__qualname__", ""), sys.modules.get(getattr(function, "__module__", ""))
    file = getattr(module, "__file__", None)
    if not name or "<" in name or module is None or file is None:
        raise ValueError(f"{called} {name or str(function)!r} must stand at the top level of a file: worker processes import it")
    return module.__name__, str(Path(file).resolve()), name


@functools.cache
def find(reference: Reference) -> Any:
    """Imports a function or a class: its module by name if that is the same file, else from the file."""
    name, file, qualified = reference
    module = None
    with contextlib.suppress(ModuleNotFoundError):  # of a file that Python does not find by name
        module = importlib.import_module(name)
    if module is None or str(Path(getattr(module, "__file__", None) or "").resolve()) != file:
        module = user_code.load(Path(file), f"graded_{Path(file).stem}", called=f"the file of {qualified}")
    return operator.attrgetter(qualified)(module)
