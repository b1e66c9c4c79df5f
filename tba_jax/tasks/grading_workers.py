"""The worker processes of graders: a pool whose workers take calls in turn, each call under a time limit.

Workers are fresh interpreters, never forks, since the parent runs JAX's threads; they import the function themselves. They run in
sessions of their own, so that a Ctrl-C reaches only the parent. They end when the parent ends, even if it is killed.
"""

import concurrent.futures
import contextlib
import functools
import importlib
import importlib.util
import logging
import math
import multiprocessing
import operator
import os
import queue
import resource
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import numpy as np

from tba_jax.run import processes
from tba_jax.tasks.interface import Query

log = logging.getLogger(__name__)

Grade = Callable[[Query, str], float]
# Where a worker finds a function: module, file of the module, qualified name.
Reference = tuple[str, str, str]
# The result of a call, None if it exceeded the time limit, or the reason why it failed.
Outcome = float | str | None
_Future = concurrent.futures.Future[Outcome]

_TICK = 0.1  # seconds between two looks at a worker that computes
_GRACE = 3.0  # seconds beyond the time limit after which a worker without a parent ends by itself
_STALLED = 300.0  # seconds beyond the time limit, stops of the worker included, after which a worker is replaced
_LOST = "the worker processes ended; their errors are in the output above"
_FLOAT32_MAX = float(np.finfo(np.float32).max)
# What a worker's interpreter runs: it finds modules where its parent does, but never runs the parent's script.
_PROGRAM = (
    "import sys; from multiprocessing.connection import Connection; calls = Connection(int(sys.argv[1])); "
    "sys.path[:] = calls.recv(); from tba_jax.tasks import grading_workers; grading_workers.work(calls, *calls.recv())"
)


class Pool:
    """Worker processes that share a queue of calls. A worker that exceeds the time limit or dies is replaced.

    A worker that dies before it has imported the function makes the pool unusable: the next one would die, too.
    """

    def __init__(self, reference: Reference, *, concurrency: int, time_limit: float, memory_megabytes: int):
        """Starts the workers. Args: see graders.Graders."""
        self._reference, self._time_limit, self._memory_megabytes = reference, time_limit, memory_megabytes
        self._lock, self._lost = threading.Lock(), ""
        self._calls: queue.SimpleQueue[tuple[Query, str, _Future] | None] = queue.SimpleQueue()
        self._lifeline = processes.Lifeline()
        self._workers: weakref.WeakSet[_Worker] = weakref.WeakSet()
        # The kernel ends a worker with the thread that started it, so each worker has a thread that outlives it.
        self._threads = [threading.Thread(target=self._serve, name="grades", daemon=True) for _ in range(concurrency)]
        for thread in self._threads:
            thread.start()

    @property
    def usable(self) -> bool:
        return not self._lost

    def outcomes(self, calls: Sequence[tuple[Query, str]], done: Callable[[], None]) -> list[Outcome]:
        """The outcome of each call. done: called after each call that has a result."""
        outcomes = [_Future() for _ in calls]
        with self._lock:
            for (query, response), outcome in zip(calls, outcomes, strict=True):
                outcome.add_done_callback(lambda ended: done() if isinstance(ended.result(), float) else None)
                if self._lost:
                    outcome.set_result(self._lost)
                else:
                    self._calls.put((query, response, outcome))
        return [outcome.result() for outcome in outcomes]

    def close(self) -> None:
        """Ends the workers. Calls that run or wait fail."""
        self._lose("its worker process was ended")
        for worker in list(self._workers):
            worker.end()
        for thread in self._threads:
            thread.join()
        self._lifeline.close()

    def _lose(self, reason: str) -> None:
        """Makes the pool unusable: calls that wait end with this reason, and so do later ones."""
        with self._lock:
            self._lost = self._lost or reason
            with contextlib.suppress(queue.Empty):  # a worker's thread may take a call meanwhile
                while True:
                    if call := self._calls.get_nowait():
                        call[2].set_result(self._lost)
            for _ in self._threads:
                self._calls.put(None)

    def _serve(self) -> None:
        """One thread for each worker: hands it calls, and replaces it."""
        worker = None
        while not self._lost:
            if worker is None or worker.ended:
                worker = self._started()
            if worker is None or (call := self._calls.get()) is None:
                break
            if worker.ended:  # while it had nothing to do
                worker = self._started()
            query, response, outcome = call
            outcome.set_result(worker.outcome_of(query, response) if worker else self._lost)
        if worker is not None:
            worker.kill()

    def _started(self) -> "_Worker | None":
        """A worker that has imported the function; None, and the pool is unusable, if it cannot be had."""
        try:
            with self._lock:  # so that close() sees each worker, or none is started
                if self._lost:
                    return None
                worker = _Worker(self._reference, self._lifeline, self._time_limit, self._memory_megabytes)
                self._workers.add(worker)
        except OSError as error:
            self._lose(f"no worker process can be started: {error}")
            return None
        if worker.is_ready():
            return worker
        worker.kill()
        self._lose(_LOST)
        return None


