"""What a tracker is told of a role's run and of its points, and the names under which it shows them."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any, Protocol

# Takes what is wrong, and what to do about it: sentences without a period at the end.
Tell = Callable[[str, str], None]
# Kind of role -> the group of its metrics in trackers: train/loss, search/reward.
GROUPS = {
    "trainer": "train",
    "searcher": "search",
    "evaluator": "evaluate",
    "reference": "reference",
    "supervised": "supervised",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Session:
    """One role of a run, as trackers see it.

    project, group, name: under which it is shown; all roles of a run are in one group. id: of letters, digits, "_" and "-", the
    same when the role starts again. kind: of the role, see GROUPS. folder: of the role's metrics, for files of the tracker.
    config: of the run, without secrets. pid: the process of the role.
    """

    project: str
    group: str
    name: str
    id: str
    kind: str
    folder: str
    config: dict[str, Any]
    pid: int

    def grouped(self, name: str) -> str:
        """The name of a metric in a tracker."""
        return f"{GROUPS[self.kind]}/{name}"


class Sink(Protocol):
    """What hands the points of one role to a tracker. Every method may raise and may block: nothing of the run waits for it."""

    def begin(self, session: Session) -> None:
        """Called first."""

    def write(self, point: dict[str, Any]) -> None:
        """One point.

        Args: point: {"step": int, "time": unix seconds, "values": {name: float}, "histograms": {name: {"counts", "edges"}},
          "tables": {name: {"columns": […], "rows": [[…], …]}}}, all names grouped.
        """

    def end(self) -> None:
        """Called last. What was written reaches its place before this returns."""


def refused_names(metrics: Any) -> list[str]:
    """A sentence about each name that trackers do not take. Args: metrics: the section of the config."""
    names = {name: metrics[name] for name in ("project", "group")}
    return [
        f"metrics.{name}={value!r} must be 1 to 100 letters, digits, spaces, and _ - ."
        for name, value in names.items()
        if not re.fullmatch(r"[\w. -]{1,100}", value) and (value or name == "project")
    ]
