"""TBA′, the token-level form of trajectory balance for larger models (TBA paper, TBA′)."""

import chex
import jax
import jax.numpy as jnp

from tba_jax.objectives.inputs import ObjectiveInputs, PolicyOutputs


def tba_prime_advantage(policy_logprobs: jax.Array, inputs: ObjectiveInputs) -> jax.Array:
    """A = (r − r̄)/τ − β (k − k̄),  k = Σ_t clip( log π_θ − log π_ref/(γτ), ±log_ratio_clip ), detached: float32[Q, K].

    r̄ and k̄ are means over the K rows of a query. The paper's form has γ = τ = 1.
    """
    chex.assert_equal_shape([policy_logprobs, inputs.mask])
    clip = inputs.settings.log_ratio_clip
    scale = inputs.ref_temperature * inputs.reward_temperature
    log_ratio = jax.lax.stop_gradient(policy_logprobs) - inputs.ref_logprobs / scale
    kl = inputs.grouped(inputs.token_sum(jnp.clip(log_ratio, -clip, clip)))
    reward = inputs.grouped(inputs.reward) / inputs.reward_temperature
    return reward - jnp.mean(reward, axis=1, keepdims=True) - inputs.beta * (kl - jnp.mean(kl, axis=1, keepdims=True))


def tba_prime(outputs: PolicyOutputs, inputs: ObjectiveInputs) -> jax.Array:
    """L = −mean_{i,j} Σ_t w_t A_ij / n_ij,  w_t = min( π_θ/π_behaviour, importance_clip ), or log π_θ if importance_clip is 0.

    n = R, the most tokens a response may have, for all rows (row_divisor `response_budget`): long responses are not favoured. Or
    n_ij = |x_i| + |y_ij|, the tokens of prompt and response (`row_length`): each token of a long row counts less. That is what
    the authors' code does where a micro-batch is one row, because it divides by the tokens of the micro-batch.

    Returns:
      float32[] loss. If importance_clip is 0, no log ratio is clipped and n = R, its gradient is β/(2R) times the gradient of
      trajectory balance.
    """
    advantage = tba_prime_advantage(outputs.logprobs, inputs).reshape(-1, 1)
    weight = outputs.logprobs
    if inputs.settings.importance_clip:
        # Clipped before the exponential, so that neither the value nor the gradient of a large ratio is infinite.
        bound = jnp.log(inputs.settings.importance_clip)
        weight = jnp.exp(jnp.minimum(outputs.logprobs - inputs.behavior_logprobs, bound))
    return -DIVIDED[inputs.settings.row_divisor](inputs, weight * advantage)


# By ObjectiveSettings.row_divisor: the mean over rows of the sum over tokens, divided.
DIVIDED = {"response_budget": ObjectiveInputs.mean_per_budget, "row_length": ObjectiveInputs.mean_per_row_length}