class _Worker:
    """A worker process, and this end of the pipe of its calls. One thread uses it."""

    def __init__(self, reference: Reference, lifeline: processes.Lifeline, time_limit: float, memory_megabytes: int):
        self._time_limit = time_limit
        self._calls, its = multiprocessing.Pipe()
        with its:
            command = [sys.executable, "-c", _PROGRAM, str(its.fileno())]
            fds = (its.fileno(), *lifeline.child_fds)
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=fds, start_new_session=True)
        with contextlib.suppress(OSError):  # it died, which is_ready() tells
            self._calls.send(sys.path)
            self._calls.send((reference, *lifeline.child_fds, os.getpid(), time_limit, memory_megabytes))

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def is_ready(self) -> bool:
        """Whether the worker has imported the function. Waits until it has, or has died."""
        return self._answer(limit=math.inf) is True

    def outcome_of(self, query: Query, response: str) -> Outcome:
        """The outcome of a call. If it is no answer of the worker, the worker has ended."""
        try:
            self._calls.send((query, response))
        except OSError:  # it died
            pass
        except Exception as error:  # a query of a class of its own that cannot be pickled
            return f"{type(error).__name__}: {error}"
        return cast(Outcome, self._answer(limit=self._time_limit))

    def _answer(self, *, limit: float) -> object:
        """What the worker sends; None where it takes longer than `limit`, in seconds; why there is no answer where it dies."""
        taken = total = 0.0
        last = time.monotonic()
        while not self._calls.poll(_TICK):
            now = time.monotonic()
            # A longer tick is time for which this process was stopped, and could not see what the worker did.
            tick, last = min(now - last, 2 * _TICK), now
            total += tick
            taken += 0.0 if _is_stopped(self._process.pid) else tick
            if self.ended and not self._calls.poll():
                return self._died()  # a process that it forked may hold the pipe open, which would then never end
            if taken > limit:
                self.kill()
                return None
            if total > self._time_limit + _STALLED:
                self.kill()
                return f"its worker process did nothing for {total:.0f} s, and was ended"
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


def _is_stopped(pid: int) -> bool:
    """Whether a process is stopped, by a signal or a debugger. Only Linux tells."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] in (b"T", b"t")
    except (OSError, IndexError):
        return False


def work(calls: Connection, reference: Reference, lifeline: int, parent: int, time_limit: float, memory_megabytes: int) -> None:
    """The worker: answers calls until it is killed. It says True when it is ready for the first.

    Args: lifeline: a pipe whose only writer is the parent; parent: its process id.
    """
    processes.die_with(lifeline, parent=parent)
    if memory_megabytes and sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_DATA, (memory_megabytes * 2**20,) * 2)
    try:
        _find(reference)  # the import does not count against a call's time limit
    except BaseException:
        log.debug("grading function", exc_info=True)  # each call raises this error again, and the parent reports it
    calls.send(True)
    with contextlib.suppress(EOFError, OSError):  # the parent is gone
        while True:
            query, response = calls.recv()
            calls.send(_call(reference, query, response, time_limit))


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
    if sys.platform != "linux":
        # If the parent is gone while C code holds the interpreter's lock, only a signal of the kernel can end this process. On
        # Linux the kernel sends it when the parent dies; a timer would also end a process that was stopped for a while.
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
