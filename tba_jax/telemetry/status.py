"""What a role says of itself: `metrics/<role>/status.json`, which the role alone writes and whoever shows the run reads.

The file holds {"time": unix seconds of this writing, "pid": int, "phase": what the role does other than its work, "" at work,
"phase_since": unix seconds, "phase_of": [done, total], "waits": what it waits for, "since": unix seconds, "trouble": what is
wrong with its rewards, "step": of the trainer, "figures": {name: number} of its newest point of metrics, "process": where it
runs, see beginnings.told}. A sentence is "" where there is nothing to say.
"""

import contextlib
import dataclasses
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

_FILE = "status.json"
# What has changed is written again after this time, and what has not after the other: readers see that the process lives.
REWRITE_SECONDS, HEARTBEAT_SECONDS = 2.0, 10.0
# What ends a phase that a process is in.
_WORKS = {"phase": "", "phase_since": 0.0, "phase_of": [0, 0]}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Told:
    """waits: what the role waits for; seconds: for how long it has. trouble: what keeps its work from being of use.

    phase: what it does before it is at work, or between its work, "" at work; phase_seconds: for how long; done, total: of the
    phase's parts, 0 where it has none. time: when it was written, unix seconds, 0 before. pid: of the process that wrote it.
    step: of the trainer, as the role knows it. figures: of its newest point of metrics. process: see beginnings.told.
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
    step: int = 0
    figures: Mapping[str, float] = dataclasses.field(default_factory=dict)
    process: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class Status:
    """Writes a role's status, beginning with one that says nothing: what the role's last life said holds no more.

    Storage that refuses is left to the writers of what must not be lost. Attributes: step: of the trainer; its role sets it.
    """

    def __init__(
        self,
        folder: Path | None,
        *,
        process: Mapping[str, Any] | None = None,
        step: int = 0,
        clock: Callable[[], float] = time.time,
    ):
        """Args: folder: None: nothing is written. process: see beginnings.told. step: that the role's last life had come to."""
        self._folder, self._clock, self.step = folder, clock, step
        told = {"waits": "", "since": 0.0, "trouble": "", **_WORKS}
        self._told: dict[str, Any] = {**told, "figures": {}, "process": dict(process or {})}
        self._written, self._at = "", 0.0
        self._lock = threading.RLock()
        self.flush()

    def waits(self, sentence: str, *, seconds: float) -> None:
        """The role has waited so long for what `sentence` says; "": it works."""
        since = round(self._clock() - seconds) if sentence else 0.0
        self._tell(waits=sentence, since=since, at_once=bool(sentence) != bool(self._told["waits"]))

    def trouble(self, sentence: str) -> None:
        """Tells the trouble of the role in one sentence; "": the role has none."""
        self._tell(trouble=sentence, at_once=bool(sentence) != bool(self._told["trouble"]))

    def phase(self, sentence: str, *, done: int = 0, total: int = 0) -> None:
        """Tells what the role does before it is at work, without a period; "": it is at work.

        Args: done, total: of the phase's parts; 0: it has none.
        """
        if new := (sentence != self._told["phase"]):
            self._told["phase_since"] = round(self._clock(), 1) if sentence else 0.0
        self._tell(phase=sentence, phase_of=[done, total], at_once=new)

    @property
    def now(self) -> str:
        """The phase that was told last."""
        phase: str = self._told["phase"]
        return phase

    @contextlib.contextmanager
    def during(self, sentence: str, *, at_once: bool = True) -> Iterator[None]:
        """The role is in this phase inside, and then again in the one before.

        Args: at_once: False: the phase is written by the next `flush`, unless it has ended by then.
        """
        before = {name: self._told[name] for name in _WORKS}
        self._tell(phase=sentence, phase_since=round(self._clock(), 1), phase_of=[0, 0], at_once=at_once)
        try:
            yield
        finally:
            self._tell(**before, at_once=at_once)

    def point(self, figures: Mapping[str, float]) -> None:
        """Takes the figures of a point of metrics; the next `flush` writes them."""
        self._told["figures"] = figures

    def flush(self) -> None:
        """Writes what has changed and was not written at once, and now and then what has not changed."""
        self._tell(at_once=False)

    def _tell(self, *, at_once: bool, **changes: object) -> None:
        with self._lock:
            self._told |= changes
            if self._folder is None:
                return
            told, now = {**self._told, "step": self.step}, self._clock()
            text = json.dumps(told)
            patience = HEARTBEAT_SECONDS if text == self._written else 0.0 if at_once else REWRITE_SECONDS
            if self._written and now < self._at + patience:
                return
            with contextlib.suppress(OSError):
                temporary = self._folder / f".{_FILE}.{os.getpid()}"
                temporary.write_text(json.dumps({**told, "time": now, "pid": os.getpid()}))
                temporary.replace(self._folder / _FILE)
                self._written, self._at = text, now


def read(folder: Path) -> Told:
    """What a role said last; nothing where the file is damaged. Raises OSError where the storage refuses."""
    try:
        told = json.loads((folder / _FILE).read_text())
        texts = {name: told.get(name, "") for name in ("waits", "trouble", "phase")}
        since, phase_since, written, pid, step = (told.get(name, 0) for name in ("since", "phase_since", "time", "pid", "step"))
        done, total = told.get("phase_of", (0, 0))
        figures, process = ({**told.get(name, {})} for name in ("figures", "process"))
    except (FileNotFoundError, ValueError, AttributeError, TypeError, RecursionError):
        return Told()
    numbers = (since, phase_since, written, pid, step, done, total, *figures.values())
    if not all(isinstance(text, str) for text in texts.values()) or not all(map(_is_number, numbers)):
        return Told()
    now = time.time()
    return Told(
        **texts,
        seconds=max(0.0, now - since) if texts["waits"] else 0.0,
        phase_seconds=max(0.0, now - phase_since) if texts["phase"] else 0.0,
        **dict(done=done, total=total, time=written, pid=pid, step=int(step), figures=figures, process=process),
    )


def _is_number(value: object) -> bool:
    """Whether a float holds it: JSON knows integers of any length, and NaN."""
    return isinstance(value, int | float) and -1e300 < value < 1e300
