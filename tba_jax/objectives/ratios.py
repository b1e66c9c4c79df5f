"""Ratios π_θ/π_behaviour of tokens and sequences, the clipped surrogate, and the KL estimate of a token.

Log ratios are clipped before the exponential: no value or gradient is infinite, and the gradient is 0 beyond the bound.
"""

import chex
import jax
import jax.numpy as jnp

from tba_jax.objectives.inputs import ObjectiveInputs

# Nats. The square of e^20 = 5e8, and the sums of such squares in a gradient's norm, are within float32.
LARGEST_LOG_RATIO = 20.0


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
