"""What happened when: starts, resumes, publishes, checkpoints and swaps of all roles, as marks on one axis of time.

The marks are the steps at which epochs of the trainer began, the starts of the searchers, and what lies in the run's folders.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tba_jax.replay import journal
from tba_jax.reporting.series import is_moment
from tba_jax.telemetry import status

# Kind -> what it is called on the page. The order is that of the rows of the chart, from the bottom.
KINDS: Mapping[str, str] = {
    "publish": "policy published",
    "swap": "searcher takes a policy",
    "checkpoint": "checkpoint",
    "compiled": "compiled",
    "start": "process starts",
    "resume": "trainer resumes",
    "end": "process ends",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mark:
    """time: unix seconds; step: of the trainer, -1 where it is not known; kind: one of KINDS; told: what else is known."""

    time: float
    step: int
    role: str
    kind: str
    told: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Marks:
    """marks: in the order of time, thinned to MOST_OF_A_KIND of each kind; counts: kind -> how many there were.

    starts: the events of that name, with role and all their fields, the newest of each role last.
    """

    marks: list[Mark]
    counts: dict[str, int]
    starts: list[dict[str, Any]]

    def starts_of(self, role: str) -> list[float]:
        """Unix seconds."""
        return [float(start["time"]) for start in self.starts if start["role"] == role]


def read(folders: Mapping[str, Path]) -> Marks:
    """The newest start of each role, as its status tells it. Args: folders: role -> the folder of its metrics."""
    told = {role: status.read(folder).process for role, folder in folders.items()}
    starts = [{**process, "role": role, "time": process["started"]} for role, process in told.items() if process.get("started")]
    return Marks(marks=[], counts={}, starts=sorted(starts, key=lambda start: start["time"]))


def has_ended(folders: Mapping[str, Path]) -> bool:
    """Whether the trainer and all other roles say that they have ended. Raises OSError.

    Args: folders: role -> the folder of its metrics.
    """
    told = {role: status.read(folder) for role, folder in folders.items()}
    return "trainer" in told and all(each.phase in ("finished", "stopped") for each in told.values() if each.time)


def inferred(lines: journal.Lineage | None, writers: Mapping[str, Mapping[str, Any]], checkpoints: Sequence[int]) -> list[Mark]:
    """The marks of a run without events: epochs of the journal, registrations of writers and the checkpoints that are kept.

    Args: lines: None where the journal cannot be read; writers: name -> the info of its registration; checkpoints: steps.
    """
    marks = []
    for stretch in lines.stretches if lines is not None else ():
        kind = "resume" if stretch.first > 1 else "start"
        marks.append(Mark(time=np.nan, step=stretch.first - 1, role="trainer", kind=kind, told=f"epoch {stretch.epoch}"))
    for name, info in writers.items():
        if is_moment(info.get("started")):
            marks.append(
                Mark(time=float(info["started"]), step=-1, role=name, kind="start", told=f"on {info.get('host', '?')}"[:200])
            )
    marks += [Mark(time=np.nan, step=step, role="trainer", kind="checkpoint") for step in checkpoints]
    return marks


def placed(marks: Sequence[Mark], steps: np.ndarray, times: np.ndarray) -> list[Mark]:
    """The marks with what each lacks of time and step, from the trainer's own lines; those that stay without a time are left out.

    Args: steps, times: float64[n] of lines of the trainer, in their order.
    """
    if len(steps) == 0:
        return [mark for mark in marks if np.isfinite(mark.time)]
    by_step, by_time = np.argsort(steps, kind="stable"), np.argsort(times, kind="stable")
    found = []
    for mark in marks:
        time, step = mark.time, mark.step
        if not np.isfinite(time):
            time = float(np.interp(step, steps[by_step], times[by_step]))
        if step < 0 or mark.role != "trainer":  # on the axis of steps a swap stands where the trainer was at that time
            step = int(np.interp(time, times[by_time], steps[by_time]))
        found.append(dataclasses.replace(mark, time=time, step=step))
    return sorted(found, key=lambda mark: mark.time)
