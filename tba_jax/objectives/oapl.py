"""OAPL: regression on the optimal advantage, with the lagged sampler as the reference (Ritter et al. 2026, eq. 2 and 3)."""

import jax
import jax.numpy as jnp

from tba_jax.objectives.inputs import ObjectiveInputs, PolicyOutputs
from tba_jax.objectives.ratios import sequence_log_ratios


def soft_value(rewards: jax.Array, beta: jax.Array) -> jax.Array:
    """V̂(x) = β log mean_j exp(r_j/β): float32[Q, K] -> float32[Q], in units of the reward."""
    return beta * (jax.nn.logsumexp(rewards / beta, axis=1) - jnp.log(rewards.shape[1]))


def oapl(outputs: PolicyOutputs, inputs: ObjectiveInputs) -> jax.Array:
    """L = mean_{i,j} ( β log π_θ(y_ij|x_i)/π_lag(y_ij|x_i) − (r_ij − V̂_i) )²,  V̂_i = β log mean_j exp(r_ij/β).

    Reference: π_lag is the policy that drew the row, as it was sampled: the row's behaviour log-probs. A moving reference would
    be another policy than the one over whose rows V̂ is a mean. The paper synchronises π_lag every L updates and then drops
    older rows: here publish.every_steps=L, searchers.swap=new_sequences and replay.max_staleness=L − 1. γ, τ and π_ref are not
    read.

    Optimum, on rows of one fixed π_lag: π_lag·exp(r/β) / Z, on the responses that π_lag can draw. It is exact as K grows. V̂ of
    K rows is too low on average, which leaves the optimum nearer to π_lag. If the sampler follows the policy, so does the
    optimum: every synchronisation is a step of size 1/β towards the largest reward, and there is no p*.

    The paper allows another temperature in V̂ than before the log-ratio; both are β here.

    Needs: behaviour log-probs, K at least 2, β above 0. Returns:
      float32[] loss, in squared units of the reward.
    """
    log_ratio = inputs.grouped(sequence_log_ratios(outputs.logprobs, inputs))
    rewards = inputs.grouped(inputs.reward)
    advantage = rewards - soft_value(rewards, inputs.beta)[:, None]
    return jnp.mean((inputs.beta * log_ratio - advantage) ** 2)
