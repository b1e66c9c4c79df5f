"""GRPO (Shao et al. 2024), and Dr. GRPO, which is GRPO without its two normalisations (Liu et al. 2025)."""

import jax

from tba_jax.objectives.advantages import centred, standardised
from tba_jax.objectives.inputs import ObjectiveInputs, PolicyOutputs
from tba_jax.objectives.ratios import clipped_surrogate, k3, token_ratios


def grpo(outputs: PolicyOutputs, inputs: ObjectiveInputs) -> jax.Array:
    """L = −mean_{i,j} 1/|y| Σ_t [ min( ρ_t A, clip(ρ_t, 1 − clip_low, 1 + clip_high) A ) − β k3_t ] (Shao et al. 2024, eq. 3).

    A = (r − r̄)/std over the K rows of a query; ρ_t = π_θ/π_behaviour; k3_t estimates KL(π_θ‖π_ref) (eq. 4).

    Returns:
      float32[] loss.
    """
    return inputs.mean_per_token(_token_losses(outputs, standardised(inputs.grouped(inputs.reward)), inputs))


def dr_grpo(outputs: PolicyOutputs, inputs: ObjectiveInputs) -> jax.Array:
    """As `grpo` with A = r − r̄, and R, the most tokens a response may have, in the place of |y|.

    The paper drops the KL term as well, which is β = 0.

    Returns:
      float32[] loss.
    """
    return inputs.mean_per_budget(_token_losses(outputs, centred(inputs.grouped(inputs.reward)), inputs))


def _token_losses(outputs: PolicyOutputs, advantage: jax.Array, inputs: ObjectiveInputs) -> jax.Array:
    """β k3_t − min( ρ_t A, clip(ρ_t) A ): float32[B, R]. advantage: float32[Q, K]."""
    s, ratio = inputs.settings, token_ratios(outputs.logprobs, inputs)
    surrogate = clipped_surrogate(ratio, advantage.reshape(-1, 1), low=s.clip_low, high=s.clip_high)
    return inputs.beta * k3(outputs.logprobs, inputs) - surrogate
