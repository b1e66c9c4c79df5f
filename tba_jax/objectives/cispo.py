"""CISPO: clipped importance weights on every token's log-prob, so that no token loses its gradient (MiniMax-M1 2025)."""

import jax
import jax.numpy as jnp

from tba_jax.objectives.advantages import standardised
from tba_jax.objectives.inputs import ObjectiveInputs, PolicyOutputs
from tba_jax.objectives.ratios import token_ratios


def cispo(outputs: PolicyOutputs, inputs: ObjectiveInputs) -> jax.Array:
    """L = −mean_{i,j} Σ_t sg( min(ρ_t, 1 + clip_high) ) A log π_θ(y_t) / R,  A as in `grpo`, sg: no gradient.

    ρ_t = π_θ/π_behaviour is not clipped from below, and there is no KL term, as published. The paper divides by the number of
    tokens of the group, which favours the tokens of short groups. Here the divisor is R, the most tokens a response may have.

    Returns:
      float32[] loss.
    """
    ratio = jax.lax.stop_gradient(token_ratios(outputs.logprobs, inputs))
    advantage = standardised(inputs.grouped(inputs.reward)).reshape(-1, 1)
    return -inputs.mean_per_budget(jnp.minimum(ratio, 1 + inputs.settings.clip_high) * advantage * outputs.logprobs)
