"""REINFORCE with the mean of the group as baseline, and RLOO with the mean of the group's other rows."""

import jax
import jax.numpy as jnp

from tba_jax.objectives.advantages import centred, leave_one_out, regularised_rewards
from tba_jax.objectives.inputs import ObjectiveInputs, PolicyOutputs


def reinforce(outputs: PolicyOutputs, inputs: ObjectiveInputs) -> jax.Array:
    """L = −mean_{i,j} A_ij log π_θ(y_ij|x_i),  A = R − R̄,  R = r − β Σ_t log π_θ/π_ref detached (Williams 1992).

    The derivation assumes on-policy rows; off-policy rows are not reweighted. On any batch the gradient is β/2 times the gradient
    of trajectory balance at γ = τ = 1 (TBA paper, objective).

    Returns:
      float32[] loss.
    """
    policy = inputs.grouped(inputs.token_sum(outputs.logprobs))
    return -jnp.mean(centred(regularised_rewards(outputs.logprobs, inputs)) * policy)


def rloo(outputs: PolicyOutputs, inputs: ObjectiveInputs) -> jax.Array:
    """L = −mean_{i,j} A_ij log π_θ(y_ij|x_i),  A_ij = R_ij − mean_{k≠j} R_ik (Kool et al. 2019; Ahmadian et al. 2024).

    R as in `reinforce`, whose gradient times K/(K−1) is the gradient here. Off-policy rows are not reweighted either.

    Returns:
      float32[] loss.
    """
    policy = inputs.grouped(inputs.token_sum(outputs.logprobs))
    return -jnp.mean(leave_one_out(regularised_rewards(outputs.logprobs, inputs)) * policy)
