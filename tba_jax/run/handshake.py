"""How processes of a trainer prove to each other that they are of one run: each has read a key in the workdir that they share."""

import contextlib
import hmac
import json
import logging
import os
import queue
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tba_jax.run import layout
from tba_jax.run.wire import Wire

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

        Raises:
          ValueError: a process does not see the workdir that it names as process 0 does.
        """
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

    Raises:
      ValueError: it does not prove that it has read the key. Other errors: it speaks another language.
    """
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

    Raises:
      EOFError: process 0, at the other end of the wire, has ended, and its key with it.
    """
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
