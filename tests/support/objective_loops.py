"""Random batches, and every objective as plain Python loops: what tests of tba_jax.objectives compare with."""

import dataclasses
import functools
import math
from typing import Any

import jax
import numpy as np

from tba_jax.objectives import OBJECTIVES
from tba_jax.objectives.inputs import ObjectiveInputs, ObjectiveSettings, PolicyOutputs
from tests.support import sibling_loops

# Name of the form -> name of the objective, settings.
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "trajectory_balance": ("trajectory_balance", {}),
    "learned_log_z": ("learned_log_z", {}),
    "tba_prime": ("tba_prime", {}),
    "tba_prime, unweighted": ("tba_prime", {"importance_clip": 0.0}),
    "tba_prime, by row": ("tba_prime", {"row_divisor": "row_length"}),
    "reinforce": ("reinforce", {}),
    "rloo": ("rloo", {}),
    "proximal_rloo": ("proximal_rloo", {"clip_low": 0.9, "clip_high": 2.0}),
    "ppo": ("ppo", {"clip_low": 0.3, "gae_lambda": 0.8, "value_coefficient": 0.4}),
    "vine_ppo": ("vine_ppo", {"clip_low": 0.3, "clip_high": 0.5}),
    "grpo": ("grpo", {"clip_low": 0.3, "clip_high": 0.5}),
    "dr_grpo": ("dr_grpo", {}),
    "online_dpo": ("online_dpo", {}),
    "raft": ("raft", {}),
    "icepop": ("icepop", {}),
    "gspo": ("gspo", {"sequence_clip_low": 0.3, "sequence_clip_high": 0.2}),
    "cispo": ("cispo", {}),
    "oapl": ("oapl", {}),
    "pmd_mean": ("pmd_mean", {}),
    "flowrl": ("flowrl", {"clip_low": 0.7, "clip_high": 1.5}),
    "a_star_po": ("a_star_po", {}),
    "asymre": ("asymre", {"asymre_delta": -0.4}),
    "topr": ("topr", {"topr_baseline": 0.2}),
}
# Objectives that do not compare the rows of a query, and those that divide by R.
UNCOUPLED = ("learned_log_z", "ppo", "vine_ppo", "topr")
PER_BUDGET = ("tba_prime", "ppo", "vine_ppo", "dr_grpo", "cispo")
PER_ROW = ("ref_logprobs", "behavior_logprobs", "mask", "reward", "state_values", "prompt_length")
LARGEST_LOG_RATIO = 20.0


def random_batch(
    Q: int,
    K: int,
    R: int,
    *,
    seed: int = 0,
    beta: float = 0.3,
    ref_temperature: float = 1.0,
    reward_temperature: float = 1.0,
    outliers: float = 0.0,
    dtype: type = np.float64,
    **settings: Any,
) -> tuple[PolicyOutputs, ObjectiveInputs]:
    """Ragged lengths from 0 to R with holes; what is masked holds numbers that must not count.

    outliers: the share of log-probs between −40 and −12, beyond what TBA′ clips; all others are above −9. settings: of
    ObjectiveSettings.
    """
    rng = np.random.default_rng([seed, Q, K, R])
    B = Q * K
    mask = (np.arange(R) < rng.integers(0, R + 1, (B, 1))) & (rng.random((B, R)) > 0.1)
    logprobs = -np.minimum(rng.exponential(1.0, (3, B, R)), 9.0)
    logprobs = np.where(rng.random((3, B, R)) < outliers, -rng.uniform(12, 40, (3, B, R)), logprobs)
    policy, ref, behavior = np.where(mask, logprobs, rng.uniform(-50, 50, (3, B, R))).astype(dtype)
    reward, log_z = rng.normal(size=B).astype(dtype), np.repeat(rng.normal(size=Q), K).astype(dtype)
    values = np.where(mask, rng.normal(size=(B, R)), rng.uniform(-50, 50, (B, R))).astype(dtype)
    is_first = mask & (np.cumsum(mask, axis=1) == 1)
    state_values = np.where(is_first | (rng.random((B, R)) < 0.5), rng.normal(size=(B, R)), np.nan).astype(dtype)
    inputs = ObjectiveInputs(
        ref_logprobs=ref,
        behavior_logprobs=behavior,
        mask=mask,
        reward=reward,
        beta=dtype(beta),
        ref_temperature=dtype(ref_temperature),
        reward_temperature=dtype(reward_temperature),
        settings=ObjectiveSettings(completions=K, **settings),
        state_values=state_values,
        prompt_length=rng.integers(1, 2 * R + 1, B).astype(np.int32),
    )
    return PolicyOutputs(logprobs=policy, log_z=log_z, values=values), inputs


