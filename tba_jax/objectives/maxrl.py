"""Maximum likelihood RL: REINFORCE whose gradient is divided by the success rate of the query (arXiv 2602.02710)."""

import jax
import jax.numpy as jnp

from tba_jax.objectives.advantages import centred
from tba_jax.objectives.objective import ObjectiveInputs, PolicyOutputs


def maxrl(outputs: PolicyOutputs, inputs: ObjectiveInputs) -> jax.Array:
    """L = −mean_{i,j} (r_ij − r̄_i) / r̄_i log π_θ(y_ij|x_i),  0 for a query whose r̄ is not above 0, and r is 0 or 1.

    Maximum likelihood RL (arXiv 2602.02710): the gradient of a query is divided by its success rate, as that of log p is, where
    p is the probability of success. On rows of the policy itself the expected gradient is that of Σ_{k<K} (1 − p)^k / k, which
    tends to −log p. There is no reference and no β, and off-policy rows are not reweighted.
    """
    rewards = inputs.grouped(inputs.reward)
    mean = jnp.mean(rewards, axis=1, keepdims=True)
    advantage = jnp.where(mean > 0, centred(rewards) / jnp.where(mean > 0, mean, 1.0), 0.0)
    return -jnp.mean(advantage * inputs.grouped(inputs.token_sum(outputs.logprobs)))
