"""RAFT: supervised fine-tuning on the best response of each group (Dong et al. 2023)."""

import jax
import jax.numpy as jnp

from tba_jax.objectives.inputs import ObjectiveInputs, PolicyOutputs


def raft(outputs: PolicyOutputs, inputs: ObjectiveInputs) -> jax.Array:
    """L = −mean_i log π_θ(y_i,best|x_i), where y_i,best is the first row with the highest reward of query i.

    The loss has neither the reference nor β: the paper's optional KL penalty in the reward is left out.

    Returns:
      float32[] loss in nats.
    """
    policy = inputs.grouped(inputs.token_sum(outputs.logprobs))
    best = jnp.argmax(inputs.grouped(inputs.reward), axis=1, keepdims=True)
    return -jnp.mean(jnp.take_along_axis(policy, best, axis=1))
