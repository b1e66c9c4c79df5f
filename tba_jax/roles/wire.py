"""A connection between two processes of a trainer: messages of JSON and arrays over one TCP socket, in order.

Two processes prove to each other that they are of one run: each has read a key in the workdir that they share.
"""

import contextlib
import dataclasses
import hmac
import json
import logging
import math
import os
import queue
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tba_jax.storage import layout

# A message begins with the number of bytes of its header.
_LENGTH = struct.Struct("!Q")
# The other end is gone where it does not answer the system for about 25 seconds.
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
# No header is longer: who sends more is not one of us.
_LONGEST_HEADER = 64 << 20


@dataclasses.dataclass(frozen=True)
class Message:
    """kind: what is to be done with it. content: JSON. arrays: name -> host array."""

    kind: str
    content: dict[str, Any]
    arrays: dict[str, np.ndarray]


class Wire:
    """One end of a connection. Several threads may send; one receives."""

    def __init__(self, connected: socket.socket):
        """Args: connected: a socket, which the wire owns from now on."""
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, seconds in _KEEPALIVE.items():  # a host without power answers nothing, also before there are heartbeats
            if hasattr(socket, name):
                connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), seconds)
        self._socket, self._sending = connected, threading.Lock()

    def limit(self, seconds: float | None) -> None:
        """Lets `send` and `receive` raise TimeoutError after so many seconds without progress; None: they wait for ever."""
        self._socket.settimeout(seconds)

    def send(
        self,
        kind: str,
        content: Mapping[str, Any],
        arrays: Mapping[str, np.ndarray] | None = None,
        *,
        at_most_seconds: float | None = None,
    ) -> None:
        """Sends one message.

        Args: at_most_seconds: of waiting for a message that is being sent; None: as long as it takes.

        Raises OSError: the other end is gone, or takes nothing.
        """
        whole = {name: np.ascontiguousarray(array) for name, array in (arrays or {}).items()}
        shapes = [(name, array.dtype.str, array.shape) for name, array in whole.items()]
        header = json.dumps({"kind": kind, "content": dict(content), "arrays": shapes}).encode()
        if not self._sending.acquire(timeout=-1 if at_most_seconds is None else at_most_seconds):
            raise TimeoutError("another message is being sent")
        try:
            self._socket.sendall(_LENGTH.pack(len(header)) + header)
            for array in whole.values():
                self._socket.sendall(array.reshape(-1).view(np.uint8).data)
        finally:
            self._sending.release()

    def receive(self, *, longest: int = 0) -> Message:
        """The next message. Raises EOFError where the other end is gone, ValueError where it speaks another language.

        Args: longest: bytes of a message of one who has not proved yet who it is; it may hold no arrays. 0: it has.
        """
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        if length > (longest or _LONGEST_HEADER):
            raise ValueError(f"a message of {length} bytes: what has connected is no process of a trainer")
        header = json.loads(bytes(self._read(length)))
        if longest and header["arrays"]:
            raise ValueError("arrays from one who has not proved who it is")
        arrays = {}
        for name, dtype, shape in header["arrays"]:
            block = self._read(np.dtype(dtype).itemsize * math.prod(shape))
            arrays[name] = np.frombuffer(block, dtype).reshape(shape)
        return Message(header["kind"], header["content"], arrays)

    def _read(self, size: int) -> bytearray:
        block = bytearray(size)
        view, filled = memoryview(block), 0
        while filled < size:
            try:
                got = self._socket.recv_into(view[filled:])
            except ConnectionError:
                got = 0
            if not got:
                raise EOFError("the other end of the connection is gone")
            filled += got
        return block

    def is_gone(self) -> bool:
        """Whether the other end has closed the connection, as far as is known here. For a wire from which nobody receives."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        if not poll.poll(0):
            return False
        try:
            return not self._socket.recv(1, socket.MSG_PEEK)
        except OSError:
            return True

    def close(self) -> None:
        self._socket.close()


log = logging.getLogger(__name__)

KEY_FILE = "trainer.key"
# Network file systems show a new file to other hosts after this time at the latest.
VISIBLE_SECONDS = 60.0
TRY_AGAIN_SECONDS = 0.2
# Bytes: a process says no more of itself than its settings.
LONGEST_HELLO = 4 << 20


class Reception:
    """Answers whoever connects to process 0, each in a thread of its own: nobody who is silent keeps the others waiting."""

    def __init__(self, listener: socket.socket, key: Mapping[str, str], hello: Mapping[str, Any]):
        self._listener, self._key, self._hello = listener, key, hello
        self._came: queue.SimpleQueue[tuple[Wire, dict[str, Any]] | str] = queue.SimpleQueue()
        self._closed = threading.Event()
        # Sentences about processes that do not see the workdir, and may be of another run.
        self.strangers: list[str] = []

    def __enter__(self) -> "Reception":
        self._listener.settimeout(TRY_AGAIN_SECONDS)
        threading.Thread(target=self._accept, name="reception", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                connected = self._listener.accept()[0]
            except TimeoutError:
                continue
            except OSError:  # the listener is closed
                return
            threading.Thread(target=self._greet, args=(Wire(connected),), name="greeting", daemon=True).start()

    def _greet(self, wire: Wire) -> None:
        try:
            wire.limit(VISIBLE_SECONDS + 5)
            theirs = _greet(wire, self._key, self._hello)
        except Exception as error:  # whatever a stranger sends, it is not the trainer's end
            log.warning("something that is no process of this trainer has connected to the coordinator: %s", error)
            wire.close()
            return
        if "unseen" not in theirs:
            self._came.put((wire, theirs))
            return
        wire.close()
        if theirs["workdir"] == self._hello["workdir"]:
            self._came.put(theirs["unseen"])
        else:
            self.strangers.append(theirs["unseen"])
            log.warning("%s", theirs["unseen"])

    def next(self, deadline: float) -> tuple[Wire, dict[str, Any]] | None:
        """The next process of the trainer, and what it says of itself; None where none has come by the deadline.
        Raises ValueError: a process does not see the workdir that it names as process 0 does."""
        try:
            came = self._came.get(timeout=max(0.01, deadline - time.monotonic()))
        except queue.Empty:
            return None
        if isinstance(came, str):
            raise ValueError(came)
        return came


@contextlib.contextmanager
def key(workdir: Path) -> Iterator[dict[str, str]]:
    """The key of this meeting, in a file of the workdir that only this user can read; it is removed at the end."""
    is_new = not workdir.exists()
    path, key = workdir / KEY_FILE, {"id": secrets.token_hex(8), "key": secrets.token_hex(32)}
    draft = path.with_name(f".{KEY_FILE}.{key['id']}")
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump(key, file)
        draft.replace(path)
    except OSError as error:
        raise ValueError(f"workdir {str(workdir)!r} cannot be written: {error.strerror}") from error
    try:
        yield key
    finally:
        _remove(path, key)
        with contextlib.suppress(OSError):  # another role may have begun a run there
            if is_new:
                workdir.rmdir()  # whoever makes the run makes it again, unless a mistake shows before


def _remove(path: Path, key: Mapping[str, str]) -> None:
    with contextlib.suppress(OSError):
        if _read_key(path.parent).get("id") == key["id"]:
            path.unlink()


def _greet(wire: Wire, key: Mapping[str, str], hello: Mapping[str, Any]) -> dict[str, Any]:
    """What a process that has connected says of itself, with the sentence "unseen" where it does not see the key.
    Raises ValueError: it does not prove that it has read the key. Other errors: it speaks another language."""
    nonce = secrets.token_hex(16)
    wire.send("greeting", {"id": key["id"], "nonce": nonce, "host": hello["host"]})
    answer = wire.receive(longest=LONGEST_HELLO)
    theirs: dict[str, Any] = answer.content["hello"]
    if answer.kind == "unseen":
        return {"workdir": theirs["workdir"], "unseen": unseen(theirs, hello["host"])}
    if not hmac.compare_digest(answer.content["proof"], proof(key, nonce, theirs)):
        raise ValueError(f"it has not read {KEY_FILE}")
    wire.send("welcome", {"proof": proof(key, answer.content["nonce"], {})})
    return theirs


def unseen(theirs: Mapping[str, Any], host: str) -> str:
    """The sentence about a process that does not see the key. Args: theirs: what it says of itself; host: of process 0."""
    return (
        f"process {theirs['process']} ({theirs['host']}) does not see {KEY_FILE} of process 0 ({host}) in workdir "
        f"{theirs['workdir']!r}, which must be one folder on storage that all processes share; or another run uses this "
        "--coordinator"
    )


def proof(key: Mapping[str, str], nonce: str, content: Mapping[str, Any]) -> str:
    told = json.dumps([nonce, content], sort_keys=True).encode()
    return hmac.new(bytes.fromhex(key["key"]), told, "sha256").hexdigest()


def find_key(workdir: Path, identity: str, wire: Wire, *, seconds: float) -> dict[str, str] | None:
    """The key of the meeting with this id, once the workdir shows it; None where it does not within so many seconds.
    Raises EOFError: process 0, at the other end of the wire, has ended, and its key with it."""
    deadline = time.monotonic() + seconds
    while (key := _read_key(workdir)).get("id") != identity:
        if wire.is_gone():
            raise EOFError("the other end of the connection is gone")
        if time.monotonic() > deadline:
            return None
        time.sleep(TRY_AGAIN_SECONDS)
    return key


def _read_key(workdir: Path) -> dict[str, str]:
    try:
        if KEY_FILE not in os.listdir(workdir):  # a listing is newer than what a network file system remembers of a name
            return {}
        found: dict[str, str] = layout.read_json(workdir / KEY_FILE)
    except (OSError, ValueError):
        return {}
    return found
