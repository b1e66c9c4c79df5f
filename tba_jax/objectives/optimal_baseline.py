"""REINFORCE weighed by importance, with the baseline of least variance (VCPO: Huang et al. 2026)."""

import jax
import jax.numpy as jnp

from tba_jax.objectives.advantages import centred, regularised_rewards, sequence_ratios
from tba_jax.objectives.objective import ObjectiveInputs, PolicyOutputs


def optimal_baseline(outputs: PolicyOutputs, inputs: ObjectiveInputs) -> jax.Array:
    """L = −mean_{i,j} w_ij (R_ij − b_i) log π_θ(y_ij|x_i),  b_i = Σ_j w_ij² |y_ij| R_ij / Σ_j w_ij² |y_ij|,

    R = r − β Σ_t log π_θ/π_ref, w = min( π_θ/μ, importance_clip ) of the response, or 1 if importance_clip is 0; all detached.
    b minimises Σ_j w² ‖∇ log π_θ‖² (R − b)², with |y| for the squared norm of a response's gradient.

    Optimum: p* = π_ref·exp(r/β) / Z, where R is the same for all responses. VCPO's baseline has the squared norms themselves,
    which need a gradient for each row (the authors' README has the equation; its paper scales the learning rate by the effective
    sample share as well, which is left out). That |y| may stand for them, without weights: Hao et al. 2025 (2505.23585).
    """
    rewards, s = regularised_rewards(outputs.logprobs, inputs), inputs.settings
    weight = jnp.ones_like(rewards)
    if s.importance_clip:
        weight = inputs.grouped(jnp.minimum(sequence_ratios(jax.lax.stop_gradient(outputs.logprobs), inputs), s.importance_clip))
    share = weight**2 * inputs.grouped(inputs.lengths())
    share /= jnp.sum(share, axis=1, keepdims=True)
    reward = centred(rewards)  # exactly 0 where all are equal
    advantage = reward - jnp.sum(share * reward, axis=1, keepdims=True)
    return -jnp.mean(weight * advantage * inputs.grouped(inputs.token_sum(outputs.logprobs)))
