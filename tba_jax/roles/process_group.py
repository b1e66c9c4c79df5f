"""What the processes of one trainer tell each other while they run: process 0 leads, the others follow.

Process 0 decides alone. Before each program of the common mesh it calls the others by the name of what comes next, so that all
dispatch the same programs in the same order. Every process sees the end of another one, and then ends as well, so that nobody
waits in a collective for it. Its exit code is PEER_LOST, or the code of the failure.
"""

import atexit
import contextlib
import logging
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import numpy as np

from tba_jax.roles.wire import Message, Wire
from tba_jax.run import processes

log = logging.getLogger(__name__)

# Heartbeats are sent so often, and at least four times in trainer.heartbeat_seconds. They also tell that a signal has come.
_BEAT_SECONDS = 0.5
# So long process 0 waits for the others to end before it ends itself, and any process to tell another one why it ends.
_END_SECONDS, _TELL_SECONDS = 3.0, 1.0
# After the others have ended, a process that failed has so long to say why.
_LAST_WORDS_SECONDS = 3.0
# An error of unknown cause waits so long for the end of another process, which may be its cause.
_LOSS_SECONDS = 2.0
# A failure of one process by such a code ends the others with the same code: to start them again would not help, or not at once.
_COMMON_CODES = (
    processes.BAD_INPUT,
    processes.STORAGE_FAILED,
    processes.STORAGE_FORBIDS,
    processes.NOT_FINITE,
    processes.STOPPED,
)


class Group:
    """What a trainer asks of its process group. This is the group of a single process, `Leader` that of several."""

    processes = 1

    def call(self, name: str, arrays: Mapping[str, np.ndarray] | None = None, **content: Any) -> None:
        """Lets all other processes do what is called `name`, after what they were called for before. Does not wait for it."""

    def aside(self, name: str, **content: Any) -> None:
        """Lets a thread of all other processes do what is called `name`, beside what they were called for."""

    def reports(self, name: str) -> list[dict[str, Any]]:
        """Waits until each other process has sent one report of this name; [] without other processes."""
        return []

    def is_asked_to_stop(self) -> bool:
        """Whether a signal has asked another process of the trainer to stop."""
        return False

    def guard(self, *mistakes: type[BaseException]) -> contextlib.AbstractContextManager[None]:
        """An error in this context ends the other processes as well. Args: mistakes: errors that are mistakes of the user."""
        return contextlib.nullcontext()

    def end(self, code: int) -> None:
        """Ends the group, once all processes have done what they were called for. Args: code: exit code of all of them."""


class _Peer:
    """Another process of the trainer: its wire, the thread that receives from it, and when it was heard last."""

    def __init__(self, wire: Wire, name: str, *, take: Callable[[Message], None], lost: Callable[["_Peer", str], None]):
        """Args: name: of the process in sentences. take: is called for each message; lost: once its end is seen, with why."""
        self.wire, self.name, self.heard, self.is_gone = wire, name, time.monotonic(), False
        self._take, self._lost = take, lost
        self.thread = threading.Thread(target=self._receive, name=f"from {name}", daemon=True)

    def _receive(self) -> None:
        try:
            while True:
                message = self.wire.receive()
                self.heard = time.monotonic()
                self._take(message)
        except (EOFError, OSError) as error:
            self.is_gone = True
            self._lost(self, f"has ended ({error})")
        except Exception as error:  # a defect here must not leave the processes waiting for each other
            self.is_gone = True
            log.exception("a message of %s could not be taken", self.name)
            self._lost(self, f"is left, because its message could not be taken ({type(error).__name__}: {error})")


