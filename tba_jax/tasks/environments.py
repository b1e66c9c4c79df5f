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
the time limit fails its response alone, unless it holds the interpreter's lock, which fails all of its worker's: the worker is
given no further environments, and is killed when the others have ended.
"""

import abc
import contextlib
import dataclasses
import itertools
import json
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
_FLOAT32_MAX = float(np.finfo(np.float32).max)
_IMPORT_SECONDS = 300.0  # time limit of a worker's start
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
    this step. tool_calls, errors: so far. seconds: that it took. failure: why there is no answer, "" where there is one."""

    messages: list[Message] = dataclasses.field(default_factory=list)
    done: bool = False
    reward: float = 0.0
    tool_calls: int = 0
    errors: int = 0
    seconds: float = 0.0
    failure: str = ""


class Session:
    """An environment of one response. Its calls are done in their order."""

    def __init__(self, worker: "_Worker", number: int):
        self._worker, self._number = worker, number

    def step(self, message: str) -> Future[Answer]:
        return self._worker.call(self._number, "step", message)

    def cut(self, message: str) -> None:
        """The policy goes on no more: an environment is not asked about half a message, nor for more than it may say."""
        self.close()

    def close(self) -> None:
        """Nothing is called any more."""
        self._worker.end_session(self._number)


class Environments:
    """Environments of one class. Several threads may call it at once; the first call starts the workers.

    Attributes: settings: arguments of the class. started: prompts that `start` gave, and must give again.
    """

    def __init__(
        self,
        environment: Callable[..., Environment],
        settings: Mapping[str, Any],
        *,
        time_limit: float,
        concurrency: int,
        prefix: str = "",
    ):
        """Args: time_limit: seconds of a call; concurrency: worker processes; prefix: of the settings' names, such as
        "task.guess.".

        Raises ValueError: a limit is out of range, or workers could not import the class.
        """
        if not 0 < time_limit < math.inf:
            raise ValueError(f"{prefix}time_limit={time_limit} must be above 0 seconds and finite")
        if concurrency < 1:
            raise ValueError(f"{prefix}concurrency={concurrency} must be at least 1 process")
        self._reference = graders.refer(environment, called="the environment")
        self.settings, self.started = dict(settings), set[str]()
        self._time_limit, self._limit_setting = time_limit, f"{prefix}time_limit={time_limit:g} s"
        self._workers: list[_Worker | None] = [None] * concurrency
        self._numbers, self._lock, self._lifeline = itertools.count(), threading.Lock(), processes.Lifeline()

    @property
    def concurrency(self) -> int:
        return len(self._workers)

    def start(self, query: Query) -> tuple[Session, Future[Answer]]:
        """A new environment, and what its `start` returns."""
        with self._lock:
            number = next(self._numbers)
            place = number % len(self._workers)
            worker = self._workers[place]
            if worker is None or worker.is_retired:
                given = self._reference, self.settings
                worker = _Worker(*given, self._lifeline, time_limit=self._time_limit, limit_setting=self._limit_setting)
                self._workers[place] = worker
        return Session(worker, number), worker.call(number, "start", (query, query.prompt in self.started))

    def close(self) -> None:
        """Ends the workers: calls under way fail. A later call starts others."""
        with self._lock:
            for worker in filter(None, self._workers):
                worker.kill()
            self._workers = [None] * len(self._workers)


@dataclasses.dataclass
class _Call:
    """A call that is not answered: when it began, and until when it may take."""

    future: Future[Answer]
    begun: float
    until: float


