"""Tasks of several turns: environments that answer the policy, in worker processes.

An environment is a class with two methods, at the top level of a file:

    class Guess:
        def start(self, query):            # one object for each response; what it returns is the prompt, see EnvironmentTask
            self.secret = query.answer

        def step(self, message):           # a turn of the policy -> (what the policy reads next, or None at the end; reward)
            return (None, 1.0) if message.strip() == self.secret else ("no\\n", 0.0)

What the policy reads is a text, or messages {"role", "content"}. The reward of a response is the sum over its steps. Attributes
`tool_calls` and `errors`, where it has them, count calls of tools and messages that it could not read.

Many environments live in one worker, each in a thread of its own, so that those that wait (for a server, for a tool) do not keep
others waiting. Workers are fresh interpreters, which import the class themselves and end with their parent. A step that exceeds
the time limit fails its response alone: its worker is given no further environments, and is killed when the others have ended.
"""

import abc
import contextlib
import dataclasses
import itertools
import logging
import math
import multiprocessing
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from multiprocessing.connection import Connection
from typing import Any, Protocol, runtime_checkable

import numpy as np

from tba_jax.run import processes
from tba_jax.tasks import graders
from tba_jax.tasks.interface import Query, Scores

log = logging.getLogger(__name__)

Message = dict[str, str]

_TICK = 0.1  # seconds between two looks at a worker that computes
_PROGRAM = (
    "import sys; from multiprocessing.connection import Connection; calls = Connection(int(sys.argv[1])); "
    "sys.path[:] = calls.recv(); from tba_jax.tasks import environments; environments.work(calls, *calls.recv())"
)


class Environment(Protocol):
    """See the module."""

    def start(self, query: Query) -> Any: ...

    def step(self, message: str) -> tuple[Any, float]: ...


@dataclasses.dataclass(frozen=True)
class Answer:
    """What an environment has answered. messages: what the policy reads next; done: whether the response has ended; reward: of
    this step. tool_calls, errors: so far. failure: why there is no answer, "" where there is one."""

    messages: list[Message] = dataclasses.field(default_factory=list)
    done: bool = False
    reward: float = 0.0
    tool_calls: int = 0
    errors: int = 0
    failure: str = ""


class Session:
    """An environment of one response. Its calls are done in their order."""

    def __init__(self, worker: "_Worker", number: int):
        self._worker, self._number = worker, number

    def step(self, message: str) -> Future[Answer]:
        return self._worker.call(self._number, "step", message)

    def close(self) -> None:
        """Nothing is called any more."""
        self._worker.end_session(self._number)


class Environments:
    """Environments of one class. Several threads may call it at once; the first call starts the workers.

    Attributes: settings: arguments of the class.
    """

    def __init__(
        self, environment: Callable[..., Environment], settings: Mapping[str, Any], *, time_limit: float, concurrency: int
    ):
        """Args: time_limit: seconds of a call; concurrency: worker processes.

        Raises ValueError: a limit is out of range, or workers could not import the class.
        """
        if not 0 < time_limit < math.inf:
            raise ValueError(f"time_limit={time_limit} must be above 0 seconds and finite")
        if concurrency < 1:
            raise ValueError(f"concurrency={concurrency} must be at least 1 process")
        self._reference = graders.refer(environment, called="the environment")
        self.settings, self._time_limit = dict(settings), time_limit
        self._workers: list[_Worker | None] = [None] * concurrency
        self._numbers, self._lock, self._lifeline = itertools.count(), threading.Lock(), processes.Lifeline()

    def start(self, query: Query) -> tuple[Session, Future[Answer]]:
        """A new environment, and what its `start` returns."""
        with self._lock:
            number = next(self._numbers)
            place = number % len(self._workers)
            worker = self._workers[place]
            if worker is None or worker.is_retired:
                worker = _Worker(self._reference, self.settings, self._time_limit, self._lifeline)
                self._workers[place] = worker
        return Session(worker, number), worker.call(number, "start", query)

    def close(self) -> None:
        """Ends the workers: calls under way fail."""
        with self._lock:
            for worker in filter(None, self._workers):
                worker.kill()
            self._workers = [None] * len(self._workers)


