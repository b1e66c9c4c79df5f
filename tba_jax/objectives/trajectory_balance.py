"""VarGrad trajectory balance (PAPER §1; Bartoldson et al. 2025, eq. 3-5; VarGrad: Richter et al. 2020)."""

import chex
import jax
import jax.numpy as jnp

from tba_jax.objectives.inputs import Measurements, ObjectiveInputs


def vargrad_log_z(policy_logprob_sum: jax.Array, ref_logprob_sum: jax.Array, reward: jax.Array, *, beta: jax.Array) -> jax.Array:
    """log Ẑ(x) = mean_j [ log π_ref(y_j|x) − log π_θ(y_j|x) + r(y_j;x)/β ], detached.

    Args:
      policy_logprob_sum, ref_logprob_sum: float32[Q, K], nats; reward: float32[Q, K]; beta: float32[].

    Returns:
      float32[Q], no gradient flows through it.
    """
    chex.assert_rank([policy_logprob_sum, ref_logprob_sum, reward], 2)
    return jax.lax.stop_gradient(jnp.mean(ref_logprob_sum - policy_logprob_sum + reward / beta, axis=1))


def trajectory_balance(policy_logprobs: jax.Array, inputs: ObjectiveInputs) -> tuple[jax.Array, Measurements]:
    """L = mean_{i,j} ( log Ẑ(x_i) + log π_θ(y_ij|x_i) − log π_ref(y_ij|x_i) − r(y_ij;x_i)/β )².

    Args:
      policy_logprobs: float32[B, R], nats at the scoring temperature, 0 where masked; the gradient flows through it.
      inputs: the batch; rows of one query are consecutive.

    Returns:
      float32[] loss in nats², and measurements.
    """
    policy, ref, reward = inputs.grouped_sums(policy_logprobs)
    beta = inputs.beta
    log_z = vargrad_log_z(policy, ref, reward, beta=beta)
    residual = log_z[:, None] + policy - ref - reward / beta
    return jnp.mean(residual**2), {"log_z": jnp.mean(log_z), "log_z_std": jnp.std(log_z)}
