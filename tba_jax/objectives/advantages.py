"""Terms of losses: advantages of responses and of tokens, ratios π_θ/π_behaviour, the clipped surrogate, and k3.

No advantage carries a gradient. Log ratios are clipped before the exponential: no value or gradient is infinite, and the
gradient is 0 beyond the bound.
"""

from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp

from tba_jax.objectives.objective import ObjectiveInputs, ObjectiveSettings

# Added to the standard deviation of a group's rewards. Shao et al. 2024 give no value; public implementations use 1e-8 to 1e-4.
STD_EPSILON = 1e-6
# Nats. The square of e^20 = 5e8, and the sums of such squares in a gradient's norm, are within float32.
LARGEST_LOG_RATIO = 20.0


def regularised_rewards(policy_logprobs: jax.Array, inputs: ObjectiveInputs) -> jax.Array:
    """r − β Σ_t log π_θ/π_ref, with the current policy π_θ, detached: float32[Q, K]."""
    return inputs.grouped(inputs.reward - inputs.beta * jnp.sum(log_kl(policy_logprobs, inputs), axis=1))


def log_kl(policy_logprobs: jax.Array, inputs: ObjectiveInputs) -> jax.Array:
    """log π_θ − log π_ref, detached: float32[B, R], nats, 0 where masked."""
    chex.assert_equal_shape([policy_logprobs, inputs.mask])
    return inputs.masked(jax.lax.stop_gradient(policy_logprobs) - inputs.ref_logprobs)


def centred(rewards: jax.Array) -> jax.Array:
    """r − r̄ with the mean over the K rows of a query: [Q, K] -> [Q, K]. Exactly 0 if all K rewards are equal."""
    chex.assert_rank(rewards, 2)
    # The rounded mean of K equal numbers may differ from them, but the mean of K zeros is 0.
    shifted = rewards - rewards[:, :1]
    return shifted - jnp.mean(shifted, axis=1, keepdims=True)


def leave_one_out(rewards: jax.Array) -> jax.Array:
    """r_i − mean_{j≠i} r_j = K/(K−1) (r_i − r̄): [Q, K] -> [Q, K], K at least 2."""
    K = rewards.shape[1]
    return centred(rewards) * (K / (K - 1))


def standardised(rewards: jax.Array) -> jax.Array:
    """(r − r̄) / (std + STD_EPSILON): [Q, K] -> [Q, K]. 0 if the rewards of a query are equal.

    std² = mean (r − r̄)², divided by K: the group is all that A is relative to, and no sample of more. Implementations whose std
    divides by K − 1 (PyTorch's default) have an A that is smaller by √((K − 1)/K), 0.97 at K = 16, for every group alike.
    """
    difference = centred(rewards)
    return difference / (jnp.sqrt(jnp.mean(difference**2, axis=1, keepdims=True)) + STD_EPSILON)


def token_rewards(policy_logprobs: jax.Array, inputs: ObjectiveInputs) -> jax.Array:
    """−β log π_θ/π_ref of each token, plus r at a response's last token (Ziegler et al. 2019): float32[B, R], 0 where masked."""
    chex.assert_equal_shape_prefix([inputs.mask, inputs.reward], 1)
    tokens_left = jnp.cumsum(inputs.mask[:, ::-1], axis=1)[:, ::-1]
    is_last = inputs.mask & (tokens_left == 1)
    return jnp.where(is_last, inputs.reward[:, None], 0.0) - inputs.beta * log_kl(policy_logprobs, inputs)


def gae(rewards: jax.Array, values: jax.Array, mask: jax.Array, *, decay: float) -> jax.Array:
    """A_t = Σ_l λ^l δ_{t+l},  δ_t = r_t + V_{t+1} − V_t,  V = 0 after the last token (Schulman et al. 2016, eq. 16, γ = 1).

    Args: rewards, values: float32[B, R], of each token, and of the state before it; mask: bool[B, R]; decay: λ. Returns
    float32[B, R], 0 where masked.
    """
    chex.assert_rank([rewards, values, mask], 2)
    chex.assert_equal_shape([rewards, values, mask])

    def back(after: tuple[jax.Array, jax.Array], token: tuple[jax.Array, ...]) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        next_value, next_advantage = after
        reward, value, real = token
        advantage = reward + next_value - value + decay * next_advantage
        here = jnp.where(real, value, next_value), jnp.where(real, advantage, next_advantage)
        return here, jnp.where(real, advantage, 0.0)

    nothing = jnp.zeros_like(values[:, 0])
    by_time = jax.lax.stop_gradient((rewards.T, values.T, mask.T))
    return jax.lax.scan(back, (nothing, nothing), by_time, reverse=True)[1].T


