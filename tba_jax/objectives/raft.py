"""RAFT: supervised fine-tuning on the best responses of each group (Dong et al. 2023)."""

import jax
import jax.numpy as jnp

from tba_jax.objectives.inputs import ObjectiveInputs, PolicyOutputs


def raft(outputs: PolicyOutputs, inputs: ObjectiveInputs) -> jax.Array:
    """L = −mean_{i,j} w_ij log π_θ(y_ij|x_i),  w_ij = 1 where r_ij is the highest reward of query i, tied rows included, else 0.

    A query teaches nothing if its rewards are all equal and not above 0: none of its responses is known to be good. For rewards
    of 0 and 1, L = −mean r log π_θ: REINFORCE without a baseline. The loss has neither the reference nor β: the paper's optional
    KL penalty in the reward is left out.

    Returns:
      float32[] loss in nats.
    """
    policy, rewards = inputs.grouped(inputs.token_sum(outputs.logprobs)), inputs.grouped(inputs.reward)
    best = jnp.max(rewards, axis=1, keepdims=True)
    taught = (best > jnp.min(rewards, axis=1, keepdims=True)) | (best > 0)
    return -jnp.mean(jnp.where(taught & (rewards == best), policy, 0.0))
