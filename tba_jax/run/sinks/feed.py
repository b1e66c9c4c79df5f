"""The way of points from a role to the process of a tracker: nothing that a tracker does holds up the role."""

import contextlib
import dataclasses
import importlib.util
import json
import logging
import queue
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

from tba_jax.run import json_lines
from tba_jax.run.sinks.session import Session, Tell

log = logging.getLogger(__name__)

# Points that may wait for a tracker; further ones are dropped and counted.
MOST_POINTS = 1000
# A role that ends waits so long for its tracker, which goes on for a while after it (__main__.py).
CLOSE_SECONDS = 5.0
_ADVICE = "look whether the machine has too little memory; the run goes on, and metrics.jsonl has every point"


class Feed:
    """Hands points to the process of one tracker, which it starts with the first of them."""

    def __init__(self, name: str, session: Callable[[], Session], tell: Tell):
        """Args: name: in sinks.TRACKERS; session: says what the tracker is told of the role, asked with the first point.
        tell: takes what the tracker's process says, in threads."""
        self._name, self._session, self._tell = name, session, tell
        self._points: queue.Queue[dict[str, Any] | None] = queue.Queue(MOST_POINTS)
        self._thread: threading.Thread | None = None
        self._over, self._dropped, self._said = False, 0, False

    def offer(self, point: dict[str, Any]) -> None:
        """Takes a point, see session.Sink.write; returns at once. A point for which there is no room is dropped."""
        if self._over:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name=f"feeds {self._name}", daemon=True)
            self._thread.start()
        try:
            self._points.put_nowait(point)
        except queue.Full:
            self._dropped += 1
            if self._dropped == 1:
                log.warning("%s does not keep up: it gets no more points until it does; metrics.jsonl has them", self._name)

    def end(self) -> None:
        """Says that no more points come."""
        if self._thread is not None:
            with contextlib.suppress(queue.Full):  # the tracker has stood still for long
                self._points.put_nowait(None)

    def wait(self, seconds: float) -> None:
        """Waits so long until the tracker has everything; called after `end`. Its process goes on for a while after this."""
        if self._thread is not None:
            self._thread.join(max(0.0, seconds))
        if self._dropped:
            log.warning("%s lacks %d points, which metrics.jsonl has", self._name, self._dropped)
        self._over = True

    def _serve(self) -> None:
        try:
            self._hand_over()
        except (OSError, ValueError) as error:
            log.warning("%s is left out: %s", self._name, error)
        self._over = True

    def _hand_over(self) -> None:
        """Returns once the process has ended. Raises OSError where it cannot be started; ValueError where there is no session."""
        session = dataclasses.asdict(self._session())
        child = subprocess.Popen(
            [sys.executable, "-m", "tba_jax.run.sinks", self._name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,  # a Ctrl-C reaches neither it nor what the tracker's library starts
        )
        hears = threading.Thread(target=self._repeat, args=(child,), name=f"hears {self._name}", daemon=True)
        hears.start()
        assert child.stdin is not None
        told: dict[str, Any] | None = session
        try:
            while told is not None:
                child.stdin.write(json.dumps(told) + "\n")
                child.stdin.flush()
                told = self._points.get()
            child.stdin.close()
        except BrokenPipeError:
            code = child.wait()
            hears.join()
            if not self._said:  # somebody killed it, or it did not begin
                self._tell(f"{self._name}: the process that hands points to it has ended (code {code})", _ADVICE)
        child.wait()
        hears.join(CLOSE_SECONDS)  # what it said last; what its library has started may keep the pipe open

    def _repeat(self, child: "subprocess.Popen[str]") -> None:
        """Hands on what a tracker's process says."""
        assert child.stdout is not None
        for line in child.stdout:
            told = json_lines.parse_line(line)
            if told:
                self._said = True
                self._tell(told["sentence"], told["advice"])


def missing(name: str) -> str:
    """The sentence about a tracker whose package is not installed, "" where it is."""
    found = importlib.util.find_spec(name)
    if found is not None and found.origin is not None:  # wandb and others make folders of their name, which are no packages
        return ""
    return f"metrics.sinks names {name}, which is not installed (pip install {name}); the run goes on without it"
