"""Online DPO: preferences between responses of the policy (Guo et al. 2024; best against worst: Noukhovitch et al. 2024)."""

import chex
import jax
import jax.numpy as jnp

from tba_jax.objectives.inputs import ObjectiveInputs, PolicyOutputs


def online_dpo(outputs: PolicyOutputs, inputs: ObjectiveInputs) -> jax.Array:
    """L = −mean_i log σ( β (Δ_best − Δ_worst) ),  Δ = Σ_t log π_θ/π_ref (Rafailov et al. 2023, eq. 7).

    Best and worst are the first rows with the highest and the lowest reward of a query. The loss of a query whose rewards are all
    equal is 0.

    Returns:
      float32[] loss in nats.
    """
    chex.assert_equal_shape([outputs.logprobs, inputs.mask])
    delta = inputs.grouped(inputs.token_sum(outputs.logprobs - inputs.ref_logprobs))
    rewards = inputs.grouped(inputs.reward)
    best, worst = jnp.argmax(rewards, axis=1, keepdims=True), jnp.argmin(rewards, axis=1, keepdims=True)
    margin = jnp.take_along_axis(delta, best, axis=1) - jnp.take_along_axis(delta, worst, axis=1)
    return -jnp.mean(jnp.where(best == worst, 0.0, jax.nn.log_sigmoid(inputs.beta * margin)))