class _Worker:
    """A worker process, and this end of the pipe of its calls."""

    def __init__(
        self, reference: graders.Reference, settings: Mapping[str, Any], time_limit: float, lifeline: processes.Lifeline
    ):
        self._time_limit, self.is_retired = time_limit, False
        # Session -> the call that it does, and until when, once the worker is ready. Sessions that are open.
        self._pending: dict[int, tuple[Future[Answer], float]] = {}
        self._open: set[int] = set()
        self._lock = threading.Lock()
        self._calls, its = multiprocessing.Pipe()
        with its:
            command = [sys.executable, "-c", _PROGRAM, str(its.fileno())]
            fds = (its.fileno(), *lifeline.child_fds)
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=fds, start_new_session=True)
        with contextlib.suppress(OSError):  # it died, which the thread tells
            self._calls.send(sys.path)
            self._calls.send((reference, dict(settings), *lifeline.child_fds, os.getpid()))
        threading.Thread(target=self._listen, name="environments", daemon=True).start()

    def call(self, session: int, kind: str, argument: Any) -> Future[Answer]:
        future: Future[Answer] = Future()
        with self._lock:
            self._open.add(session)
            self._pending[session] = future, time.monotonic() + self._time_limit
            try:
                self._calls.send((session, kind, argument))
            except OSError:  # it died, which the thread tells
                if self.is_retired:
                    self._answer(session, Answer(failure="its worker process died"))
            except Exception as error:  # a query of a class of its own that cannot be pickled
                self._answer(session, Answer(failure=f"{type(error).__name__}: {error}"))
        return future

    def end_session(self, session: int) -> None:
        with self._lock:
            self._open.discard(session)
            self._pending.pop(session, None)
            with contextlib.suppress(OSError):
                self._calls.send((session, "end", None))
            if self.is_retired and not self._open:
                self.kill()

    def kill(self) -> None:
        self.is_retired = True
        self._process.kill()

    def _answer(self, session: int, answer: Answer) -> None:
        if (pending := self._pending.pop(session, None)) is not None:
            pending[0].set_result(answer)

    def _listen(self) -> None:
        """Takes answers until the worker has died."""
        ready, looked = False, time.monotonic()
        while True:
            try:
                if self._calls.poll(_TICK):
                    told = self._calls.recv()
                    ready, session, answer = (True, None, None) if told is True else (ready, *told)
                    with self._lock:
                        if session is not None:
                            self._answer(session, answer)
                elif self._process.poll() is not None:
                    break
            except (EOFError, OSError):
                break
            if (now := time.monotonic()) - looked < _TICK:
                continue
            # Neither the import counts, nor time for which this process was stopped.
            slack, looked = now - looked - 2 * _TICK if ready else now - looked, now
            with self._lock:
                for session, (future, until) in list(self._pending.items()):
                    if slack > 0:
                        self._pending[session] = future, until + slack
                    elif now > until:
                        self.is_retired = True
                        self._open.discard(session)
                        self._answer(session, Answer(failure=f"it took more than {self._time_limit:g} s (time_limit)"))
                if self.is_retired and not self._open:
                    self._process.kill()
        self._process.kill()
        code = self._process.wait()
        with self._lock:
            self.is_retired = True
            for session in list(self._pending):
                self._answer(session, Answer(failure=f"its worker process died with code {code}"))


def work(calls: Connection, reference: graders.Reference, settings: dict[str, Any], lifeline: int, parent: int) -> None:
    """The worker: does calls until it is killed. It says True when it is ready for the first.

    Args: lifeline: a pipe whose only writer is the parent; parent: its process id.
    """
    processes.die_with(lifeline, parent=parent)
    with contextlib.suppress(BaseException):  # each start raises this error again, and the parent reports it
        graders.find(reference)
    lock, inboxes = threading.Lock(), dict[int, queue.SimpleQueue[tuple[str, Any] | None]]()

    def send(told: object) -> None:
        with lock:
            calls.send(told)

    def play(session: int, inbox: "queue.SimpleQueue[tuple[str, Any] | None]") -> None:
        environment: Any = None
        while (call := inbox.get()) is not None:
            try:
                if environment is None:
                    environment = graders.find(reference)(**settings)
                answer = _call(environment, *call)
            except BaseException as error:  # the parent may not know its class
                answer = Answer(failure=" ".join(f"{type(error).__name__}: {error}".split())[:300])
            send((session, answer))
        with contextlib.suppress(BaseException):
            getattr(environment, "close", lambda: None)()

    send(True)
    with contextlib.suppress(EOFError, OSError):  # the parent is gone
        while True:
            session, kind, argument = calls.recv()
            if kind == "end":
                if (inbox := inboxes.pop(session, None)) is not None:
                    inbox.put(None)
                continue
            if session not in inboxes:
                inboxes[session] = queue.SimpleQueue()
                threading.Thread(target=play, args=(session, inboxes[session]), daemon=True).start()
            inboxes[session].put((kind, argument))


