"""What happened to a role, one line an event: `events.jsonl` in the role's folder of metrics.

A line is {"time": unix seconds, "event": name, "step": int, ...}. These are the events:

  start       a process begins: pid, host, devices (text), versions {package: version}, code {"version", "commit"}
  resume      a trainer goes on: step is where; from_step: of its checkpoint; replayed: steps that it did again
  compiled    a program was compiled, or read from the cache of compiled programs: what, seconds
  publish     a snapshot is visible     checkpoint  a checkpoint is written     swap  a role samples with the weights of this step
  end         a process ends: reason
"""

import contextlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tba_jax.run import json_lines
from tba_jax.run.cost import Cost

FILE = "events.jsonl"


class Events:
    """Appends events of a role. Storage that refuses is left to the writers of what must not be lost."""

    def __init__(self, folder: Path | None, *, cost: Cost, clock: Callable[[], float] = time.time):
        """Args: folder: None: nothing is recorded. cost: counts the time that recording takes."""
        self._path, self._cost, self._clock = folder / FILE if folder is not None else None, cost, clock

    def tell(self, event: str, *, step: int, **more: Any) -> None:
        """Appends one event. Args: step: of the trainer, at the event; more: further fields, as JSON takes them."""
        if self._path is None:
            return
        with self._cost.measure(), contextlib.suppress(OSError):
            line = {"time": round(self._clock(), 3), "event": event, "step": int(step), **more}
            json_lines.append(self._path, [json.dumps(line)])


def read(folder: Path) -> list[dict[str, Any]]:
    """The events of a role, oldest first; a line that a kill cut short is left out. Raises OSError where the storage refuses."""
    return [line for line in json_lines.each(folder / FILE) if "event" in line]