class _Worker:
    """A worker process, and this end of the pipe of its calls. Attributes: is_retired: it takes no further environments."""

    def __init__(
        self,
        reference: graders.Reference,
        settings: Mapping[str, Any],
        lifeline: processes.Lifeline,
        *,
        time_limit: float,
        limit_setting: str,
    ):
        self._time_limit, self._limit_setting, self.is_retired = time_limit, limit_setting, False
        self._pending, self._open, self._death = dict[int, _Call](), set[int](), ""
        self._lock = threading.Lock()
        self._calls, its = multiprocessing.Pipe()
        with its:
            command = [sys.executable, "-c", _PROGRAM, str(its.fileno())]
            fds = (its.fileno(), *lifeline.child_fds)
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=fds, start_new_session=True)
        # A worker that computes reads nothing, and whoever writes to it then waits: a thread of its own.
        self._to_send: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._to_send.put(sys.path)
        self._to_send.put((reference, dict(settings), *lifeline.child_fds, os.getpid()))
        for target in (self._send, self._listen):
            threading.Thread(target=target, name="environments", daemon=True).start()

    def call(self, session: int, kind: str, argument: Any) -> Future[Answer]:
        future, now = Future[Answer](), time.monotonic()
        with self._lock:
            if self._death:
                future.set_result(Answer(failure=self._death))
                return future
            self._open.add(session)
            self._pending[session] = _Call(future, now, now + self._time_limit)
        self._to_send.put((session, kind, argument))
        return future

    def end_session(self, session: int) -> None:
        with self._lock:
            self._open.discard(session)
            self._pending.pop(session, None)
            if self.is_retired and not self._open:
                self._process.kill()
        self._to_send.put((session, "end", None))

    def kill(self) -> None:
        self.is_retired = True
        self._process.kill()

    def _send(self) -> None:
        while (told := self._to_send.get()) is not None:
            try:
                self._calls.send(told)
            except OSError:  # it died, which the other thread tells
                return
            except Exception as error:  # a query of a class of its own that cannot be pickled
                with self._lock:
                    self._answer(told[0], Answer(failure=f"{type(error).__name__}: {error}"))

    def _answer(self, session: int, answer: Answer) -> None:
        if (call := self._pending.pop(session, None)) is not None:
            call.future.set_result(dataclasses.replace(answer, seconds=time.monotonic() - call.begun))

    def _listen(self) -> None:
        """Takes answers until the worker has died."""
        ready, begun = False, time.monotonic()
        looked = begun
        while True:
            try:
                if self._calls.poll(_TICK):
                    told = self._calls.recv()
                    ready = True
                    if told is not True:
                        with self._lock:
                            self._answer(*told)
                elif self._process.poll() is not None:
                    break
            except (EOFError, OSError):
                break
            if (now := time.monotonic()) - looked < _TICK:
                continue
            if not ready and now - begun > _IMPORT_SECONDS:
                break
            # Neither the import counts, nor time for which this process was stopped.
            slack, looked = now - looked - 2 * _TICK if ready else now - looked, now
            with self._lock:
                for session, call in list(self._pending.items()):
                    if slack > 0:
                        call.until += slack
                    elif now > call.until:
                        self.is_retired = True
                        self._open.discard(session)
                        self._answer(session, Answer(failure=f"it took more than {self._limit_setting}"))
                if self.is_retired and not self._open:
                    self._process.kill()
        self._process.kill()
        code = self._process.wait()
        with self._lock:
            self.is_retired, self._death = True, f"its worker process died with code {code}"
            for session in list(self._pending):
                self._answer(session, Answer(failure=self._death))
        self._to_send.put(None)


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
        query, is_prompt = argument
        begun = _messages(environment.start(query), of="start()") or []
        if is_prompt and _prompt(begun) != query.prompt:
            raise ValueError("start() says another thing than when it gave the prompt: what it says must follow from the query")
        return Answer(messages=begun)
    found = environment.step(argument)
    if not (isinstance(found, tuple) and len(found) == 2):
        raise ValueError(f"step() returned {repr(found)[:60]}, not (what the policy reads next or None, reward)")
    messages, reward = _messages(found[0], of="step()"), found[1]
    if not isinstance(reward, int | float | np.number | np.bool_) or not abs(float(reward)) <= _FLOAT32_MAX:
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
            plain: list[Message] = json.loads(json.dumps(made))  # the parent may not know classes of the user's file
            return plain
    raise ValueError(f'{of} returned {repr(found)[:60]}, not a text, messages {{"role", "content"}}, or None')


def _prompt(messages: Sequence[Message]) -> str:
    return "\n\n".join(message["content"] for message in messages)


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

    def __init__(
        self, *, settings: Mapping[str, Any] | None = None, time_limit: float = 60.0, concurrency: int = 2, prefix: str = ""
    ):
        """Args: settings: arguments of `environment`. Others, and errors: see Environments."""
        if not hasattr(type(self), "environment"):
            raise ValueError(f"{type(self).__name__} must set environment to a class with the methods start and step")
        its = type(self).environment
        if missing := [name for name in ("start", "step") if not callable(getattr(its, name, None))]:
            raise ValueError(f"{type(self).__name__}.environment={getattr(its, '__name__', its)!r} has no method {missing[0]}")
        if not isinstance(self.most_turns, int) or self.most_turns < 1:
            raise ValueError(f"{type(self).__name__}.most_turns={self.most_turns!r} must be a whole number, at least 1")
        limits: dict[str, Any] = dict(time_limit=time_limit, concurrency=concurrency, prefix=prefix)
        self.environments = Environments(type(self).environment, settings or {}, **limits)

    @abc.abstractmethod
    def episodes(self, split: str) -> Sequence[Query]:
        """All queries of "train" or "heldout", in a fixed order. The prompt of one that has none is what `start` returns."""

    def queries(self, split: str) -> Sequence[Query]:
        """See Task.queries. Raises ValueError where an environment fails to start."""
        found = list(self.episodes(split))
        without = [i for i, query in enumerate(found) if not query.prompt]
        at_a_time = self.environments.concurrency  # a server may have room for few
        try:
            for first in range(0, len(without), at_a_time):
                begun = [(i, *self.environments.start(found[i])) for i in without[first : first + at_a_time]]
                for i, session, started in begun:
                    if failure := (answer := started.result()).failure:
                        raise ValueError(f"the environment of {type(self).__name__} does not start with {found[i]!r}: {failure}")
                    session.close()
                    if not answer.messages:
                        raise ValueError(
                            f"the environment of {type(self).__name__} gives no prompt: start() returned nothing for "
                            f"{found[i]!r}, which has none of its own"
                        )
                    found[i] = dataclasses.replace(found[i], prompt=_prompt(answer.messages))
        finally:
            self.environments.close()  # most processes that read prompts never play
        self.environments.started |= {found[i].prompt for i in without}
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