def step_advantages(state_values: jax.Array, reward: jax.Array, mask: jax.Array) -> jax.Array:
    """A_t = V(state after the step of token t) − V(state before that step): float32[B, R], 0 where masked.

    A step leads from one valued state to the next valued state. The last step leads to the end of the response, whose value is
    the reward. All tokens of a step share its advantage. If every state is valued, A_t = V_{t+1} − V_t.

    Args: state_values: float32[B, R], value of the state before each token, NaN if it was not estimated; the state before the
    first token must have a value. mask: bool[B, R]; reward: float32[B].
    """
    chex.assert_equal_shape([state_values, mask])
    chex.assert_shape(reward, mask.shape[:1])
    R = mask.shape[1]
    t = jnp.arange(R)
    valued = mask & ~jnp.isnan(state_values)
    first = jnp.argmax(mask, axis=1, keepdims=True)
    begin = jnp.maximum(jax.lax.cummax(jnp.where(valued, t, 0), axis=1), first)
    later = jax.lax.cummin(jnp.where(valued, t, R), axis=1, reverse=True)
    end = jnp.concatenate([later[:, 1:], jnp.full_like(later[:, :1], R)], axis=1)
    values = jnp.concatenate([state_values, reward[:, None]], axis=1)
    advantage = jnp.take_along_axis(values, end, axis=1) - jnp.take_along_axis(values, begin, axis=1)
    return jax.lax.stop_gradient(jnp.where(mask, advantage, 0.0))


def bounded_exp(log_ratio: jax.Array) -> jax.Array:
    """exp( clip( x, ±LARGEST_LOG_RATIO ) )."""
    return jnp.exp(jnp.clip(log_ratio, -LARGEST_LOG_RATIO, LARGEST_LOG_RATIO))


def token_log_ratios(policy_logprobs: jax.Array, inputs: ObjectiveInputs) -> jax.Array:
    """log π_θ − log π_behaviour, not clipped: float32[B, R], nats, 0 where masked."""
    chex.assert_equal_shape([policy_logprobs, inputs.mask])
    return inputs.masked(policy_logprobs - inputs.behavior_logprobs)


def token_ratios(policy_logprobs: jax.Array, inputs: ObjectiveInputs) -> jax.Array:
    """ρ_t = π_θ/π_behaviour of each token: float32[B, R], 1 where masked."""
    return bounded_exp(token_log_ratios(policy_logprobs, inputs))


def sequence_log_ratios(policy_logprobs: jax.Array, inputs: ObjectiveInputs) -> jax.Array:
    """log π_θ(y|x) − log π_behaviour(y|x) of each response, not clipped: float32[B], nats."""
    return jnp.sum(token_log_ratios(policy_logprobs, inputs), axis=1)


def sequence_ratios(policy_logprobs: jax.Array, inputs: ObjectiveInputs) -> jax.Array:
    """ρ = Π_t ρ_t of each response: float32[B]."""
    return bounded_exp(sequence_log_ratios(policy_logprobs, inputs))


def mean_ratios(policy_logprobs: jax.Array, inputs: ObjectiveInputs) -> jax.Array:
    """(Π_t ρ_t)^(1/|y|) of each response: float32[B]."""
    return bounded_exp(sequence_log_ratios(policy_logprobs, inputs) / inputs.lengths())


def share_beyond(
    ratios: Callable[[jax.Array, ObjectiveInputs], jax.Array], bounds: Callable[[ObjectiveSettings], tuple[float, float]]
) -> Callable[[jax.Array, ObjectiveInputs], jax.Array]:
    """See Objective.clipped. Args: ratios: of tokens [B, R], 1 where masked, or of responses [B]; bounds: lower and upper."""

    def share(policy_logprobs: jax.Array, inputs: ObjectiveInputs) -> jax.Array:
        ratio, (low, high) = ratios(policy_logprobs, inputs), bounds(inputs.settings)
        count = len(ratio) if ratio.ndim == 1 else jnp.maximum(jnp.sum(inputs.mask), 1)
        return jnp.sum((ratio < low) | (ratio > high)) / count

    return share


def clipped_surrogate(ratio: jax.Array, advantage: jax.Array, *, low: float, high: float) -> jax.Array:
    """min( ρA, clip(ρ, 1 − low, 1 + high) A ) (PPO: Schulman et al. 2017, eq. 7). Args: ratio and advantage broadcast."""
    return jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - low, 1 + high) * advantage)


def k3(policy_logprobs: jax.Array, inputs: ObjectiveInputs) -> jax.Array:
    """π_ref/π_θ − log π_ref/π_θ − 1 of each token: float32[B, R], nats, never negative, 0 where masked.

    GRPO and VinePPO have this estimate of KL(π_θ‖π_ref) in the loss (Schulman 2020; Shao et al. 2024, eq. 4). On-policy its value
    is unbiased, but its gradient, (1 − π_ref/π_θ) ∇ log π_θ, is on average the gradient of KL(π_ref‖π_θ).
    """
    chex.assert_equal_shape([policy_logprobs, inputs.mask])
    log_ratio = inputs.masked(inputs.ref_logprobs - policy_logprobs)
    bounded = jnp.clip(log_ratio, -LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    return jnp.expm1(bounded) - bounded
