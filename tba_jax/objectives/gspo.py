"""GSPO: group advantages with the length-normalised probability ratio of the whole response (Zheng et al. 2025)."""

import jax
import jax.numpy as jnp

from tba_jax.objectives.advantages import standardised
from tba_jax.objectives.inputs import ObjectiveInputs, PolicyOutputs
from tba_jax.objectives.ratios import bounded_exp, clipped_surrogate, token_log_ratios


def gspo(outputs: PolicyOutputs, inputs: ObjectiveInputs) -> jax.Array:
    """L = −mean_{i,j} min( sA, clip(s, 1 − sequence_clip_low, 1 + sequence_clip_high) A ),  s = (Π_t ρ_t)^(1/|y|).

    A as in `grpo`; ρ_t = π_θ/π_behaviour. There is no KL term, as published.

    Returns:
      float32[] loss.
    """
    mean_log_ratio = jnp.sum(token_log_ratios(outputs.logprobs, inputs), axis=1) / inputs.lengths()
    ratio, advantage = inputs.grouped(bounded_exp(mean_log_ratio)), standardised(inputs.grouped(inputs.reward))
    s = inputs.settings
    return -jnp.mean(clipped_surrogate(ratio, advantage, low=s.sequence_clip_low, high=s.sequence_clip_high))
