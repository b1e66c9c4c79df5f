"""What keeps a searcher's rows from being of use, read from its newest batches, or from an evaluation's responses."""

from collections.abc import Sequence
from typing import Any

from tba_jax.roles.searcher.appender import SearchReport
from tba_jax.roles.watchdog import Point, Rule, Watchdog, series
from tba_jax.run import layout
from tba_jax.run.alarms import Alarms, Finding

# Batches that a rule looks at.
BATCHES = 8
# Nearly all responses have one and the same reward, the one for responses that do not end.
_WITHOUT_END = 0.95
# Of responses that should end, some do.
_ENDS = 0.01
_FAILED = 0.05


def point(report: SearchReport) -> Point:
    """The measurements of a batch that rules look at."""
    return {"rows": report.rows, "finished_rows": round(report.finished * report.rows), "unscored": report.unscored}


def _of_responses(points: Sequence[Point], name: str) -> tuple[int, int] | None:
    """(responses that `name` counts, responses) of the last batches; None where there are too few batches."""
    rows, counted = (series(points, each, count=BATCHES) for each in ("rows", name))
    return (int(sum(counted)), int(sum(rows))) if rows and counted else None


def missing_eos_reward(points: Sequence[Point], c: Any) -> Finding | None:
    """Nearly all responses are cut and get task.missing_eos_reward, which says nothing about what they say."""
    if c.task.missing_eos_reward is None or (found := _of_responses(points, "finished_rows")) is None:
        return None
    finished, rows = found
    if finished > (1 - _WITHOUT_END) * rows:
        return None
    return Finding(
        sentence=f"{rows - finished:,} of the {rows:,} responses of the last {BATCHES} batches have no end within "
        f"task.response_length={c.task.response_length} tokens, and all of these get "
        f"task.missing_eos_reward={c.task.missing_eos_reward:g}",
        advice=_ADVICE,
    )


def never_ends(points: Sequence[Point], c: Any) -> Finding | None:
    """No response ends by itself, although it could, and nothing says that cut responses are meant."""
    may_be_cut = c.task.force_eos or c.task.min_response_length == c.task.response_length
    if c.task.missing_eos_reward is not None or may_be_cut or (found := _of_responses(points, "finished_rows")) is None:
        return None
    finished, rows = found
    if finished >= _ENDS * rows:
        return None
    return Finding(
        sentence=f"{finished or 'none'} of the {rows:,} responses of the last {BATCHES} batches end by themselves within "
        f"task.response_length={c.task.response_length} tokens: rewards are of texts that are cut",
        advice=f"{_ADVICE}; where all responses are meant to be cut, set task.min_response_length=task.response_length",
    )


_ADVICE = (
    "raise task.response_length, have the policy learn to end (a warm start or a model that was tuned on such responses, "
    "task.chat_template=True for a chat model), or let texts end responses (task.stop_strings)"
)


def rewards_fail(points: Sequence[Point], c: Any) -> Finding | None:
    """Many responses get no reward."""
    if (found := _of_responses(points, "unscored")) is None:
        return None
    failed, rows = found
    if failed <= _FAILED * rows:
        return None
    return Finding(
        sentence=f"rewards fail: {failed:,} of the {rows:,} responses of the last {BATCHES} batches have none and are not "
        "trained on",
        advice="the searcher's log and status say why the first failed; look at the task's models, grader and limits of time",
    )


RULES: dict[str, Rule] = {
    "missing_eos_reward": missing_eos_reward,
    "never_ends": never_ends,
    "rewards_fail": rewards_fail,
}


def watchdog(run: layout.RunDir, config: Any, *, name: str) -> Watchdog:
    """The watch over a searcher's batches. Args: name: of its metrics."""
    return Watchdog(Alarms(run.metrics(name)), RULES, config, points=BATCHES)
