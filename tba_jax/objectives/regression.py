"""Losses that fit the policy's log-ratios to rewards, and online DPO, which fits their order.

Each returns float32[]: in squared units of the reward, in squared nats per token (`flowrl_linear_z`), or in nats (`online_dpo`).
The reference of `oapl` and `pmd_mean` is the policy that drew the row, of the others π_ref of the run, fixed or moving.
docs/objectives.md tells how each loss differs from its paper, and how its optimum depends on who drew the rows.
"""

import chex
import jax
import jax.numpy as jnp

from tba_jax.objectives.advantages import centred, sequence_log_ratios, sequence_ratios, standardised
from tba_jax.objectives.objective import ObjectiveInputs, PolicyOutputs


def soft_value(rewards: jax.Array, beta: jax.Array) -> jax.Array:
    """V̂(x) = β log mean_j exp(r_j/β): float32[Q, K] -> float32[Q], in units of the reward."""
    return beta * (jax.nn.logsumexp(rewards / beta, axis=1) - jnp.log(rewards.shape[1]))


def oapl(outputs: PolicyOutputs, inputs: ObjectiveInputs) -> jax.Array:
    """L = mean_{i,j} ( β log π_θ(y_ij|x_i)/π_lag(y_ij|x_i) − (r_ij − V̂_i) )²,  V̂_i = β log mean_j exp(r_ij/β).

    OAPL: regression on the optimal advantage, with the lagged sampler as the reference (Ritter et al. 2026, eq. 2 and 3).
    π_lag is the policy that drew the row, as it was sampled: the row's behaviour log-probs.

    Optimum, on rows of one fixed π_lag: π_lag·exp(r/β) / Z, on the responses that π_lag can draw. It is exact as K grows: V̂ of
    K rows is too low on average, which leaves the optimum nearer to π_lag.
    """
    log_ratio = inputs.grouped(sequence_log_ratios(outputs.logprobs, inputs))
    rewards = inputs.grouped(inputs.reward)
    advantage = rewards - soft_value(rewards, inputs.beta)[:, None]
    return jnp.mean((inputs.beta * log_ratio - advantage) ** 2)


def pmd_mean(outputs: PolicyOutputs, inputs: ObjectiveInputs) -> jax.Array:
    """L = mean_{i,j} ( r_ij − r̄_i − β log π_θ(y_ij|x_i)/π_old(y_ij|x_i) )².  The papers' τ is β here.

    Policy mirror descent with the mean reward in the place of log Z (Kimi k1.5, section 2.3.2; PMD-mean: Xu et al. 2026).
    π_old is the policy that drew the row: its behaviour log-probs.

    Optimum, on rows of one fixed π_old: π_old·exp(a − W(c·exp(a))) with a = (r − E r)/β, Lambert's W, and the c at which it is a
    distribution: a mirror step that is shorter than π_old·exp(r/β) / Z. With K rows, a is (1 − 1/K) of that, since r̄ holds the
    row's own reward.
    """
    log_ratio = inputs.grouped(sequence_log_ratios(outputs.logprobs, inputs))
    return jnp.mean((centred(inputs.grouped(inputs.reward)) - inputs.beta * log_ratio) ** 2)


def reference_values(inputs: ObjectiveInputs) -> jax.Array:
    """V̂*_j(x) = β log mean_{k≠j} [ π_ref(y_k|x)/π_behaviour(y_k|x) · exp(r_k/β) ]: float32[Q, K], in units of the reward.

    The mean is an unbiased estimate of E exp(r/β) under π_ref, and exact where the rows are drawn from p*.
    """
    log_weight = inputs.grouped(inputs.token_sum(inputs.ref_logprobs) - inputs.token_sum(inputs.behavior_logprobs))
    terms = log_weight + inputs.grouped(inputs.reward) / inputs.beta
    K = terms.shape[1]
    others = jnp.where(jnp.eye(K, dtype=bool), -jnp.inf, terms[:, None, :])
    return inputs.beta * (jax.nn.logsumexp(others, axis=2) - jnp.log(K - 1))


