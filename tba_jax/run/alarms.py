"""Alarms of a role: what keeps the run from learning, in one sentence, and what to do about it. Each kind is told once.

`metrics/<role>/alarms.jsonl` holds a line {"time": unix seconds, "step": int, "kind": name, "sentence": text, "advice": text} for
each kind that the role has told in this run. Whoever tells a sentence with the text of a prompt escapes that text.
"""

import contextlib
import dataclasses
import json
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tba_jax.run import json_lines, places

log = logging.getLogger(__name__)

_FILE = "alarms.jsonl"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Alarm:
    """An alarm that was told. time: unix seconds. step: trainer step, or batch of a searcher. Others: see Alarms.tell."""

    time: float
    step: int
    kind: str
    sentence: str
    advice: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """What a rule has found, with figures, and what to do about it, with names of settings. Both have no period at the end."""

    sentence: str
    advice: str


class Alarms:
    """Tells a role's alarms: a line of the file, and a warning of the role's log. A restarted role knows what it has told.

    Storage that refuses is left to the writers of what must not be lost.
    """

    def __init__(self, folder: Path):
        """Args: folder: of the role's metrics, which need not be there yet."""
        self._folder = folder
        self._told = {alarm.kind for alarm in read(folder)}

    def is_told(self, kind: str) -> bool:
        """Whether this run has told this kind of alarm."""
        return kind in self._told

    def tell(self, *, kind: str, sentence: str, advice: str, step: int) -> None:
        """Tells an alarm, unless this run has told its kind. Args: kind: a name of docs/watching.md. Others: see Finding."""
        if kind in self._told:
            return
        self._told.add(kind)
        log.warning("%s; what to do: %s (alarm %s, step %d)", sentence, advice, kind, step)
        line = {"time": time.time(), "step": step, "kind": kind, "sentence": sentence, "advice": advice}
        with contextlib.suppress(OSError):
            places.make_folder(self._folder, below=2)
            json_lines.append(self._folder / _FILE, [json.dumps(line)])


def read(folder: Path) -> list[Alarm]:
    """The alarms that a role has told, oldest first. Torn lines are left out; of a file that cannot be read there are none."""
    try:
        lines = [*json_lines.each(folder / _FILE)]
    except OSError:
        return []
    return [alarm for alarm in map(_parsed, lines) if alarm is not None]


def _parsed(told: Mapping[str, Any]) -> Alarm | None:
    """The alarm of a line, None for a line that is none: something else wrote it."""
    try:
        texts = {name: str(told[name]) for name in ("kind", "sentence", "advice")}
        return Alarm(time=float(told["time"]), step=int(told["step"]), **texts)
    except (ValueError, KeyError, TypeError, OverflowError):
        return None