def rows_of(outputs: PolicyOutputs, inputs: ObjectiveInputs, order: np.ndarray) -> tuple[PolicyOutputs, ObjectiveInputs]:
    """The same batch with its rows in another order."""
    reordered = dataclasses.replace(inputs, **{name: getattr(inputs, name)[order] for name in PER_ROW})
    return jax.tree.map(lambda x: x[order], outputs), reordered


@functools.partial(jax.jit, static_argnums=0)
def _value_and_grad(name: str, outputs: PolicyOutputs, inputs: ObjectiveInputs) -> tuple[jax.Array, PolicyOutputs]:
    return jax.value_and_grad(OBJECTIVES[name].loss)(outputs, inputs)


def evaluate(name: str, outputs: PolicyOutputs, inputs: ObjectiveInputs) -> tuple[float, PolicyOutputs]:
    """The loss and its gradient by each of the outputs, at the precision of the batch."""
    with jax.enable_x64(outputs.logprobs.dtype == np.float64):
        loss, gradient = _value_and_grad(name, outputs, inputs)
    assert loss.shape == () and loss.dtype == gradient.logprobs.dtype == outputs.logprobs.dtype
    return float(loss), jax.tree.map(np.asarray, gradient)


def row_sums(per_token: np.ndarray, mask: np.ndarray) -> list[float]:
    """Of real tokens only."""
    sums = []
    for row in range(len(per_token)):
        total = 0.0
        for t in range(per_token.shape[1]):
            if mask[row, t]:
                total += float(per_token[row, t])
        sums.append(total)
    return sums


def group_means(per_row: list[float], K: int) -> list[float]:
    """The mean of each row's group."""
    means = []
    for row in range(len(per_row)):
        first = row - row % K
        means.append(sum(per_row[first : first + K]) / K)
    return means


def log_targets(inputs: ObjectiveInputs) -> list[float]:
    """log p̃ of every row."""
    beta, gamma, tau = float(inputs.beta), float(inputs.ref_temperature), float(inputs.reward_temperature)
    refs = row_sums(inputs.ref_logprobs, inputs.mask)
    return [(ref / gamma + float(reward) / beta) / tau for ref, reward in zip(refs, inputs.reward, strict=True)]


def held_log_z(policy: np.ndarray, inputs: ObjectiveInputs) -> list[float]:
    """log Ẑ of every row's query."""
    sums = row_sums(policy, inputs.mask)
    return group_means([target - s for target, s in zip(log_targets(inputs), sums, strict=True)], inputs.settings.completions)


def squared_residuals(policy: np.ndarray, log_z: list[float], inputs: ObjectiveInputs) -> float:
    """mean ( log Z + log π_θ − log p̃ )²."""
    sums, targets = row_sums(policy, inputs.mask), log_targets(inputs)
    squares = [(z + s - target) ** 2 for z, s, target in zip(log_z, sums, targets, strict=True)]
    return sum(squares) / len(squares)


