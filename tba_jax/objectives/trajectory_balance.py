"""Trajectory balance with the VarGrad estimate of log Z or a learned log Z (TBA paper: Bartoldson et al. 2025, eq. 3-5).

VarGrad: Richter et al. 2020. Learned log Z: Malkin et al. 2022, eq. 14; for language models Lee et al. 2024.
"""

import chex
import jax
import jax.numpy as jnp

from tba_jax.objectives.objective import ObjectiveInputs, PolicyOutputs


def vargrad_log_z(policy_logprob_sum: jax.Array, log_target: jax.Array) -> jax.Array:
    """log Ẑ(x) = mean_j [ log p̃(y_j|x) − log π_θ(y_j|x) ], detached: float32[Q, K] twice to float32[Q], nats."""
    chex.assert_rank([policy_logprob_sum, log_target], 2)
    return jax.lax.stop_gradient(jnp.mean(log_target - policy_logprob_sum, axis=1))


def trajectory_balance(outputs: PolicyOutputs, inputs: ObjectiveInputs) -> jax.Array:
    """L = mean_{i,j} ( log Ẑ(x_i) + log π_θ(y_ij|x_i) − log p̃(y_ij|x_i) )²,  log p̃ = log π_ref + r/β at γ = τ = 1.

    With δ = log π_θ − log p̃, the mean of (δ_j − δ_k)² over the pairs of a group is 2K/(K − 1) times L, so a pairwise loss has the
    same gradient up to that factor. The loss is in nats²; its gradient is −(2/β) mean A ∇ log π_θ, with A as in
    tba_prime_advantage without clipping.
    """
    policy = inputs.grouped(inputs.token_sum(outputs.logprobs))
    target = inputs.grouped(inputs.log_target())
    residual = vargrad_log_z(policy, target)[:, None] + policy - target
    return jnp.mean(residual**2)


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


def learned_log_z(outputs: PolicyOutputs, inputs: ObjectiveInputs) -> jax.Array:
    """L = mean_{i,j} ( log Z_φ(x_i) + log π_θ(y_ij|x_i) − log p̃(y_ij|x_i) )², nats², with a gradient for φ too; K may be 1."""
    policy = inputs.token_sum(outputs.logprobs)
    chex.assert_equal_shape([outputs.log_z, policy, inputs.reward])
    residual = outputs.log_z + policy - inputs.log_target()
    return jnp.mean(residual**2)