class _Process:
    """What leader and followers share: heartbeats, and the end of this process where another one ends."""

    def __init__(self, *, process: int, processes: int, heartbeat_seconds: float):
        self.process, self.processes = process, processes
        self._heartbeat_seconds, self._ending = heartbeat_seconds, threading.Event()
        self._peers: list[_Peer] = []

    def _begin(self) -> None:
        for peer in self._peers:
            peer.thread.start()
            # One for each peer: whoever takes nothing more keeps the heartbeats of the others from nobody.
            threading.Thread(target=self._beat, args=(peer,), name=f"heartbeat to {peer.name}", daemon=True).start()
        threading.Thread(target=self._watch, name="watch", daemon=True).start()

    def _beat(self, peer: _Peer) -> None:
        while not self._ending.wait(min(_BEAT_SECONDS, self._heartbeat_seconds / 4)):
            self._send_to(peer, "alive", {"stop": self._stops()})

    def _stops(self) -> bool:
        return False

    def _watch(self) -> None:
        """Sees peers that are silent: their host has lost its power or network, or they were stopped."""
        while not self._ending.wait(min(_BEAT_SECONDS, self._heartbeat_seconds / 4)):
            for peer in self._peers:
                if time.monotonic() - peer.heard > self._heartbeat_seconds:
                    self._lost(peer, f"has not answered for trainer.heartbeat_seconds={self._heartbeat_seconds:g}")

    def _send(self, kind: str, content: Mapping[str, Any], arrays: Mapping[str, np.ndarray] | None = None) -> None:
        for peer in self._peers:
            self._send_to(peer, kind, content, arrays)

    def _send_to(
        self, peer: _Peer, kind: str, content: Mapping[str, Any], arrays: Mapping[str, np.ndarray] | None = None
    ) -> None:
        try:
            peer.wire.send(kind, content, arrays)
        except OSError as error:
            self._lost(peer, f"has ended ({error})")

    def _lost(self, peer: _Peer, why: str) -> None:
        if not self._ending.is_set():
            self._leave(f"{peer.name} of this trainer {why}", processes.PEER_LOST)

    def _failed(self, message: Message) -> None:
        if not self._ending.is_set():
            code = message.content["code"]
            self._leave(str(message.content["sentence"]), code if code in _COMMON_CODES else processes.PEER_LOST)

    def _leave(self, sentence: str, code: int) -> NoReturn:
        """Ends the process, whatever its main thread waits for. Args: sentence: what another process did."""
        self._ending.set()
        again = f"; process {self.process} ends as well: started again together, all of them resume where the journal ends"
        with contextlib.suppress(OSError):
            print(f"error: {sentence}{again if code == processes.PEER_LOST else ''}", file=sys.stderr, flush=True)
        self._end_others(sentence, code)
        os._exit(code)

    @contextlib.contextmanager
    def guard(self, *mistakes: type[BaseException]) -> Iterator[None]:
        """See Group.guard."""
        try:
            yield
        except BaseException as error:
            is_mistake = isinstance(error, mistakes) and not processes.is_storage_failure(error)
            code = processes.BAD_INPUT if is_mistake else processes.exit_code(error)
            if code not in _COMMON_CODES:
                self._await_loss()
            self._tell_failure(error, code)
            raise

    def _await_loss(self) -> None:
        """Returns where no other process ends now: a collective fails at once where a process ends, before that end is seen."""
        deadline = time.monotonic() + _LOSS_SECONDS
        while time.monotonic() < deadline and not self._ending.is_set():
            time.sleep(0.01)
        if self._ending.is_set():
            time.sleep(2 * _END_SECONDS)  # the thread that has seen it ends this process

    def _end_others(self, sentence: str, code: int) -> None:
        """Tells the other processes why they end. JAX' coordinator lives in process 0, which waits until they have ended."""
        for peer in self._peers:
            with contextlib.suppress(OSError):
                peer.wire.send("failed", {"code": code, "sentence": sentence}, at_most_seconds=_TELL_SECONDS)
        deadline = time.monotonic() + (_END_SECONDS if self.process == 0 else 0)
        while not all(peer.is_gone for peer in self._peers) and time.monotonic() < deadline:
            time.sleep(0.01)

    def _tell_failure(self, error: BaseException, code: int) -> None:
        """Ends the other processes by an error of this one, which the caller raises.

        JAX would wait at the exit of the interpreter for the processes that are gone, so this process then ends without it.
        """
        if self._ending.is_set():
            return
        self._ending.set()
        self._end_others(self._sentence(error), code)
        atexit.register(_exit_at_once, code)
        # Threads that Python waits for before that may wait for the others: for their shards of a snapshot, or of a checkpoint.
        threading.Thread(target=_exit_soon, args=(code,), name="end", daemon=True).start()

    def _sentence(self, error: BaseException) -> str:
        """The sentence by which other processes tell of an error of this one."""
        told = " ".join(str(error).split()) or type(error).__name__
        return f"process {self.process} ({socket.gethostname()}) of this trainer failed: {told}"

    def _shut_down(self) -> None:
        import jax

        self._ending.set()
        jax.distributed.shutdown()  # waits until all processes have come here
        for peer in self._peers:
            peer.wire.close()


def _exit_soon(code: int) -> None:
    time.sleep(_LAST_WORDS_SECONDS)
    _exit_at_once(code)


