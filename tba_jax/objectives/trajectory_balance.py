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


def learned_log_z(outputs: PolicyOutputs, inputs: ObjectiveInputs) -> jax.Array:
    """L = mean_{i,j} ( log Z_φ(x_i) + log π_θ(y_ij|x_i) − log p̃(y_ij|x_i) )², nats², with a gradient for φ too; K may be 1."""
    policy = inputs.token_sum(outputs.logprobs)
    chex.assert_equal_shape([outputs.log_z, policy, inputs.reward])
    residual = outputs.log_z + policy - inputs.log_target()
    return jnp.mean(residual**2)
