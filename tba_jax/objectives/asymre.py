"""AsymRE: off-policy REINFORCE with a baseline below the sampler's mean reward (Arnal et al. 2025)."""

import jax
import jax.numpy as jnp

from tba_jax.objectives.advantages import centred
from tba_jax.objectives.inputs import ObjectiveInputs, PolicyOutputs


def asymre(outputs: PolicyOutputs, inputs: ObjectiveInputs) -> jax.Array:
    """L = −mean_{i,j} (r_ij − V_i) log π_θ(y_ij|x_i),  V_i = r̄_i + δ,  δ = asymre_delta, at most 0.

    There is no reference and no β, and rows are not weighed by a ratio.

    Optimum, on rows of one fixed policy μ of which every reward is at least V: μ·(r − V) / (E r − V), a policy of larger mean
    reward than μ. With K rows, r − E r is (1 − 1/K) of that, since r̄ holds the row's own reward. If rewards lie below V the loss
    has no lower bound; the paper shows that the policy still improves on μ while δ is below 0, and loses its support at δ = 0.

    Needs: K at least 2. Returns:
      float32[] loss.
    """
    policy = inputs.grouped(inputs.token_sum(outputs.logprobs))
    return -jnp.mean((centred(inputs.grouped(inputs.reward)) - inputs.settings.asymre_delta) * policy)