def tba_prime_advantages(policy: np.ndarray, inputs: ObjectiveInputs) -> list[float]:
    """TBA′'s A of every row."""
    beta, gamma, tau = float(inputs.beta), float(inputs.ref_temperature), float(inputs.reward_temperature)
    clip, K = inputs.settings.log_ratio_clip, inputs.settings.completions
    kls = []
    for row in range(len(policy)):
        kl = 0.0
        for t in range(policy.shape[1]):
            if inputs.mask[row, t]:
                kl += max(-clip, min(clip, float(policy[row, t]) - float(inputs.ref_logprobs[row, t]) / (gamma * tau)))
        kls.append(kl)
    rewards = [float(reward) / tau for reward in inputs.reward]
    baselines = zip(group_means(rewards, K), group_means(kls, K), strict=True)
    return [r - r_mean - beta * (k - k_mean) for r, k, (r_mean, k_mean) in zip(rewards, kls, baselines, strict=True)]


def weighted_advantages(policy: np.ndarray, advantages: list[float], inputs: ObjectiveInputs) -> float:
    """−mean Σ_t w_t A / n, n the response budget or the tokens of the row."""
    B, R = policy.shape
    bound, total = inputs.settings.importance_clip, 0.0
    for row in range(B):
        own = int(inputs.prompt_length[row]) + len(real_tokens(inputs.mask, row))
        n = {"response_budget": R, "row_length": own}[inputs.settings.row_divisor]
        for t in range(R):
            if inputs.mask[row, t]:
                weight = float(policy[row, t])
                if bound:
                    weight = min(bound, math.exp(weight - float(inputs.behavior_logprobs[row, t])))
                total += weight * advantages[row] / n
    return -total / B


def bounded_exp(log_ratio: float) -> float:
    return math.exp(max(-LARGEST_LOG_RATIO, min(LARGEST_LOG_RATIO, log_ratio)))


def centred_rewards(inputs: ObjectiveInputs, rewards: list[float] | None = None) -> list[float]:
    """r − r̄ of every row."""
    rewards = [float(reward) for reward in inputs.reward] if rewards is None else rewards
    return [r - mean for r, mean in zip(rewards, group_means(rewards, inputs.settings.completions), strict=True)]


def standardised_rewards(inputs: ObjectiveInputs) -> list[float]:
    """(r − r̄) / (std + 1e-6) of every row."""
    differences = centred_rewards(inputs)
    variances = group_means([difference**2 for difference in differences], inputs.settings.completions)
    return [difference / (math.sqrt(v) + 1e-6) for difference, v in zip(differences, variances, strict=True)]


def regularised(policy: np.ndarray, inputs: ObjectiveInputs) -> list[float]:
    """r − β Σ log π_θ/π_ref of every row, less its mean over the group."""
    kls = row_sums(policy - inputs.ref_logprobs, inputs.mask)
    return centred_rewards(inputs, [float(r) - float(inputs.beta) * kl for r, kl in zip(inputs.reward, kls, strict=True)])


def left_one_out(policy: np.ndarray, inputs: ObjectiveInputs) -> list[float]:
    """r_i less the mean of the others, of regularised rewards."""
    K, rewards, found = inputs.settings.completions, [], []
    for row, kl in enumerate(row_sums(policy - inputs.ref_logprobs, inputs.mask)):
        rewards.append(float(inputs.reward[row]) - float(inputs.beta) * kl)
    for row in range(len(rewards)):
        first = row - row % K
        others = [rewards[other] for other in range(first, first + K) if other != row]
        found.append(rewards[row] - sum(others) / (K - 1))
    return found


def real_tokens(mask: np.ndarray, row: int) -> list[int]:
    return [t for t in range(mask.shape[1]) if mask[row, t]]


def gae_of_row(rewards: list[float], values: list[float], decay: float) -> list[float]:
    """A_t = Σ_l λ^l δ_{t+l}, of the tokens of one row, as the sum is written."""
    after = [*values[1:], 0.0]
    deltas = [r + v_next - v for r, v, v_next in zip(rewards, values, after, strict=True)]
    return [sum(decay**later * deltas[t + later] for later in range(len(deltas) - t)) for t in range(len(deltas))]


