"""Random batches, and every objective as NumPy loops over rows: what tests of tba_jax.objectives compare with."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from tba_jax.objectives import OBJECTIVES
from tba_jax.objectives.objective import ObjectiveInputs, ObjectiveSettings, PolicyOutputs

# Name of the form -> name of the objective, settings.
FORMS: dict[str, tuple[str, dict[str, Any]]] = {name: (name, {}) for name in OBJECTIVES} | {
    "f_trajectory_balance, α < 0": ("f_trajectory_balance", {"divergence_alpha": -0.5}),
    "f_trajectory_balance, α = 0": ("f_trajectory_balance", {"divergence_alpha": 0.0}),
    "tba_prime, unweighted": ("tba_prime", {"importance_clip": 0.0}),
    "tba_prime, by row": ("tba_prime", {"row_divisor": "row_length"}),
    "proximal_rloo": ("proximal_rloo", {"clip_low": 0.9, "clip_high": 2.0}),
    "ppo": ("ppo", {"clip_low": 0.3, "gae_lambda": 0.8, "value_coefficient": 0.4}),
    "vine_ppo": ("vine_ppo", {"clip_low": 0.3, "clip_high": 0.5}),
    "grpo": ("grpo", {"clip_low": 0.3, "clip_high": 0.5}),
    "gspo": ("gspo", {"sequence_clip_low": 0.3, "sequence_clip_high": 0.2}),
    "flowrl_linear_z": ("flowrl_linear_z", {"clip_low": 0.7, "clip_high": 1.5}),
    "gflowrl": ("gflowrl", {"clip_high": 0.5}),
    "gflowrl, bounds met": ("gflowrl", {"clip_high": 0.5, "flow_gap_low": 0.6, "flow_gap_high": 0.9}),
    "optimal_baseline, unweighted": ("optimal_baseline", {"importance_clip": 0.0}),
    "asymre": ("asymre", {"asymre_delta": -0.4}),
    "topr": ("topr", {"topr_baseline": 0.2}),
}
# Objectives that do not compare the rows of a query.
UNCOUPLED = ("learned_log_z", "frozen_log_z", "ppo", "vine_ppo", "topr")


def random_batch(
    Q: int, K: int, R: int, *, seed: int = 0, outliers: float = 0.0, dtype: type = np.float64, **settings: Any
) -> tuple[PolicyOutputs, ObjectiveInputs]:
    """Ragged lengths from 0 to R with holes; what is masked holds numbers that must not count.

    outliers: the share of log-probs between −40 and −12, beyond what TBA′ clips; all others are above −9. settings: β, γ and τ,
    which are 0.3, 1 and 1 where they are not given, and those of ObjectiveSettings.
    """
    usual = {"beta": 0.3, "ref_temperature": 1.0, "reward_temperature": 1.0}
    coefficients = {name: dtype(settings.pop(name, value)) for name, value in usual.items()}
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
        **dict(ref_logprobs=ref, behavior_logprobs=behavior, mask=mask, reward=reward, state_values=state_values),
        **coefficients,
        settings=ObjectiveSettings(completions=K, **settings),
        prompt_length=rng.integers(1, 2 * R + 1, B).astype(np.int32),
    )
    return PolicyOutputs(logprobs=policy, log_z=log_z, values=values), inputs


@functools.partial(jax.jit, static_argnums=0)
def _value_and_grad(name: str, outputs: PolicyOutputs, inputs: ObjectiveInputs) -> tuple[jax.Array, PolicyOutputs]:
    return jax.value_and_grad(OBJECTIVES[name].loss)(outputs, inputs)


def evaluate(name: str, outputs: PolicyOutputs, inputs: ObjectiveInputs) -> tuple[float, PolicyOutputs]:
    """The loss and its gradient by each of the outputs, at the precision of the batch."""
    with jax.enable_x64(outputs.logprobs.dtype == np.float64):
        loss, gradient = _value_and_grad(name, outputs, inputs)
    assert loss.shape == () and loss.dtype == gradient.logprobs.dtype == outputs.logprobs.dtype
    return float(loss), jax.tree.map(np.asarray, gradient)


class Row(NamedTuple):
    """A row in float64; per-token arrays are of its real tokens alone."""

    policy: np.ndarray
    ref: np.ndarray
    behavior: np.ndarray
    values: np.ndarray
    state_values: np.ndarray
    reward: float
    log_z: float
    prompt: int

    @property
    def to_ref(self) -> float:
        return self.policy.sum() - self.ref.sum()

    @property
    def to_behavior(self) -> float:
        return self.policy.sum() - self.behavior.sum()


def rows_of(outputs: PolicyOutputs, inputs: ObjectiveInputs) -> list[Row]:
    per_token = (outputs.logprobs, inputs.ref_logprobs, inputs.behavior_logprobs, outputs.values, inputs.state_values)
    per_row = (inputs.reward, outputs.log_z, inputs.prompt_length)
    return [
        Row(*(np.float64(x[row][real]) for x in per_token), *(x[row].item() for x in per_row))
        for row, real in enumerate(inputs.mask)
    ]


def log_targets(inputs: ObjectiveInputs) -> np.ndarray:
    """log p̃ of every row: float64[B]."""
    ref = np.where(inputs.mask, inputs.ref_logprobs, 0).sum(1, dtype=np.float64)
    beta, gamma, tau = float(inputs.beta), float(inputs.ref_temperature), float(inputs.reward_temperature)
    return (ref / gamma + inputs.reward.astype(np.float64) / beta) / tau


def bounded_exp(log_ratio: Any) -> Any:
    return np.exp(np.clip(log_ratio, -20.0, 20.0))


def clipped(ratio: Any, advantage: Any, low: float, high: float) -> Any:
    return np.minimum(ratio * advantage, np.clip(ratio, 1 - low, 1 + high) * advantage)


def k3(row: Row) -> np.ndarray:
    d = np.clip(row.ref - row.policy, -20.0, 20.0)
    return np.exp(d) - d - 1


def gae(row: Row, beta: float, decay: float) -> np.ndarray:
    """A_t = Σ_l λ^l δ_{t+l}, of rewards −β log π_θ/π_ref a token, + r at the last one, as the sum is written."""
    rewards = -beta * (row.policy - row.ref)
    rewards[-1:] += row.reward
    deltas = rewards + np.append(row.values[1:], 0.0)[: len(rewards)] - row.values
    return np.array([sum(decay**i * delta for i, delta in enumerate(deltas[t:])) for t in range(len(deltas))])


def step_advantages(row: Row) -> np.ndarray:
    """Of each step, from one valued state to the next."""
    starts = np.flatnonzero(~np.isnan(row.state_values))
    values = np.append(row.state_values[starts], row.reward)
    return np.repeat(np.diff(values), np.diff(np.append(starts, len(row.policy))))


def group_losses(name: str, rows: Sequence[Row], held: Sequence[Row], inputs: ObjectiveInputs) -> list[float]:
    """What each of the K rows of a query adds to the mean. held: the same rows, of which what is detached is computed."""
    s, R, beta, K = inputs.settings, inputs.mask.shape[1], float(inputs.beta), len(rows)
    gamma, tau = float(inputs.ref_temperature), float(inputs.reward_temperature)
    reward = np.array([row.reward for row in rows])
    policy = np.array([row.policy.sum() for row in rows])
    to_ref, to_behavior = (np.array([getattr(row, ratio) for row in rows]) for ratio in ("to_ref", "to_behavior"))
    ratio, of_held = bounded_exp(to_behavior), bounded_exp([row.to_behavior for row in held])
    centred = reward - reward.mean()
    standardised = centred / (reward.std() + 1e-6)
    regularised = reward - beta * np.array([row.to_ref for row in held])
    others = [np.delete(np.arange(K), j) for j in range(K)]
    target = (np.array([row.ref.sum() for row in rows]) / gamma + reward / beta) / tau

    def of_tokens(loss: Callable[[int, Row, np.ndarray], Any], *, by_length: bool = False) -> list[float]:
        """loss(number, row, ratios of its tokens) summed over tokens, divided by |y| or R."""
        sums = [np.sum(loss(j, row, bounded_exp(row.policy - row.behavior))) for j, row in enumerate(rows)]
        return [total / (max(len(row.policy), 1) if by_length else R) for total, row in zip(sums, rows, strict=True)]

    def surrogate(ratios: np.ndarray, advantage: Any) -> Any:
        return clipped(ratios, advantage, s.clip_low, s.clip_high)

    def log_mean_exp(terms: np.ndarray) -> float:
        return np.logaddexp.reduce(terms) - np.log(len(terms))

    def tba_prime() -> list[float]:
        clip, bound = s.log_ratio_clip, s.importance_clip
        kl = np.array([np.clip(row.policy - row.ref / (gamma * tau), -clip, clip).sum() for row in held])
        advantage = centred / tau - beta * (kl - kl.mean())
        weights = [np.minimum(np.exp(row.policy - row.behavior), bound) if bound else row.policy for row in rows]
        divisors = [R if s.row_divisor == "response_budget" else row.prompt + len(row.policy) for row in rows]
        return [-w.sum() * a / n for w, a, n in zip(weights, advantage, divisors, strict=True)]

    def ppo() -> list[float]:
        advantages = [gae(row, beta, s.gae_lambda) for row in held]
        returns = [a + row.values for a, row in zip(advantages, held, strict=True)]
        return of_tokens(
            lambda j, row, rho: s.value_coefficient * (row.values - returns[j]) ** 2 / 2 - surrogate(rho, advantages[j])
        )

    def online_dpo() -> list[float]:
        margin = beta * (to_ref[reward.argmax()] - to_ref[reward.argmin()])
        return [0.0 if reward.max() == reward.min() else np.logaddexp(0, -margin)] * K

    def raft() -> Any:
        taught = reward.max() > reward.min() or reward.max() > 0
        return -policy * (taught & (reward == reward.max()))

    def icepop(j: int, row: Row, rho: np.ndarray) -> np.ndarray:
        return beta * k3(row) - np.where((rho >= s.icepop_low) & (rho <= s.icepop_high), rho, 0.0) * standardised[j]

    def cispo(j: int, row: Row, _: np.ndarray) -> np.ndarray:
        return -np.minimum(bounded_exp(held[j].policy - held[j].behavior), 1 + s.clip_high) * standardised[j] * row.policy

    def gspo() -> Any:
        rho = bounded_exp([total / max(len(row.policy), 1) for total, row in zip(to_behavior, rows, strict=True)])
        return -clipped(rho, standardised, s.sequence_clip_low, s.sequence_clip_high)

    def flowrl_linear_z() -> Any:
        lengths = np.array([max(len(row.policy), 1) for row in rows])
        log_z, weight = np.array([row.log_z for row in rows]), np.clip(of_held, 1 - s.clip_low, 1 + s.clip_high)
        return weight * (log_z + to_ref / lengths - standardised / beta) ** 2

    def gflowrl() -> Any:
        gap = np.array([row.behavior.sum() for row in rows]) - target
        bounded = np.clip(gap - gap.mean(), -s.flow_gap_low, s.flow_gap_high)
        return np.minimum(of_held, 1 + s.clip_high) * (bounded + to_behavior) ** 2

    def optimal_baseline() -> Any:
        weight = np.minimum(of_held, s.importance_clip) if s.importance_clip else np.ones(K)
        variance = weight**2 * [max(len(row.policy), 1) for row in rows]
        return -weight * (regularised - variance @ regularised / variance.sum()) * policy

    def a_star_po() -> Any:
        terms = to_behavior - to_ref + reward / beta
        return (beta * to_ref - (reward - beta * np.array([log_mean_exp(terms[other]) for other in others]))) ** 2

    def f_trajectory_balance() -> Any:
        if not (alpha := s.divergence_alpha):
            return (np.mean(target - [row.policy.sum() for row in held]) + policy - target) ** 2
        log_z = log_mean_exp(alpha * (target - [row.policy.sum() for row in held])) / alpha
        delta = log_z + policy - target
        return 2 * (np.exp(-alpha * delta) + alpha * delta - 1) / alpha**2

    def tpo() -> Any:
        wanted = np.array([row.behavior.sum() for row in rows]) + standardised / beta
        log_q, log_p = (x - np.logaddexp.reduce(x) for x in (wanted, policy))
        return np.exp(log_q) * (log_q - log_p)

    def left_one_out() -> np.ndarray:
        return regularised - [regularised[other].mean() for other in others]

    return {
        "trajectory_balance": lambda: (np.mean(target - [row.policy.sum() for row in held]) + policy - target) ** 2,
        "f_trajectory_balance": f_trajectory_balance,
        "learned_log_z": lambda: (np.array([row.log_z for row in rows]) + policy - target) ** 2,
        "tba_prime": tba_prime,
        "reinforce": lambda: -(regularised - regularised.mean()) * policy,
        "rloo": lambda: -left_one_out() * policy,
        "proximal_rloo": lambda: -surrogate(ratio, left_one_out()),
        "ppo": ppo,
        "vine_ppo": lambda: of_tokens(lambda _, row, rho: beta * k3(row) - surrogate(rho, step_advantages(row))),
        "grpo": lambda: of_tokens(lambda j, row, rho: beta * k3(row) - surrogate(rho, standardised[j]), by_length=True),
        "dr_grpo": lambda: of_tokens(lambda j, row, rho: beta * k3(row) - surrogate(rho, centred[j])),
        "online_dpo": online_dpo,
        "raft": raft,
        "maxrl": lambda: -(centred / reward.mean() if reward.mean() > 0 else np.zeros(K)) * policy,
        "icepop": lambda: of_tokens(icepop, by_length=True),
        "cispo": lambda: of_tokens(cispo),
        "gspo": gspo,
        "oapl": lambda: (beta * to_behavior - (reward - beta * log_mean_exp(reward / beta))) ** 2,
        "pmd_mean": lambda: (centred - beta * to_behavior) ** 2,
        "tpo": tpo,
        "flowrl_linear_z": flowrl_linear_z,
        "frozen_log_z": lambda: (np.array([row.log_z for row in rows]) + policy - target) ** 2,
        "gflowrl": gflowrl,
        "optimal_baseline": optimal_baseline,
        "a_star_po": a_star_po,
        "asymre": lambda: -(centred - s.asymre_delta) * policy,
        "topr": lambda: -np.where(reward < s.topr_baseline, np.minimum(of_held, 1.0), 1.0) * (reward - s.topr_baseline) * policy,
    }[name]()


def loop_loss(name: str, outputs: PolicyOutputs, inputs: ObjectiveInputs, held: PolicyOutputs | None = None) -> float:
    """The loss of an objective in float64. held: outputs of which what is detached is computed; the same where there are none."""
    K, rows = inputs.settings.completions, rows_of(outputs, inputs)
    fixed = rows if held is None else rows_of(held, inputs)
    groups = [slice(first, first + K) for first in range(0, len(rows), K)]
    return float(np.mean(np.concatenate([group_losses(name, rows[group], fixed[group], inputs) for group in groups])))
