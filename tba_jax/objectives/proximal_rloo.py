"""Proximal RLOO, the off-policy form of RLOO (Noukhovitch et al. 2024)."""

import jax
import jax.numpy as jnp

from tba_jax.objectives.advantages import leave_one_out, regularised_rewards
from tba_jax.objectives.inputs import ObjectiveInputs, PolicyOutputs
from tba_jax.objectives.ratios import clipped_surrogate, sequence_ratios


def proximal_rloo(outputs: PolicyOutputs, inputs: ObjectiveInputs) -> jax.Array:
    """L = −mean_{i,j} min( ρA, clip(ρ, 1 − clip_low, 1 + clip_high) A ),  ρ = π_θ(y|x)/π_behaviour(y|x), A of `rloo`.

    The KL term in A is the current policy's, not the sampling policy's, so that ρA estimates the current policy's objective.

    Returns:
      float32[] loss.
    """
    ratio = inputs.grouped(sequence_ratios(outputs.logprobs, inputs))
    advantage = leave_one_out(regularised_rewards(outputs.logprobs, inputs))
    s = inputs.settings
    return -jnp.mean(clipped_surrogate(ratio, advantage, low=s.clip_low, high=s.clip_high))
