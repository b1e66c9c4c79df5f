"""The best step of a run by its held-out score, from the reports of the evaluator.

The score is the mean reward of greedy responses to held-out queries. Of steps with equal scores the latest is the best. A step
whose score is NaN (null in a report), or whose report is damaged, has none.
"""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from tba_jax.storage import layout

SCORE = "greedy_reward"
# The best step so far and its score, in the metrics of the evaluator.
BEST_STEP, BEST_SCORE = "best_step", "best_greedy_reward"


class Scored(NamedTuple):
    """A step and its held-out score, which is finite."""

    step: int
    score: float


def best(scores: Iterable[tuple[int, float]]) -> Scored | None:
    """The best of (step, score); None where no score is finite."""
    finite = [Scored(step, score) for step, score in scores if math.isfinite(score)]
    return max(finite, key=lambda each: (each.score, each.step), default=None)


def figures(found: Scored | None) -> dict[str, float]:
    """The best step so far as metrics take it."""
    return {} if found is None else {BEST_STEP: float(found.step), BEST_SCORE: found.score}


def told(found: Scored | None, *, apart_from: int) -> str:
    """The best step for a line that has just told of another step, "" where it is the same."""
    return "" if found is None or found.step == apart_from else f"best {found.score:.3f} at step {found.step}"


class Scores:
    """The held-out scores in a folder of reports. A report that has not changed since the last call is not read again."""

    def __init__(self, evaluations: Path):
        """Args: evaluations: RunDir.evaluations; a folder that is not there holds no report."""
        self._folder = evaluations
        self._known: dict[tuple[int, int, int], float] = {}  # by step, size and time of a report

    def __call__(self) -> dict[int, float]:
        """Step -> score, in the order of steps, of the steps that have one. Raises OSError where storage refuses."""
        found: dict[tuple[int, int, int], float] = {}
        for step in layout.steps_in(self._folder):
            file = self._folder / f"{layout.step_name(step)}.json"
            try:
                status = file.stat()
                report = step, status.st_size, status.st_mtime_ns
                found[report] = self._known[report] if report in self._known else _score(file)
            except (FileNotFoundError, IsADirectoryError):  # a trainer that resumes has removed it; or no report
                continue
        self._known = found
        return {step: score for (step, _, _), score in found.items() if math.isfinite(score)}

    def best(self) -> Scored | None:
        """The best of all steps that have a score. Raises OSError where storage refuses."""
        return best(self().items())


def _score(file: Path) -> float:
    """The score in a report, NaN where it says none."""
    try:
        score = layout.read_json(file)[SCORE]
        return float(score) if isinstance(score, int | float) and not isinstance(score, bool) else math.nan
    except (ValueError, OverflowError, KeyError, TypeError):
        return math.nan
