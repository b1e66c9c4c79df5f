"""Random batches, and every objective as plain Python loops: what tests of tba_jax.objectives compare with."""

import dataclasses
import functools
import math

import jax
import numpy as np

from tba_jax.objectives import OBJECTIVES
from tba_jax.objectives.inputs import ObjectiveInputs, ObjectiveSettings, PolicyOutputs

# Name of the form -> name of the objective, importance_clip.
FORMS = {
    "trajectory_balance": ("trajectory_balance", 8.0),
    "learned_log_z": ("learned_log_z", 8.0),
    "tba_prime": ("tba_prime", 8.0),
    "tba_prime, unweighted": ("tba_prime", 0.0),
}
PER_ROW = ("ref_logprobs", "behavior_logprobs", "mask", "reward")


def random_batch(
    Q: int,
    K: int,
    R: int,
    *,
    seed: int = 0,
    beta: float = 0.3,
    ref_temperature: float = 1.0,
    reward_temperature: float = 1.0,
    importance_clip: float = 8.0,
    outliers: float = 0.0,
    dtype: type = np.float64,
) -> tuple[PolicyOutputs, ObjectiveInputs]:
    """Ragged lengths from 0 to R with holes; what is masked holds numbers that must not count.

    outliers: the share of log-probs between −40 and −12, beyond what TBA′ clips; all others are above −9.
    """
    rng = np.random.default_rng([seed, Q, K, R])
    B = Q * K
    mask = (np.arange(R) < rng.integers(0, R + 1, (B, 1))) & (rng.random((B, R)) > 0.1)
    logprobs = -np.minimum(rng.exponential(1.0, (3, B, R)), 9.0)
    logprobs = np.where(rng.random((3, B, R)) < outliers, -rng.uniform(12, 40, (3, B, R)), logprobs)
    policy, ref, behavior = np.where(mask, logprobs, rng.uniform(-50, 50, (3, B, R))).astype(dtype)
    inputs = ObjectiveInputs(
        ref_logprobs=ref,
        behavior_logprobs=behavior,
        mask=mask,
        reward=rng.normal(size=B).astype(dtype),
        beta=dtype(beta),
        ref_temperature=dtype(ref_temperature),
        reward_temperature=dtype(reward_temperature),
        settings=ObjectiveSettings(completions=K, importance_clip=importance_clip),
    )
    return PolicyOutputs(logprobs=policy, log_z=np.repeat(rng.normal(size=Q), K).astype(dtype)), inputs


def rows_of(outputs: PolicyOutputs, inputs: ObjectiveInputs, order: np.ndarray) -> tuple[PolicyOutputs, ObjectiveInputs]:
    """The same batch with its rows in another order."""
    reordered = dataclasses.replace(inputs, **{name: getattr(inputs, name)[order] for name in PER_ROW})
    return PolicyOutputs(logprobs=outputs.logprobs[order], log_z=outputs.log_z[order]), reordered


@functools.partial(jax.jit, static_argnums=0)
def _value_and_grad(name: str, outputs: PolicyOutputs, inputs: ObjectiveInputs) -> tuple[jax.Array, PolicyOutputs]:
    return jax.value_and_grad(OBJECTIVES[name])(outputs, inputs)


def evaluate(name: str, outputs: PolicyOutputs, inputs: ObjectiveInputs) -> tuple[float, PolicyOutputs]:
    """The loss and its gradient by logprobs and log_z, at the precision of the batch."""
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


def held_advantages(policy: np.ndarray, inputs: ObjectiveInputs) -> list[float]:
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
    """−mean Σ_t w_t A / R."""
    B, R = policy.shape
    bound, total = inputs.settings.importance_clip, 0.0
    for row in range(B):
        for t in range(R):
            if inputs.mask[row, t]:
                weight = float(policy[row, t])
                if bound:
                    weight = min(bound, math.exp(weight - float(inputs.behavior_logprobs[row, t])))
                total += weight * advantages[row]
    return -total / (B * R)


def held_by(name: str, outputs: PolicyOutputs, inputs: ObjectiveInputs) -> list[float]:
    """What the objective holds fixed while it is differentiated by logprobs, of every row: log Z or A."""
    if name == "learned_log_z":
        return [float(z) for z in outputs.log_z]
    return (held_log_z if name == "trajectory_balance" else held_advantages)(outputs.logprobs, inputs)


def loop_loss(name: str, policy: np.ndarray, held: list[float], inputs: ObjectiveInputs) -> float:
    """The loss of an objective in float64."""
    return (weighted_advantages if name == "tba_prime" else squared_residuals)(policy, held, inputs)
