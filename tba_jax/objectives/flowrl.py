"""FlowRL: trajectory balance of mean log-probs with a learned log Z (Zhu et al. 2025)."""

import chex
import jax
import jax.numpy as jnp

from tba_jax.objectives.advantages import standardised
from tba_jax.objectives.inputs import ObjectiveInputs, PolicyOutputs
from tba_jax.objectives.ratios import sequence_ratios


def flowrl(outputs: PolicyOutputs, inputs: ObjectiveInputs) -> jax.Array:
    """L = mean_{i,j} w ( log Z_φ(x) + log π_θ(y|x)/|y| − r̂/β − log π_ref(y|x)/|y| )²,  r̂ = (r − r̄)/std of the group.

    w = clip( π_θ(y|x)/π_behaviour(y|x), 1 − clip_low, 1 + clip_high ), of the whole response, detached. The paper's β multiplies
    r̂; it is 1/β here, so that a larger β keeps the policy closer to π_ref in every objective.

    Reference: π_ref of the run, fixed or moving. γ and τ are not read.

    Optimum, on rows of one fixed policy of full support: π_ref·exp(|y| (r̂/β − log Z)), with the log Z at which it is a
    distribution. Longer responses are moved further, and r̂ depends on who drew the rows: it is not p*.

    Log Z is linear in the mean state of the prompt's tokens, through which no gradient flows (`learned_log_z` has the same head).
    The paper has a network of three layers there and lets the gradient through. In the authors' code for verl w is not
    clipped by default; variants clip it to [0.8, 1.28], or to at most 10.

    Needs: behaviour log-probs, the log Z head, K at least 2, β above 0. Returns:
      float32[] loss in squared nats per token.
    """
    log_ratio = inputs.token_sum(outputs.logprobs) - inputs.token_sum(inputs.ref_logprobs)
    chex.assert_equal_shape([outputs.log_z, log_ratio, inputs.reward])
    scaled_reward = standardised(inputs.grouped(inputs.reward)).reshape(-1) / inputs.beta
    residual = outputs.log_z + log_ratio / inputs.lengths() - scaled_reward
    low, high = 1 - inputs.settings.clip_low, 1 + inputs.settings.clip_high
    weight = jax.lax.stop_gradient(jnp.clip(sequence_ratios(outputs.logprobs, inputs), low, high))
    return jnp.mean(weight * residual**2)
