"""f-trajectory balance: a convex loss of the trajectory-balance residual for each α-divergence (Fawkes & Hartford 2026)."""

import jax
import jax.numpy as jnp

from tba_jax.objectives.objective import ObjectiveInputs, PolicyOutputs
from tba_jax.objectives.trajectory_balance import trajectory_balance


def f_trajectory_balance(outputs: PolicyOutputs, inputs: ObjectiveInputs) -> jax.Array:
    """L = mean_{i,j} 2 ( e^(−αδ_ij) + αδ_ij − 1 ) / α²,  δ = log Ẑ + log π_θ − log p̃,  log Ẑ = 1/α log mean_j ( p̃/π_θ )^α.

    f-trajectory balance for the α-divergences (Fawkes & Hartford 2026): another convex loss of the same δ, so p̃/Z is the optimum
    on rows of any full support. As α → 0 it is `trajectory_balance`. log Ẑ makes the loss least; its gradient by log π_θ(y_j) is
    2/α ( 1/K − softmax_j( α (log p̃ − log π_θ) ) ), a row's share of the group less that of its weight.

    As K grows, the gradient on rows of the policy itself is that of 2 log E_πθ[ (p*/π_θ)^α ] / ( α (α − 1) ), twice the Rényi
    form of the divergence: KL(π_θ‖p*) as α → 0, which seeks modes, and KL(p*‖π_θ) at α = 1, which covers them. Second hand: the
    paper's abstract has the correspondence of losses and divergences, and this estimate of log Z is not known to be its own.
    """
    alpha = inputs.settings.divergence_alpha
    if alpha == 0:
        return trajectory_balance(outputs, inputs)
    policy = inputs.grouped(inputs.token_sum(outputs.logprobs))
    off = alpha * (policy - inputs.grouped(inputs.log_target()))
    log_mean = jax.nn.logsumexp(-off, axis=1, keepdims=True) - jnp.log(off.shape[1])
    residual = off + jax.lax.stop_gradient(log_mean)  # at least −log K
    return jnp.mean(jnp.expm1(-residual) + residual) * (2 / alpha**2)
