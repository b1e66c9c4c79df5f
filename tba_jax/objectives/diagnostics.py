"""Measurements of a batch under the current policy, for every objective. The batch may be off-policy."""

import chex
import jax
import jax.numpy as jnp

from tba_jax.objectives.objective import ObjectiveInputs
from tba_jax.objectives.trajectory_balance import vargrad_log_z

# Nats. e^60, and the sum of a batch's such numbers, are within float32. A larger ratio of a token counts as e^60.
_LARGEST = 60.0


def diagnostics(
    policy_logprobs: jax.Array, entropy: jax.Array, inputs: ObjectiveInputs, *, has_reference: bool = True
) -> dict[str, jax.Array]:
    """Measurements of a whole batch of Q queries × K completions; none carries a gradient.

    Args:
      policy_logprobs: float32[B, R], nats at the scoring temperature, 0 where masked; entropy: float32[B, R], nats at the
        scoring temperature, of π_θ at every token; inputs: the batch; has_reference: whether its ref_logprobs are of a policy.

    Returns:
      float32[] each: reward, response_length (tokens), means over rows; entropy, nats per token; and the measurements of
      `_from_reference` (if there is a reference), `_off_policy` and `_target_fit`.
    """
    chex.assert_equal_shape([policy_logprobs, entropy, inputs.mask])
    policy_logprobs, entropy = jax.lax.stop_gradient((policy_logprobs, entropy))
    return {
        "reward": jnp.mean(inputs.reward),
        "response_length": jnp.mean(jnp.sum(inputs.mask, axis=1).astype(jnp.float32)),
        "entropy": jnp.sum(inputs.masked(entropy)) / _tokens(inputs),
        **(_from_reference(policy_logprobs, inputs) if has_reference else {}),
        **_off_policy(policy_logprobs, inputs),
        **_target_fit(policy_logprobs, inputs),
    }


def _tokens(inputs: ObjectiveInputs) -> jax.Array:
    """int32[]: the number of tokens of the batch, at least 1."""
    return jnp.maximum(jnp.sum(inputs.mask), 1)


def _from_reference(policy_logprobs: jax.Array, inputs: ObjectiveInputs) -> dict[str, jax.Array]:
    """kl_to_ref, kl_to_ref_k3: float32[] each, nats per response, estimates of KL(π_θ‖π_ref).

    They are the mean of k = Σ_t log π_θ/π_ref, and the mean of Σ_t (π_ref/π_θ − 1 − log π_ref/π_θ), which is never negative.
    """
    log_kl = inputs.masked(policy_logprobs - inputs.ref_logprobs)
    k3 = jnp.expm1(jnp.clip(-log_kl, -_LARGEST, _LARGEST)) + log_kl
    return {"kl_to_ref": jnp.mean(jnp.sum(log_kl, axis=1)), "kl_to_ref_k3": jnp.mean(jnp.sum(k3, axis=1))}


def _off_policy(policy_logprobs: jax.Array, inputs: ObjectiveInputs) -> dict[str, jax.Array]:
    """How far π_θ is from π_behaviour, float32[] each.

    ratio_mean, ratio_max: over the tokens' π_θ/π_behaviour; ratio_clipped: share of tokens whose ratio is above importance_clip.
    effective_sample_share: (Σ w)² / (B Σ w²) of the rows' w = Π_t π_θ/π_behaviour: 1 on-policy, 1/B if one row has all weight.
    """
    log_ratio = inputs.masked(policy_logprobs - inputs.behavior_logprobs)
    ratio = inputs.masked(jnp.exp(jnp.clip(log_ratio, -_LARGEST, _LARGEST)))
    log_weight = jnp.sum(log_ratio, axis=1)
    weight = jnp.exp(log_weight - jnp.max(log_weight))
    clip = inputs.settings.importance_clip
    return {
        "ratio_mean": jnp.sum(ratio) / _tokens(inputs),
        "ratio_max": jnp.max(ratio),
        "ratio_clipped": jnp.sum(ratio > clip) / _tokens(inputs) if clip else jnp.zeros(()),
        "effective_sample_share": jnp.sum(weight) ** 2 / (weight.size * jnp.sum(weight**2)),
    }


def _target_fit(policy_logprobs: jax.Array, inputs: ObjectiveInputs) -> dict[str, jax.Array]:
    """How far π_θ is from p̃ within each query, float32[] each. At β = 0, where p̃ does not exist, the first four are not finite.

    log_z, log_z_std: nats, mean and standard deviation over queries of VarGrad's log Ẑ(x).
    Only if K > 1:
    log_weight_std: nats, the spread of log p̃ − log π_θ within a query, 0 at the optimum.
    advantage_std: in units of reward / τ, the spread of A = β (log p̃ − log π_θ − log Ẑ), tba_prime_advantage without clipping.
    equal_reward_groups: share of queries whose K rewards are all equal.
    """
    policy, target = inputs.grouped(inputs.token_sum(policy_logprobs)), inputs.grouped(inputs.log_target())
    log_z = vargrad_log_z(policy, target)
    found = {"log_z": jnp.mean(log_z), "log_z_std": jnp.std(log_z)}
    if inputs.settings.completions > 1:
        rewards = inputs.grouped(inputs.reward)
        found["log_weight_std"] = jnp.sqrt(jnp.mean(jnp.var(target - policy, axis=1)))
        found["advantage_std"] = inputs.beta * found["log_weight_std"]
        found["equal_reward_groups"] = jnp.mean((jnp.max(rewards, axis=1) == jnp.min(rewards, axis=1)).astype(jnp.float32))
    return found
