"""What a role says of itself while it cannot work: what it waits for, and what is wrong with its rewards.

`metrics/<role>/status.json` holds {"waits": sentence, "since": unix seconds, "trouble": sentence}; "" where there is nothing to
say. The supervisor's terminal shows it (roles/progress.py).
"""

import contextlib
import dataclasses
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

_FILE = "status.json"
# While a sentence stays, it is not written again within this time.
REWRITE_SECONDS = 2.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Told:
    """waits: what the role waits for; seconds: for how long it has. trouble: what keeps its work from being of use."""

    waits: str = ""
    seconds: float = 0.0
    trouble: str = ""


class Status:
    """Writes a role's status. Storage that refuses is left to the writers of what must not be lost."""

    def __init__(self, folder: Path, *, clock: Callable[[], float] = time.time):
        self._folder, self._clock = folder, clock
        self._told: dict[str, object] = {"waits": "", "since": 0.0, "trouble": ""}
        self._written, self._next = "", 0.0

    def waits(self, sentence: str, *, seconds: float) -> None:
        """The role has waited so long for what `sentence` says; "": it works."""
        since = round(self._clock() - seconds) if sentence else 0.0
        self._tell(waits=sentence, since=since, begins=bool(sentence) != bool(self._told["waits"]))

    def trouble(self, sentence: str) -> None:
        """Tells the trouble of the role in one sentence; "": the role has none."""
        self._tell(trouble=sentence, begins=bool(sentence) != bool(self._told["trouble"]))

    def _tell(self, *, begins: bool, **changes: object) -> None:
        self._told |= changes
        text, now = json.dumps(self._told), self._clock()
        if text == self._written or (now < self._next and not begins):
            return
        temporary = self._folder / f".{_FILE}.{os.getpid()}"
        with contextlib.suppress(OSError):
            temporary.write_text(text)
            temporary.replace(self._folder / _FILE)
            self._written, self._next = text, now + REWRITE_SECONDS


def read(folder: Path) -> Told:
    """What a role said last. Raises OSError where the storage refuses."""
    try:
        told = json.loads((folder / _FILE).read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return Told()
    seconds = max(0.0, time.time() - told["since"]) if told["waits"] else 0.0
    return Told(waits=told["waits"], seconds=seconds, trouble=told["trouble"])
