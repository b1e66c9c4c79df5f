"""Whether a run learns, and who waits for whom, in sentences for the top of a page."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tba_jax.reporting.series import Series
from tba_jax.reporting.timeline import DOWN, WAITS
from tba_jax.roles.evaluation_figures import STDERR, with_stderr

# Standard errors that a change must exceed to count as one.
_CLEAR = 2.0


def held_out(evaluations: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """(verdict, sentence) about the held-out rewards. The verdict is one of yes, no, unclear, or "" without two evaluations.

    Args: evaluations: figures of the reports in the order of steps.
    """
    found = [each for each in evaluations if "greedy_reward" in each]
    if not found:
        return "", "There is no held-out score."
    first, last = found[0], found[-1]
    if len(found) == 1:
        return (
            "",
            f"The held-out reward is {with_stderr(first, 'greedy_reward')} at step {first['step']}; there is no second one yet.",
        )
    rewards = np.array([each["greedy_reward"] for each in found])
    best = max(found, key=lambda each: (each["greedy_reward"], each["step"]))  # as run/best_step.py has it
    # The standard deviation of a reward in [low, high] is at most half of the range: for scores without a standard error.
    most = max(1.0, float(np.ptp(rewards))) / 2
    errors = (each.get("greedy_reward" + STDERR, most / np.sqrt(max(1.0, each.get("queries", 1.0)))) for each in (first, last))
    error = float(np.hypot(*errors))
    verdict, verb = _change(last["greedy_reward"] - first["greedy_reward"], error)
    before, after = (with_stderr(each, "greedy_reward") for each in (first, last))
    ends = f"{before} at step {first['step']} to {after} at step {last['step']:,}"
    others = f"; the best is {best['greedy_reward']:.3f} at step {best['step']:,}"
    return verdict, f"The held-out reward {verb} {ends}" + (", the best so far" if best["step"] == last["step"] else others) + "."


def trained(series: Series) -> tuple[str, str]:
    """(verdict, sentence) about the reward of the rows that were trained on: the first tenth of the steps against the last."""
    reward = series.column("reward").mean
    return trained_values(reward[np.isfinite(reward)])


def trained_values(reward: np.ndarray) -> tuple[str, str]:
    """As `trained`. Args: reward: float64[n], mean reward of the trained rows by step, finite."""
    if len(reward) < 10:
        return "", "The trainer has told of too few steps to say how its reward moves."
    part = max(3, len(reward) // 10)
    first, last = reward[:part], reward[-part:]
    error = float(np.sqrt(first.var(ddof=1) / part + last.var(ddof=1) / part))
    verdict, verb = _change(float(last.mean() - first.mean()), error)
    return (
        verdict,
        f"The reward of the trained rows {verb} {first.mean():.3f} in the first steps to {last.mean():.3f} in the last.",
    )


def _change(change: float, error: float) -> tuple[str, str]:
    if abs(change) <= _CLEAR * error or change == 0:
        return "unclear", "has not moved clearly: from"
    return ("yes", "rose from") if change > 0 else ("no", "fell from")


def verdict(of_held_out: str, of_trained: str) -> str:
    """The heading above both sentences. Held-out rewards decide where they are clear."""
    known = of_held_out if of_held_out in ("yes", "no") else of_trained or of_held_out
    if of_held_out == "unclear" and of_trained in ("yes", "no"):
        return {"yes": "The trained reward rises", "no": "The trained reward falls"}[of_trained]
    return {"yes": "It learns", "no": "It gets worse", "unclear": "No clear change yet"}.get(known, "Too early to say")


def waits(role: str, totals: Mapping[str, float]) -> str:
    """One sentence about what a role waited for, and what it did most. Args: totals: name -> seconds of the whole run."""
    alive = sum(seconds for name, seconds in totals.items() if name != DOWN)
    if alive <= 0:
        return f"{role} has recorded no time yet."
    shares = {name: seconds / alive for name, seconds in totals.items() if name != DOWN}
    waited = [(WAITS.get(name, name[5:].replace("_", " ")), share) for name, share in shares.items() if name.startswith("wait_")]
    work = [
        f"{name.replace('_', ' ')} {share:.0%}"
        for name, share in shares.items()
        if not name.startswith("wait_") and share >= 0.05
    ]
    told = f"its time went into {', '.join(work[:3])}" if work else "it did little else"
    long = [f"{share:.0%} of its time for {what}" for what, share in waited if share >= 0.01]
    sentence = f"{role} waited {' and '.join(long)}; {told}" if long else f"{role} waited for nobody; {told}"
    down = totals.get(DOWN, 0.0)
    return sentence + (f"; it was down for {down:.0f} s." if down >= 1.0 else ".")


def heading_of_waits(totals: Mapping[str, Mapping[str, float]]) -> str:
    """Who waits most among trainer and searchers. Args: totals: role -> name -> seconds."""
    shares = {}
    for role, of_role in totals.items():
        alive = sum(seconds for name, seconds in of_role.items() if name != DOWN)
        if alive > 0 and not role.startswith(("evaluator", "reference")):
            name, seconds = max(
                ((n, s) for n, s in of_role.items() if n.startswith("wait_")), key=lambda each: each[1], default=("", 0)
            )
            shares[role] = seconds / alive, name
    if not shares:
        return "Nothing is known of waits yet"
    role, (share, name) = max(shares.items(), key=lambda each: each[1][0])
    if share < 0.05:
        return "Neither trainer nor searchers wait"
    return f"{role} waits most: {share:.0%} for {WAITS.get(name, name[5:].replace('_', ' '))}"
