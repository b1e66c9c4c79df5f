"""PPO with a learned value head (Schulman et al. 2017), with the token rewards of RLHF (Ziegler et al. 2019)."""

import chex
import jax

from tba_jax.objectives.advantages import gae, token_rewards
from tba_jax.objectives.inputs import ObjectiveInputs, PolicyOutputs
from tba_jax.objectives.ratios import clipped_surrogate, token_ratios


def ppo(outputs: PolicyOutputs, inputs: ObjectiveInputs) -> jax.Array:
    """L = mean_{i,j} Σ_t [ c (V_t − G_t)²/2 − min( ρ_t A_t, clip(ρ_t, 1 − clip_low, 1 + clip_high) A_t ) ] / R.

    A_t: GAE (λ = gae_lambda, no discount) of `token_rewards`; G_t = A_t + V_t; c = value_coefficient; ρ_t = π_θ/π_behaviour.
    A_t and G_t are detached.

    Published implementations compute values and KL penalties when rows are sampled and keep them for several epochs. Here the
    learner computes both on the batch, from the current value head and policy. Implementations also whiten advantages, clip the
    change of the value and add an entropy bonus; this loss has none of these. A mean over all tokens of a batch would couple its
    groups, so the divisor is R, the most tokens a response may have.

    Returns:
      float32[] loss.
    """
    assert outputs.values is not None, "ppo needs a value head"
    chex.assert_equal_shape([outputs.values, outputs.logprobs, inputs.mask])
    s, values = inputs.settings, jax.lax.stop_gradient(outputs.values)
    advantage = gae(token_rewards(outputs.logprobs, inputs), values, inputs.mask, decay=s.gae_lambda)
    ratio = token_ratios(outputs.logprobs, inputs)
    surrogate = clipped_surrogate(ratio, advantage, low=s.clip_low, high=s.clip_high)
    value_error = (outputs.values - (advantage + values)) ** 2 / 2
    return inputs.mean_per_budget(s.value_coefficient * value_error - surrogate)
