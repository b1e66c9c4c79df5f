"""A*-PO: regression on the optimal advantage of the reference policy (Brantley et al. 2025)."""

import jax
import jax.numpy as jnp

from tba_jax.objectives.inputs import ObjectiveInputs, PolicyOutputs


def reference_values(inputs: ObjectiveInputs) -> jax.Array:
    """V̂*_j(x) = β log mean_{k≠j} [ π_ref(y_k|x)/π_behaviour(y_k|x) · exp(r_k/β) ]: float32[Q, K], in units of the reward.

    The mean is an unbiased estimate of E exp(r/β) under π_ref. Where the other rows of the query are drawn from π_ref itself, the
    ratios are 1. Where they are drawn from p*, every term is that expectation, and the estimate is exact.
    """
    log_weight = inputs.grouped(inputs.token_sum(inputs.ref_logprobs) - inputs.token_sum(inputs.behavior_logprobs))
    terms = log_weight + inputs.grouped(inputs.reward) / inputs.beta
    K = terms.shape[1]
    others = jnp.where(jnp.eye(K, dtype=bool), -jnp.inf, terms[:, None, :])
    return inputs.beta * (jax.nn.logsumexp(others, axis=2) - jnp.log(K - 1))


def a_star_po(outputs: PolicyOutputs, inputs: ObjectiveInputs) -> jax.Array:
    """L = mean_{i,j} ( β log π_θ(y_ij|x_i)/π_ref(y_ij|x_i) − (r_ij − V̂*_ij) )²,  V* = β log E_{π_ref} exp(r/β).

    Reference: π_ref of the run, fixed or moving. γ and τ are not read.

    V̂*: the paper samples π_ref once, before training, for every prompt. A run here takes new prompts all the time and holds no
    rows of π_ref for most of them, so the query's other rows stand for these samples, weighed by π_ref/π_behaviour
    (`reference_values`). So rows must be as they were drawn. Refused are truncated rows, which say nothing of the responses that
    they could not have been, forced ends, rows that are chosen by reward (replay.strategy=softmax, say), rows whose behaviour
    nobody knows, and groups that may hold a row twice (replay.recent_fill other than wait): its copy would stand among the other
    rows, and V̂* would hold the row's own reward.

    Optimum: p* = π_ref·exp(r/β) / Z. It is exact on rows of the policy itself, where V̂* is a baseline of other rows, and
    as K grows on any rows of full support. On few old rows V̂* is too low on average, and the optimum is nearer to who drew them;
    `trajectory_balance` has no such error.

    The paper allows another temperature in V* than before the log-ratio; both are β here.

    Needs: behaviour log-probs of untruncated rows, the reference, K at least 2, β above 0. Returns:
      float32[] loss, in squared units of the reward.
    """
    log_ratio = inputs.grouped(inputs.token_sum(outputs.logprobs) - inputs.token_sum(inputs.ref_logprobs))
    advantage = inputs.grouped(inputs.reward) - reference_values(inputs)
    return jnp.mean((inputs.beta * log_ratio - advantage) ** 2)
