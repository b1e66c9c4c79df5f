"""What a role says of itself while it is not simply at work: its phase, what it waits for, and what is wrong with its rewards.

`metrics/<role>/status.json` holds {"waits": sentence, "since": unix seconds, "trouble": sentence, "phase": sentence,
"phase_since": unix seconds, "phase_of": [done, total], "time": unix seconds of this writing, "pid": int}; a sentence is "" where
there is nothing to say. The supervisor's terminal shows it (roles/standing.py).
"""

import contextlib
import dataclasses
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tba_jax.run.cost import Cost

_FILE = "status.json"
# While a sentence stays, it is not written again within this time.
REWRITE_SECONDS = 2.0
# What ends a phase that a process is in.
_WORKS = {"phase": "", "phase_since": 0.0, "phase_of": [0, 0]}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Told:
    """waits: what the role waits for; seconds: for how long it has. trouble: what keeps its work from being of use.

    phase: what it does before it is at work, or between its work, "" at work; phase_seconds: for how long; done, total: of the
    phase's parts, 0 where it has none. time: when it was written, unix seconds, 0 before. pid: of the process that wrote it.
    """

    waits: str = ""
    seconds: float = 0.0
    trouble: str = ""
    phase: str = ""
    phase_seconds: float = 0.0
    done: int = 0
    total: int = 0
    time: float = 0.0
    pid: int = 0


class Status:
    """Writes a role's status, beginning with one that says nothing: what the role's last life said holds no more.

    Storage that refuses is left to the writers of what must not be lost.
    """

    def __init__(self, folder: Path | None, *, cost: Cost | None = None, clock: Callable[[], float] = time.time):
        """Args: folder: None: nothing is written. cost: counts the time that writing takes."""
        self._folder, self._clock, self._cost = folder, clock, cost or Cost()
        self._told: dict[str, Any] = {"waits": "", "since": 0.0, "trouble": "", **_WORKS}
        self._written, self._next = "", 0.0
        self._lock = threading.RLock()
        self.flush()

    def waits(self, sentence: str, *, seconds: float) -> None:
        """The role has waited so long for what `sentence` says; "": it works."""
        since = round(self._clock() - seconds) if sentence else 0.0
        self._tell(waits=sentence, since=since, begins=bool(sentence) != bool(self._told["waits"]))

    def trouble(self, sentence: str) -> None:
        """Tells the trouble of the role in one sentence; "": the role has none."""
        self._tell(trouble=sentence, begins=bool(sentence) != bool(self._told["trouble"]))

    def phase(self, sentence: str, *, done: int = 0, total: int = 0) -> None:
        """Tells what the role does before it is at work, without a period; "": it is at work.

        Args: done, total: of the phase's parts; 0: it has none.
        """
        if sentence == self._told["phase"]:
            if [done, total] != self._told["phase_of"]:
                self._tell(phase_of=[done, total], begins=False)
            return
        since = round(self._clock(), 1) if sentence else 0.0
        self._tell(phase=sentence, phase_since=since, phase_of=[done, total], begins=True)

    @property
    def now(self) -> str:
        """The phase that was told last."""
        phase: str = self._told["phase"]
        return phase

    @contextlib.contextmanager
    def during(self, sentence: str, *, at_once: bool = True) -> Iterator[None]:
        """The role is in this phase inside, and then again in the one before.

        Args: at_once: False: it is written by the next `flush`, unless it has ended by then.
        """
        before = {name: self._told[name] for name in _WORKS}
        self._tell(phase=sentence, phase_since=round(self._clock(), 1), phase_of=[0, 0], begins=at_once)
        try:
            yield
        finally:
            self._tell(**before, begins=at_once)

    def flush(self) -> None:
        """Writes what has changed and was not written at once, REWRITE_SECONDS after the last writing."""
        self._tell(begins=False)

    def _tell(self, *, begins: bool, **changes: object) -> None:
        """Args: begins: what changes is written at once; else now and then."""
        with self._lock:
            self._told |= changes
            if self._folder is None:
                return
            text, now = json.dumps(self._told), self._clock()
            if text == self._written or (now < self._next and not begins):
                return
            with self._cost.measure(), contextlib.suppress(OSError):
                temporary = self._folder / f".{_FILE}.{os.getpid()}"
                temporary.write_text(json.dumps({**self._told, "time": now, "pid": os.getpid()}))
                temporary.replace(self._folder / _FILE)
                self._written, self._next = text, now + REWRITE_SECONDS


def read(folder: Path) -> Told:
    """What a role said last; nothing where the file is damaged. Raises OSError where the storage refuses."""
    try:
        told = json.loads((folder / _FILE).read_text())
        texts = {name: told.get(name, "") for name in ("waits", "trouble", "phase")}
        numbers = [told.get(name, 0) for name in ("since", "phase_since", "time", "pid")]
        done, total = told.get("phase_of", (0, 0))
    except (FileNotFoundError, ValueError, AttributeError, TypeError, RecursionError):
        return Told()
    if not all(isinstance(text, str) for text in texts.values()) or not all(map(_is_number, (*numbers, done, total))):
        return Told()
    now, (since, phase_since, written, pid) = time.time(), numbers
    return Told(
        **texts,
        seconds=max(0.0, now - since) if texts["waits"] else 0.0,
        phase_seconds=max(0.0, now - phase_since) if texts["phase"] else 0.0,
        done=done,
        total=total,
        time=written,
        pid=pid,
    )


def _is_number(value: object) -> bool:
    """Whether a float holds it: JSON knows integers of any length, and NaN."""
    return isinstance(value, int | float) and -1e300 < value < 1e300
