"""IcePop: GRPO without the tokens on which learner and sampler disagree too much (Ling team 2025, "Every Step Evolves")."""

import jax
import jax.numpy as jnp

from tba_jax.objectives.advantages import standardised
from tba_jax.objectives.inputs import ObjectiveInputs, PolicyOutputs
from tba_jax.objectives.ratios import k3, token_ratios


def icepop(outputs: PolicyOutputs, inputs: ObjectiveInputs) -> jax.Array:
    """L = −mean_{i,j} 1/|y| Σ_t [ M(ρ_t) A − β k3_t ],  M(ρ) = ρ within [icepop_low, icepop_high], else 0.

    A as in `grpo`; ρ_t = π_θ/π_behaviour. The paper's ρ has the learner's π_θ_old instead of π_θ, and its loss also has GRPO's
    clipped ratio π_θ/π_θ_old. With one update a batch that ratio is 1, and the gradients are the same.

    Returns:
      float32[] loss.
    """
    s, ratio = inputs.settings, token_ratios(outputs.logprobs, inputs)
    kept = jnp.where((ratio >= s.icepop_low) & (ratio <= s.icepop_high), ratio, 0.0)
    advantage = standardised(inputs.grouped(inputs.reward)).reshape(-1, 1)
    return inputs.mean_per_token(inputs.beta * k3(outputs.logprobs, inputs) - kept * advantage)