def _call(environment: Any, kind: str, argument: Any) -> Answer:
    if kind == "start":
        return Answer(messages=_messages(environment.start(argument), of="start()") or [])
    found = environment.step(argument)
    if not (isinstance(found, tuple) and len(found) == 2):
        raise ValueError(f"step() returned {repr(found)[:60]}, not (what the policy reads next or None, reward)")
    messages, reward = _messages(found[0], of="step()"), found[1]
    if not isinstance(reward, int | float | np.number | np.bool_) or not math.isfinite(reward):
        raise ValueError(f"step() returned the reward {repr(reward)[:60]}, not a finite number")
    calls, errors = (int(getattr(environment, name, 0)) for name in ("tool_calls", "errors"))
    return Answer(messages=messages or [], done=messages is None, reward=float(reward), tool_calls=calls, errors=errors)


def _messages(found: Any, *, of: str) -> list[Message] | None:
    """A text is a user's message. Raises ValueError where an environment gave anything else than texts or messages."""
    if found is None:
        return None
    given = [found] if isinstance(found, str | dict) else found
    if isinstance(given, list | tuple):
        made = [{"role": "user", "content": each} if isinstance(each, str) else each for each in given]
        if all(isinstance(m, dict) and all(isinstance(m.get(name), str) for name in ("role", "content")) for m in made):
            return [dict(message) for message in made]
    raise ValueError(f'{of} returned {repr(found)[:60]}, not a text, messages {{"role", "content"}}, or None')


@runtime_checkable
class HasEnvironment(Protocol):
    """A task whose responses have several turns."""

    @property
    def most_turns(self) -> int:
        """The most turns of the policy in a response."""
        ...

    @property
    def environments(self) -> Environments: ...


class EnvironmentTask(abc.ABC):
    """A task whose reward comes from an environment. A subclass sets `environment`, a class at the top level of its file, and
    `most_turns`, calls this constructor, and implements `episodes`. Other attributes: see Task."""

    score_name: str = "reward"
    reward_parts: tuple[str, ...] = ("reward",)
    reward_version: int = 1
    most_turns: int = 8
    environment: Callable[..., Environment]

    def __init__(self, *, settings: Mapping[str, Any] | None = None, time_limit: float = 60.0, concurrency: int = 2):
        """Args: settings: arguments of `environment`. Others, and errors: see Environments."""
        if not hasattr(type(self), "environment"):
            raise ValueError(f"{type(self).__name__} must set environment to a class with the methods start and step")
        if self.most_turns < 1:
            raise ValueError(f"{type(self).__name__}.most_turns={self.most_turns} must be at least 1")
        limits: dict[str, Any] = dict(time_limit=time_limit, concurrency=concurrency)
        self.environments = Environments(type(self).environment, settings or {}, **limits)

    @abc.abstractmethod
    def episodes(self, split: str) -> Sequence[Query]:
        """All queries of "train" or "heldout", in a fixed order. The prompt of one that has none is what `start` returns."""

    def queries(self, split: str) -> Sequence[Query]:
        """See Task.queries. Raises ValueError where an environment fails to start."""
        found = list(self.episodes(split))
        begun = {i: self.environments.start(query) for i, query in enumerate(found) if not query.prompt}
        for i, (session, started) in begun.items():
            if failure := (answer := started.result()).failure:
                raise ValueError(f"the environment of {type(self).__name__} does not start with {found[i]!r}: {failure}")
            session.close()
            found[i] = dataclasses.replace(found[i], prompt="\n\n".join(message["content"] for message in answer.messages))
        return found

    def rewards(self, queries: Sequence[Query], responses: Sequence[str], finished: np.ndarray) -> Scores:
        raise ValueError(f"the rewards of task {type(self).__name__} are those of its environment, which no text has by itself")

    def worked_examples(self, rng: np.random.Generator, count: int) -> list[tuple[str, str]]:
        raise ValueError(
            f"task {type(self).__name__} has no worked examples: set model.path to a pretrained model and warm_start.steps=0"
        )

    def close(self) -> None:
        """Ends the worker processes."""
        self.environments.close()
