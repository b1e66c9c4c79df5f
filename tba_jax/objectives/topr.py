"""TOPR: tapered off-policy REINFORCE (Le Roux et al. 2025, eq. 8)."""

import chex
import jax
import jax.numpy as jnp

from tba_jax.objectives.inputs import ObjectiveInputs, PolicyOutputs
from tba_jax.objectives.ratios import sequence_ratios


def topr(outputs: PolicyOutputs, inputs: ObjectiveInputs) -> jax.Array:
    """L = −mean_{i,j} w R log π_θ(y_ij|x_i),  R = r − c,  w = 1 where R ≥ 0,  w = clip( π_θ/μ, 0, 1 ) where R < 0, detached.

    c = topr_baseline. μ is the row's behaviour, and the ratio is that of the whole response. There is no reference and no β.

    Optimum, on rows of one fixed μ where no R is below 0: μ·R / E R, a weighted likelihood. Rewards of 0 and 1 are such rewards
    at c = 0; the paper's are −1 and 1. Rows of negative R lose their weight as the policy leaves them, which bounds the loss
    below. On-policy, w is 1 everywhere: this is REINFORCE with the baseline c.

    Needs: behaviour log-probs. K may be 1. Returns:
      float32[] loss.
    """
    policy = inputs.token_sum(outputs.logprobs)
    chex.assert_equal_shape([policy, inputs.reward])
    reward = inputs.reward - inputs.settings.topr_baseline
    ratio = jnp.minimum(sequence_ratios(outputs.logprobs, inputs), 1.0)
    weight = jax.lax.stop_gradient(jnp.where(reward < 0, ratio, 1.0))
    return -jnp.mean(weight * reward * policy)
