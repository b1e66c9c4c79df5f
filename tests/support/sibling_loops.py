"""The losses of the siblings of trajectory balance, as plain Python loops; see objective_loops.py."""

import math

from tba_jax.objectives.inputs import ObjectiveInputs, PolicyOutputs

LARGEST_LOG_RATIO = 20.0
NAMES = ("oapl", "pmd_mean", "flowrl", "a_star_po", "asymre", "topr")


def row_sum(per_token, inputs: ObjectiveInputs, row: int) -> float:
    return sum(float(per_token[row, t]) for t in range(inputs.mask.shape[1]) if inputs.mask[row, t])


def log_ratio_to(other: str, outputs: PolicyOutputs, inputs: ObjectiveInputs, row: int) -> float:
    """log π_θ/π of the whole response. other: "ref" or "behavior"."""
    return row_sum(outputs.logprobs, inputs, row) - row_sum(getattr(inputs, f"{other}_logprobs"), inputs, row)


def log_mean_exp(terms: list[float]) -> float:
    largest = max(terms)
    return largest + math.log(sum(math.exp(term - largest) for term in terms) / len(terms))


def held_weights(name: str, outputs: PolicyOutputs, inputs: ObjectiveInputs) -> list[float] | None:
    """The detached weight of every row, of objectives that have one."""
    if name not in ("flowrl", "topr"):
        return None
    found, s = [], inputs.settings
    for row in range(len(inputs.mask)):
        log_ratio = log_ratio_to("behavior", outputs, inputs, row)
        ratio = math.exp(max(-LARGEST_LOG_RATIO, min(LARGEST_LOG_RATIO, log_ratio)))
        if name == "flowrl":
            found.append(max(1 - s.clip_low, min(1 + s.clip_high, ratio)))
        else:
            found.append(min(ratio, 1.0) if float(inputs.reward[row]) < s.topr_baseline else 1.0)
    return found


def group_loss(name: str, outputs: PolicyOutputs, held: list[float] | None, inputs: ObjectiveInputs, first: int) -> float:
    """The sum over the K rows from `first` on."""
    K, beta, s, total = inputs.settings.completions, float(inputs.beta), inputs.settings, 0.0
    rows = range(first, first + K)
    rewards = {row: float(inputs.reward[row]) for row in rows}
    mean = sum(rewards.values()) / K
    deviation = math.sqrt(sum((r - mean) ** 2 for r in rewards.values()) / K)
    for row in rows:
        to_behavior = log_ratio_to("behavior", outputs, inputs, row)
        to_ref = log_ratio_to("ref", outputs, inputs, row)
        policy, reward = row_sum(outputs.logprobs, inputs, row), rewards[row]
        if name == "oapl":
            value = beta * log_mean_exp([r / beta for r in rewards.values()])
            total += (beta * to_behavior - (reward - value)) ** 2
        elif name == "pmd_mean":
            total += (reward - mean - beta * to_behavior) ** 2
        elif name == "flowrl":
            length = max(1, sum(bool(real) for real in inputs.mask[row]))
            scaled = (reward - mean) / (deviation + 1e-6) / beta
            total += held[row] * (float(outputs.log_z[row]) + to_ref / length - scaled) ** 2
        elif name == "a_star_po":
            terms = []
            for other in rows:
                if other != row:
                    weight = row_sum(inputs.ref_logprobs, inputs, other) - row_sum(inputs.behavior_logprobs, inputs, other)
                    terms.append(weight + rewards[other] / beta)
            total += (beta * to_ref - (reward - beta * log_mean_exp(terms))) ** 2
        elif name == "asymre":
            total -= (reward - (mean + s.asymre_delta)) * policy
        else:
            total -= held[row] * (reward - s.topr_baseline) * policy
    return total


def sibling_loss(name: str, outputs: PolicyOutputs, held: list[float] | None, inputs: ObjectiveInputs) -> float:
    B = len(inputs.mask)
    groups = range(0, B, inputs.settings.completions)
    return sum(group_loss(name, outputs, held, inputs, first) for first in groups) / B