def a_star_po(outputs: PolicyOutputs, inputs: ObjectiveInputs) -> jax.Array:
    """L = mean_{i,j} ( β log π_θ(y_ij|x_i)/π_ref(y_ij|x_i) − (r_ij − V̂*_ij) )²,  V* = β log E_{π_ref} exp(r/β).

    A*-PO: regression on the optimal advantage of the reference policy (Brantley et al. 2025).
    V̂*: the paper samples π_ref once for every prompt, before training. A run here has no rows of π_ref for most prompts, so the
    query's other rows stand for these samples, weighed by π_ref/π_behaviour (`reference_values`). So rows must be as they were
    drawn, and none twice in a group (Objective.as_drawn).

    Optimum: p* = π_ref·exp(r/β) / Z. It is exact on rows of the policy itself, and as K grows on any rows of full support. On few
    old rows V̂* is too low on average, and the optimum is nearer to who drew them.
    """
    log_ratio = inputs.grouped(inputs.token_sum(outputs.logprobs) - inputs.token_sum(inputs.ref_logprobs))
    advantage = inputs.grouped(inputs.reward) - reference_values(inputs)
    return jnp.mean((inputs.beta * log_ratio - advantage) ** 2)


def flowrl_linear_z(outputs: PolicyOutputs, inputs: ObjectiveInputs) -> jax.Array:
    """L = mean_{i,j} w ( log Z_φ(x) + log π_θ(y|x)/|y| − r̂/β − log π_ref(y|x)/|y| )²,  r̂ = (r − r̄)/std of the group.

    FlowRL with a linear log Z: trajectory balance of mean log-probs with a learned log Z (after Zhu et al. 2025).
    w = clip( π_θ(y|x)/π_behaviour(y|x), 1 − clip_low, 1 + clip_high ), of the whole response, detached. The paper's β is 1/β.

    Optimum, on rows of one fixed policy of full support: π_ref·exp(|y| (r̂/β − log Z)), with the log Z at which it is a
    distribution: it is not p*. Log Z is linear in the mean state of the prompt's tokens, through which no gradient flows. FlowRL
    itself has a network of three layers with dropout there, and lets the gradient through.
    """
    log_ratio = inputs.token_sum(outputs.logprobs) - inputs.token_sum(inputs.ref_logprobs)
    chex.assert_equal_shape([outputs.log_z, log_ratio, inputs.reward])
    scaled_reward = standardised(inputs.grouped(inputs.reward)).reshape(-1) / inputs.beta
    residual = outputs.log_z + log_ratio / inputs.lengths() - scaled_reward
    low, high = 1 - inputs.settings.clip_low, 1 + inputs.settings.clip_high
    weight = jax.lax.stop_gradient(jnp.clip(sequence_ratios(outputs.logprobs, inputs), low, high))
    return jnp.mean(weight * residual**2)


def online_dpo(outputs: PolicyOutputs, inputs: ObjectiveInputs) -> jax.Array:
    """L = −mean_i log σ( β (Δ_best − Δ_worst) ),  Δ = Σ_t log π_θ/π_ref (Rafailov et al. 2023, eq. 7).

    Online DPO: preferences between responses of the policy (Guo et al. 2024; best against worst: Noukhovitch et al. 2024).
    Best and worst are the first rows with the highest and the lowest reward of a query. The loss of a query whose rewards are all
    equal is 0.
    """
    chex.assert_equal_shape([outputs.logprobs, inputs.mask])
    delta = inputs.grouped(inputs.token_sum(outputs.logprobs - inputs.ref_logprobs))
    rewards = inputs.grouped(inputs.reward)
    best, worst = jnp.argmax(rewards, axis=1, keepdims=True), jnp.argmin(rewards, axis=1, keepdims=True)
    margin = jnp.take_along_axis(delta, best, axis=1) - jnp.take_along_axis(delta, worst, axis=1)
    return -jnp.mean(jnp.where(best == worst, 0.0, jax.nn.log_sigmoid(inputs.beta * margin)))