def _exit_at_once(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class Leader(_Process, Group):
    """Process 0 of a trainer of several processes."""

    def __init__(self, wires: Mapping[int, Wire], hosts: Mapping[int, str], *, heartbeat_seconds: float):
        """Args: wires: process -> the connection to it. hosts: process -> the name of its host."""
        super().__init__(process=0, processes=len(wires) + 1, heartbeat_seconds=heartbeat_seconds)
        self._asked = False
        self._reports: dict[int, dict[str, queue.SimpleQueue[dict[str, Any]]]] = {process: {} for process in wires}
        self._adding = threading.Lock()
        for process, wire in sorted(wires.items()):
            name = f"process {process} ({hosts[process]})"
            self._peers.append(_Peer(wire, name, take=self._taker(process), lost=self._lost))
        self._begin()

    def _taker(self, process: int) -> Callable[[Message], None]:
        def take(message: Message) -> None:
            if message.kind == "report":
                self._queue(process, message.content["name"]).put(message.content["content"])
            elif message.kind == "failed":
                self._failed(message)
            elif message.content.get("stop"):
                self._asked = True

        return take

    def _queue(self, process: int, name: str) -> "queue.SimpleQueue[dict[str, Any]]":
        with self._adding:
            return self._reports[process].setdefault(name, queue.SimpleQueue())

    def call(self, name: str, arrays: Mapping[str, np.ndarray] | None = None, **content: Any) -> None:
        self._send("call", {"name": name, "content": content}, arrays)

    def aside(self, name: str, **content: Any) -> None:
        self._send("aside", {"name": name, "content": content})

    def reports(self, name: str) -> list[dict[str, Any]]:
        return [self._queue(process, name).get() for process in self._reports]

    def is_asked_to_stop(self) -> bool:
        return self._asked

    def end(self, code: int) -> None:
        self._ending.set()  # the others may be gone before this process has done the rest
        self.call("end", code=code)
        self._shut_down()


class Member(_Process):
    """A process of a trainer that follows process 0. code: the exit code of all processes, once the group has ended."""

    def __init__(self, wire: Wire, host: str, *, process: int, processes: int, heartbeat_seconds: float):
        """Args: wire, host: of process 0."""
        super().__init__(process=process, processes=processes, heartbeat_seconds=heartbeat_seconds)
        self.code = 0
        self._calls: queue.SimpleQueue[Message] = queue.SimpleQueue()
        # Name of an aside -> the function to call, and -> contents that came before there was a function. Guarded by the lock.
        self._asides: dict[str, Callable[..., None]] = {}
        self._early: dict[str, list[dict[str, Any]]] = {}
        self._asides_lock = threading.Lock()
        self._stop: Callable[[], bool] = lambda: False
        self._name = f"process 0 ({host})"
        self._peers.append(_Peer(wire, self._name, take=self._take, lost=self._lost))
        self._begin()

    def _take(self, message: Message) -> None:
        if message.kind == "call":
            if message.content["name"] == "end":
                self.code = message.content["content"]["code"]
                self._ending.set()  # the leader may be gone before this process has done all that it was called for
            self._calls.put(message)
        elif message.kind == "aside":
            self._take_aside(message.content["name"], message.content["content"])
        elif message.kind == "failed":
            self._failed(message)

    def _stops(self) -> bool:
        return self._stop()

    def _take_aside(self, name: str, content: dict[str, Any]) -> None:
        with self._asides_lock:
            if name in self._asides:
                self._asides[name](**content)
            else:
                self._early.setdefault(name, []).append(content)

    def on_aside(self, name: str, function: Callable[..., None]) -> None:
        """Has `function` called with the content of each aside of this name, in the thread that receives: it must be quick.

        The leader may be ahead: asides that have come already are handed over now.
        """
        with self._asides_lock:
            self._asides[name] = function
            for content in self._early.pop(name, []):
                function(**content)

    def off_aside(self, name: str) -> None:
        """Keeps asides of this name from now on, until `on_aside` names another function for them."""
        with self._asides_lock:
            self._asides.pop(name, None)

    def fail(self, error: BaseException) -> NoReturn:
        """Ends all processes by an error that a thread of this one has met."""
        code = processes.exit_code(error)
        self._tell_failure(error, code)
        self._leave(self._sentence(error), code)

    def tell_signals(self, stop: Callable[[], bool]) -> None:
        """Tells the leader once `stop` says that a signal asks this process to stop."""
        self._stop = stop

    def report(self, name: str, **content: Any) -> None:
        """See Group.reports."""
        self._send("report", {"name": name, "content": content})

    def calls(self) -> Iterator[tuple[str, dict[str, Any], dict[str, np.ndarray]]]:
        """(name, content, arrays) of each call of the leader, until it ends the group."""
        while (message := self._calls.get()).content["name"] != "end":
            yield message.content["name"], message.content["content"], message.arrays
            del message  # a batch need not stay until the next call comes

    def end(self) -> None:
        self._shut_down()
