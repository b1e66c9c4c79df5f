"""A connection between two processes of a trainer: messages of JSON and arrays over one TCP socket, in order."""

import dataclasses
import json
import math
import select
import socket
import struct
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np

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

        Raises:
          OSError: the other end is gone, or takes nothing.
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
