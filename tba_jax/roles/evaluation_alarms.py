"""What makes an evaluation's scores say little."""

from collections.abc import Mapping, Sequence
from typing import Any

from tba_jax.roles.watchdog import Point, Rule, Watchdog
from tba_jax.run import layout
from tba_jax.run.alarms import Alarms, Finding

# An evaluation has hundreds of responses: one of them is enough for an alarm.
EVALUATIONS = 1
_FAILED = 0.05


def point(report: Mapping[str, Any], c: Any) -> Point:
    """The figures of a report that the rule looks at."""
    return {"unscored": report["unscored"], "responses": report["queries"] * (1 + c.evaluation.samples_per_query)}


def evaluation_fails(points: Sequence[Point], c: Any) -> Finding | None:
    """Many held-out responses could not be scored, and the means leave them out."""
    failed, responses = points[-1]["unscored"], points[-1]["responses"]
    if failed <= _FAILED * responses:
        return None
    return Finding(
        sentence=f"{failed:.0f} of the {responses:.0f} held-out responses have no score, and the means of the evaluation leave "
        "them out",
        advice="look at the task's models, grader and limits of time on the evaluator's machine; python -m tba_jax evaluate "
        "scores a snapshot again",
    )


RULES: dict[str, Rule] = {"evaluation_fails": evaluation_fails}


def watchdog(run: layout.RunDir, config: Any) -> Watchdog:
    """The watch over a run's evaluations."""
    return Watchdog(Alarms(run.metrics("evaluator")), RULES, config, points=EVALUATIONS)