def ppo_advantages(outputs: PolicyOutputs, inputs: ObjectiveInputs) -> np.ndarray:
    """float64[B, R]: GAE of rewards −β log π_θ/π_ref a token, + r at the last real one."""
    found = np.zeros(inputs.mask.shape)
    for row in range(len(found)):
        if not (tokens := real_tokens(inputs.mask, row)):
            continue
        rewards = [-float(inputs.beta) * float(outputs.logprobs[row, t] - inputs.ref_logprobs[row, t]) for t in tokens]
        rewards[-1] += float(inputs.reward[row])
        values = [float(outputs.values[row, t]) for t in tokens]
        for t, advantage in zip(tokens, gae_of_row(rewards, values, inputs.settings.gae_lambda), strict=True):
            found[row, t] = advantage
    return found


def vine_advantages(inputs: ObjectiveInputs) -> np.ndarray:
    """float64[B, R]: of each step, between two valued states."""
    found = np.zeros(inputs.mask.shape)
    for row in range(len(found)):
        steps: list[list[int]] = []
        for t in real_tokens(inputs.mask, row):
            if math.isnan(inputs.state_values[row, t]):
                steps[-1].append(t)
            else:
                steps.append([t])
        for number, step in enumerate(steps):
            begin = float(inputs.state_values[row, step[0]])
            is_last = number + 1 == len(steps)
            end = float(inputs.reward[row]) if is_last else float(inputs.state_values[row, steps[number + 1][0]])
            for t in step:
                found[row, t] = end - begin
    return found


def log_ratio(outputs: PolicyOutputs, inputs: ObjectiveInputs, row: int, t: int) -> float:
    return float(outputs.logprobs[row, t]) - float(inputs.behavior_logprobs[row, t])


def k3(outputs: PolicyOutputs, inputs: ObjectiveInputs, row: int, t: int) -> float:
    d = float(inputs.ref_logprobs[row, t]) - float(outputs.logprobs[row, t])
    d = max(-LARGEST_LOG_RATIO, min(LARGEST_LOG_RATIO, d))
    return math.exp(d) - d - 1


def clipped(ratio: float, advantage: float, low: float, high: float) -> float:
    return min(ratio * advantage, max(1 - low, min(1 + high, ratio)) * advantage)


def token_surrogates(
    outputs: PolicyOutputs, advantages: np.ndarray, inputs: ObjectiveInputs, *, beta: float, by_length: bool
) -> float:
    """mean Σ_t ( β k3 − clipped surrogate ) / |y| or R. advantages: float64[B, R]."""
    (B, R), s, total = inputs.mask.shape, inputs.settings, 0.0
    for row in range(B):
        tokens = real_tokens(inputs.mask, row)
        for t in tokens:
            surrogate = clipped(bounded_exp(log_ratio(outputs, inputs, row, t)), advantages[row, t], s.clip_low, s.clip_high)
            total += (beta * k3(outputs, inputs, row, t) - surrogate) / (len(tokens) if by_length else R)
    return total / B


def held_by(name: str, outputs: PolicyOutputs, inputs: ObjectiveInputs) -> Any:
    """What the objective holds fixed while it is differentiated by the outputs."""
    R = inputs.mask.shape[1]

    def of_tokens(per_row: list[float]) -> np.ndarray:
        return np.repeat(np.array(per_row)[:, None], R, axis=1)

    if name in sibling_loops.NAMES:
        return sibling_loops.held_weights(name, outputs, inputs)
    if name == "cispo":
        B = len(inputs.mask)
        weights = [[bounded_exp(log_ratio(outputs, inputs, row, t)) for t in range(R)] for row in range(B)]
        return standardised_rewards(inputs), np.minimum(weights, 1 + inputs.settings.clip_high)
    return {
        "trajectory_balance": lambda: held_log_z(outputs.logprobs, inputs),
        "tba_prime": lambda: tba_prime_advantages(outputs.logprobs, inputs),
        "reinforce": lambda: regularised(outputs.logprobs, inputs),
        "rloo": lambda: left_one_out(outputs.logprobs, inputs),
        "proximal_rloo": lambda: left_one_out(outputs.logprobs, inputs),
        "ppo": lambda: (ppo_advantages(outputs, inputs), ppo_advantages(outputs, inputs) + outputs.values),
        "vine_ppo": lambda: vine_advantages(inputs),
        "grpo": lambda: of_tokens(standardised_rewards(inputs)),
        "dr_grpo": lambda: of_tokens(centred_rewards(inputs)),
        "icepop": lambda: standardised_rewards(inputs),
        "gspo": lambda: standardised_rewards(inputs),
    }.get(name, lambda: None)()


