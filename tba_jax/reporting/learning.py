"""Whether a run learns, and who waits for whom, in sentences for the top of a page."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tba_jax.roles.evaluation_figures import STDERR, with_stderr

# Standard errors that a change must exceed to count as one.
_CLEAR = 2.0
# What a role waits for, in words.
_WAITS = {
    "wait_rows": "rows from searchers",
    "wait_policy": "a newer policy from the trainer",
    "wait_rewards": "rewards of the task",
    "wait_storage": "the storage",
}


def held_out(evaluations: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """(verdict, sentence) about the held-out rewards. The verdict is one of yes, no, unclear, or "" without two evaluations.

    Args: evaluations: figures of the reports in the order of steps.
    """
    found = [each for each in evaluations if "greedy_reward" in each]
    if not found:
        return "", "There is no held-out score."
    first, last = found[0], found[-1]
    before, after = (with_stderr(each, "greedy_reward") for each in (first, last))
    if len(found) == 1:
        return "", f"The held-out reward is {before} at step {first['step']}; there is no second one yet."
    best = max(found, key=lambda each: (each["greedy_reward"], each["step"]))  # as storage/best_step.py has it
    # The standard deviation of a reward in [low, high] is at most half of the range: for scores without a standard error.
    most = max(1.0, float(np.ptp([each["greedy_reward"] for each in found]))) / 2
    errors = (each.get("greedy_reward" + STDERR, most / np.sqrt(max(1.0, each.get("queries", 1.0)))) for each in (first, last))
    verdict, verb = _change(last["greedy_reward"] - first["greedy_reward"], float(np.hypot(*errors)))
    ends = f"{before} at step {first['step']} to {after} at step {last['step']:,}"
    others = f"; the best is {best['greedy_reward']:.3f} at step {best['step']:,}"
    return verdict, f"The held-out reward {verb} {ends}" + (", the best so far" if best is last else others) + "."


def trained(reward: np.ndarray) -> tuple[str, str]:
    """(verdict, sentence) about the rewards of the rows trained on: the first tenth of the run against the last.

    Args: reward: float64[n], in the order of steps.
    """
    reward = reward[np.isfinite(reward)]
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
    if of_held_out == "unclear" and of_trained in ("yes", "no"):
        return {"yes": "The trained reward rises", "no": "The trained reward falls"}[of_trained]
    known = of_held_out or of_trained
    return {"yes": "It learns", "no": "It gets worse", "unclear": "No clear change yet"}.get(known, "Too early to say")


def waits(shares: Mapping[str, Mapping[str, float]]) -> tuple[str, list[str]]:
    """Heading, and a sentence for each role. Args: shares: role -> what it did -> share of its time, in [0, 1]."""
    sentences, longest = [], (0.0, "")
    for role, of_role in shares.items():
        waited = {name: share for name, share in of_role.items() if name.startswith("wait_")}
        work = sorted((name for name in of_role if name not in waited), key=lambda name: -of_role[name])[:3]
        did = ", ".join(f"{name.replace('_', ' ')} {of_role[name]:.0%}" for name in work if of_role[name] >= 0.05)
        long = [f"{share:.0%} of its time for {_called(name)}" for name, share in waited.items() if share >= 0.01]
        told = f"{role} waited {' and '.join(long)}" if long else f"{role} waited for nobody"
        sentences.append(f"{told}; its time went into {did}." if did else f"{told}.")
        if not role.startswith("evaluator") and waited:
            name = max(waited, key=waited.__getitem__)
            longest = max(longest, (waited[name], f"{role} waits most: {waited[name]:.0%} for {_called(name)}"))
    if not shares:
        return "Nothing is known of waits yet", []
    return longest[1] if longest[0] >= 0.05 else "Neither trainer nor searchers wait", sentences


def _called(name: str) -> str:
    return _WAITS.get(name, name[5:].replace("_", " "))
