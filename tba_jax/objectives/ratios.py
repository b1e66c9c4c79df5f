"""Ratios π_θ/π_behaviour of tokens and sequences, their clipped surrogate, and the KL estimate of a token.

Logs are bounded before the exponential: no value and no gradient is infinite, and beyond the bound there is no gradient.
"""

import chex
import jax
import jax.numpy as jnp

from tba_jax.objectives.inputs import ObjectiveInputs

# Nats. e^20 = 5e8, whose square and the sums of it that a gradient's norm takes are within float32.
LARGEST_LOG_RATIO = 20.0


def bounded_exp(log_ratio: jax.Array) -> jax.Array:
    """exp( clip( x, ±LARGEST_LOG_RATIO ) )."""
    return jnp.exp(jnp.clip(log_ratio, -LARGEST_LOG_RATIO, LARGEST_LOG_RATIO))


def token_log_ratios(policy_logprobs: jax.Array, inputs: ObjectiveInputs) -> jax.Array:
    """log π_θ − log π_behaviour: float32[B, R], nats, 0 where masked, not bounded."""
    chex.assert_equal_shape([policy_logprobs, inputs.mask])
    return inputs.masked(policy_logprobs - inputs.behavior_logprobs)


def token_ratios(policy_logprobs: jax.Array, inputs: ObjectiveInputs) -> jax.Array:
    """ρ_t = π_θ/π_behaviour of each token: float32[B, R], 1 where masked."""
    return bounded_exp(token_log_ratios(policy_logprobs, inputs))


def sequence_ratios(policy_logprobs: jax.Array, inputs: ObjectiveInputs) -> jax.Array:
    """ρ = Π_t ρ_t of each response: float32[B]."""
    return bounded_exp(jnp.sum(token_log_ratios(policy_logprobs, inputs), axis=1))


def clipped_surrogate(ratio: jax.Array, advantage: jax.Array, *, low: float, high: float) -> jax.Array:
    """min( ρA, clip(ρ, 1 − low, 1 + high) A ) (PPO: Schulman et al. 2017, eq. 7). Args: of shapes that broadcast."""
    return jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - low, 1 + high) * advantage)


def k3(policy_logprobs: jax.Array, inputs: ObjectiveInputs) -> jax.Array:
    """π_ref/π_θ − log π_ref/π_θ − 1 of each token: float32[B, R], nats, never negative, 0 where masked.

    The estimate of KL(π_θ‖π_ref) that GRPO and VinePPO have in the loss (Schulman 2020; Shao et al. 2024, eq. 4). Its value is
    unbiased on-policy; its gradient there, 1 − π_ref/π_θ times ∇ log π_θ, is on average that of KL(π_ref‖π_θ).
    """
    chex.assert_equal_shape([policy_logprobs, inputs.mask])
    log_ratio = inputs.masked(inputs.ref_logprobs - policy_logprobs)
    bounded = jnp.clip(log_ratio, -LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    return jnp.expm1(bounded) - bounded
