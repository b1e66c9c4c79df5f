"""VinePPO: PPO whose values are Monte-Carlo estimates (Kazemnejad et al. 2024)."""

import jax

from tba_jax.objectives.advantages import step_advantages
from tba_jax.objectives.inputs import ObjectiveInputs, PolicyOutputs
from tba_jax.objectives.ratios import clipped_surrogate, k3, token_ratios


def vine_ppo(outputs: PolicyOutputs, inputs: ObjectiveInputs) -> jax.Array:
    """L = −mean_{i,j} Σ_t [ min( ρ_t A_t, clip(ρ_t, 1 − clip_low, 1 + clip_high) A_t ) − β k3_t ] / R.

    A_t: `step_advantages` of the rows' state values, each the mean reward of responses that were sampled from a state between two
    steps. ρ_t = π_θ/π_behaviour; k3_t estimates KL(π_θ‖π_ref). As in `ppo`, the divisor is R, not the number of the batch's
    tokens, and advantages are not whitened.

    Returns:
      float32[] loss.
    """
    assert inputs.state_values is not None, "vine_ppo needs rows with state_values"
    s, policy = inputs.settings, outputs.logprobs
    advantage = step_advantages(inputs.state_values, inputs.reward, inputs.mask)
    surrogate = clipped_surrogate(token_ratios(policy, inputs), advantage, low=s.clip_low, high=s.clip_high)
    return inputs.mean_per_budget(inputs.beta * k3(policy, inputs) - surrogate)