def loop_loss(name: str, outputs: PolicyOutputs, held: Any, inputs: ObjectiveInputs) -> float:
    """The loss of an objective in float64. held: see held_by."""
    policy, (B, R), s, beta = outputs.logprobs, inputs.mask.shape, inputs.settings, float(inputs.beta)
    K, total = s.completions, 0.0
    if name in sibling_loops.NAMES:
        return sibling_loops.sibling_loss(name, outputs, held, inputs)
    if name in ("trajectory_balance", "learned_log_z"):
        return squared_residuals(policy, held or [float(z) for z in outputs.log_z], inputs)
    if name == "tba_prime":
        return weighted_advantages(policy, held, inputs)
    if name in ("grpo", "dr_grpo", "vine_ppo"):
        return token_surrogates(outputs, held, inputs, beta=beta, by_length=name == "grpo")
    if name == "ppo":
        advantages, returns = held
        for row in range(B):
            for t in real_tokens(inputs.mask, row):
                total += s.value_coefficient * (float(outputs.values[row, t]) - returns[row, t]) ** 2 / 2 / (B * R)
        return total + token_surrogates(outputs, advantages, inputs, beta=0.0, by_length=False)
    for row in range(B):
        tokens = real_tokens(inputs.mask, row)
        log_ratios = [log_ratio(outputs, inputs, row, t) for t in tokens]
        logprobs = [float(policy[row, t]) for t in tokens]
        if name in ("reinforce", "rloo"):
            total -= held[row] * sum(logprobs)
        elif name == "proximal_rloo":
            total -= clipped(bounded_exp(sum(log_ratios)), held[row], s.clip_low, s.clip_high)
        elif name == "gspo":
            ratio = bounded_exp(sum(log_ratios) / max(len(tokens), 1))
            total -= clipped(ratio, held[row], s.sequence_clip_low, s.sequence_clip_high)
        elif name == "icepop":
            for t, log in zip(tokens, log_ratios, strict=True):
                kept = bounded_exp(log) if s.icepop_low <= bounded_exp(log) <= s.icepop_high else 0.0
                total -= (kept * held[row] - beta * k3(outputs, inputs, row, t)) / len(tokens)
        elif name == "cispo":
            total -= sum(held[1][row, t] * held[0][row] * logprob for t, logprob in zip(tokens, logprobs, strict=True)) / R
        elif row % K == 0:  # of online_dpo and raft, a query at a time
            total += K * preference_loss(name, policy, row, inputs)
    return total / B


def preference_loss(name: str, policy: np.ndarray, first: int, inputs: ObjectiveInputs) -> float:
    """What one query, whose rows begin at `first`, adds to the mean over queries."""
    rewards = [float(r) for r in inputs.reward[first : first + inputs.settings.completions]]
    best, worst = first + rewards.index(max(rewards)), first + rewards.index(min(rewards))
    sums = row_sums(policy, inputs.mask)
    if name == "raft":
        if max(rewards) == min(rewards) <= 0:
            return 0.0
        return -sum(sums[first + j] for j, reward in enumerate(rewards) if reward == max(rewards)) / len(rewards)
    if max(rewards) == min(rewards):
        return 0.0
    deltas = row_sums(policy - inputs.ref_logprobs, inputs.mask)
    x = float(inputs.beta) * (deltas[best] - deltas[worst])
    return math.log1p(math.exp(-x)) if x > 0 else math.log1p(math.exp(x)) - x
