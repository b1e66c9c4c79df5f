"""A role's watch over the learning signal: rules look at its newest measurements, and what one finds is told as an alarm."""

import collections
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tba_jax.run.alarms import Alarms, Finding

# Measurements of one step or batch by name.
Point = Mapping[str, float]


# (the newest points of a role, oldest first; the config of the run) -> what is wrong, None if nothing is.
Rule = Callable[[Sequence[Point], Any], Finding | None]


def series(points: Sequence[Point], name: str, *, count: int) -> list[float]:
    """The last `count` values of a measurement, oldest first; [] where there are fewer, or some point lacks it."""
    values = [point.get(name, math.nan) for point in points[-count:]]
    return values if len(values) == count and all(map(math.isfinite, values)) else []


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


class Watchdog:
    """Keeps the newest points of a role and has its rules look at them. A kind of alarm that was told is not looked for again."""

    def __init__(self, alarms: Alarms, rules: Mapping[str, Rule], config: Any, *, points: int):
        """Args: rules: by the kind of alarm that they find. points: the most that a rule looks at."""
        self._alarms, self._config = alarms, config
        self._rules = {kind: rule for kind, rule in rules.items() if not alarms.is_told(kind)}
        self._points: collections.deque[Point] = collections.deque(maxlen=points)

    def look(self, step: int, point: Mapping[str, Any]) -> None:
        """Takes the newest point, of numbers as metrics take them. Args: step: trainer step, or number of a batch."""
        self._points.append({name: float(value) for name, value in point.items() if not isinstance(value, str)})
        points = list(self._points)
        for kind, rule in [*self._rules.items()]:
            if (found := rule(points, self._config)) is not None:
                self._alarms.tell(kind=kind, sentence=found.sentence, advice=found.advice, step=step)
                self._rules.pop(kind)
