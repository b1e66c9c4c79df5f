"""Policy-gradient losses, most of them weighed by ratios π_θ/π_behaviour, where the sampler is not the policy.

Each returns float32[]. ρ_t is π_θ/π_behaviour of a token, R the most tokens a response may have.
"""

import chex
import jax
import jax.numpy as jnp

from tba_jax.objectives.advantages import (
    centred,
    clipped_surrogate,
    gae,
    k3,
    leave_one_out,
    mean_ratios,
    regularised_rewards,
    sequence_ratios,
    standardised,
    step_advantages,
    token_ratios,
    token_rewards,
)
from tba_jax.objectives.objective import ObjectiveInputs, PolicyOutputs

# By ObjectiveSettings.row_divisor: the mean over rows of the sum over tokens, divided.
DIVIDED = {"response_budget": ObjectiveInputs.mean_per_budget, "row_length": ObjectiveInputs.mean_per_row_length}


def reinforce(outputs: PolicyOutputs, inputs: ObjectiveInputs) -> jax.Array:
    """L = −mean_{i,j} A_ij log π_θ(y_ij|x_i),  A = R − R̄,  R = r − β Σ_t log π_θ/π_ref detached (Williams 1992).

    The derivation assumes on-policy rows; off-policy rows are not reweighted. On any batch the gradient is β/2 times the gradient
    of trajectory balance at γ = τ = 1 (TBA paper, objective).
    """
    policy = inputs.grouped(inputs.token_sum(outputs.logprobs))
    return -jnp.mean(centred(regularised_rewards(outputs.logprobs, inputs)) * policy)


def rloo(outputs: PolicyOutputs, inputs: ObjectiveInputs) -> jax.Array:
    """L = −mean_{i,j} A_ij log π_θ(y_ij|x_i),  A_ij = R_ij − mean_{k≠j} R_ik (Kool et al. 2019; Ahmadian et al. 2024).

    R as in `reinforce`, whose gradient times K/(K−1) is the gradient here. Off-policy rows are not reweighted either.
    """
    policy = inputs.grouped(inputs.token_sum(outputs.logprobs))
    return -jnp.mean(leave_one_out(regularised_rewards(outputs.logprobs, inputs)) * policy)


def proximal_rloo(outputs: PolicyOutputs, inputs: ObjectiveInputs) -> jax.Array:
    """L = −mean_{i,j} min( ρA, clip(ρ, 1 − clip_low, 1 + clip_high) A ),  ρ = π_θ(y|x)/π_behaviour(y|x), A of `rloo`.

    Proximal RLOO, the off-policy form of RLOO (Noukhovitch et al. 2024).
    The KL term in A is the current policy's, not the sampling policy's, so that ρA estimates the current policy's objective.
    """
    ratio = inputs.grouped(sequence_ratios(outputs.logprobs, inputs))
    advantage = leave_one_out(regularised_rewards(outputs.logprobs, inputs))
    s = inputs.settings
    return -jnp.mean(clipped_surrogate(ratio, advantage, low=s.clip_low, high=s.clip_high))


def ppo(outputs: PolicyOutputs, inputs: ObjectiveInputs) -> jax.Array:
    """L = mean_{i,j} Σ_t [ c (V_t − G_t)²/2 − min( ρ_t A_t, clip(ρ_t, 1 − clip_low, 1 + clip_high) A_t ) ] / R.

    PPO with a learned value head (Schulman et al. 2017), with the token rewards of RLHF (Ziegler et al. 2019).
    A_t: GAE (λ = gae_lambda, no discount) of `token_rewards`; G_t = A_t + V_t; c = value_coefficient; ρ_t = π_θ/π_behaviour.
    A_t and G_t are detached.

    Values and KL penalties are those of the current value head and policy, where published implementations keep them from when
    rows were sampled; these also whiten advantages, clip the change of the value and add an entropy bonus. A mean over all tokens
    of a batch would couple its groups, so the divisor is R.
    """
    assert outputs.values is not None, "ppo needs a value head"
    chex.assert_equal_shape([outputs.values, outputs.logprobs, inputs.mask])
    s, values = inputs.settings, jax.lax.stop_gradient(outputs.values)
    advantage = gae(token_rewards(outputs.logprobs, inputs), values, inputs.mask, decay=s.gae_lambda)
    ratio = token_ratios(outputs.logprobs, inputs)
    surrogate = clipped_surrogate(ratio, advantage, low=s.clip_low, high=s.clip_high)
    value_error = (outputs.values - (advantage + values)) ** 2 / 2
    return inputs.mean_per_budget(s.value_coefficient * value_error - surrogate)


def vine_ppo(outputs: PolicyOutputs, inputs: ObjectiveInputs) -> jax.Array:
    """L = −mean_{i,j} Σ_t [ min( ρ_t A_t, clip(ρ_t, 1 − clip_low, 1 + clip_high) A_t ) − β k3_t ] / R.

    VinePPO: PPO whose values are Monte-Carlo estimates (Kazemnejad et al. 2024).
    A_t: `step_advantages` of the rows' state values, each the mean reward of responses that were sampled from a state between two
    steps. k3_t estimates KL(π_θ‖π_ref). The divisor is R, and advantages are not whitened, as in `ppo`.
    """
    assert inputs.state_values is not None, "vine_ppo needs rows with state_values"
    s, policy = inputs.settings, outputs.logprobs
    advantage = step_advantages(inputs.state_values, inputs.reward, inputs.mask)
    surrogate = clipped_surrogate(token_ratios(policy, inputs), advantage, low=s.clip_low, high=s.clip_high)
    return inputs.mean_per_budget(inputs.beta * k3(policy, inputs) - surrogate)


def grpo(outputs: PolicyOutputs, inputs: ObjectiveInputs) -> jax.Array:
    """L = −mean_{i,j} 1/|y| Σ_t [ min( ρ_t A, clip(ρ_t, 1 − clip_low, 1 + clip_high) A ) − β k3_t ] (Shao et al. 2024, eq. 3).

    A = (r − r̄)/std over the K rows of a query; ρ_t = π_θ/π_behaviour; k3_t estimates KL(π_θ‖π_ref) (eq. 4).
    """
    return inputs.mean_per_token(_token_losses(outputs, standardised(inputs.grouped(inputs.reward)), inputs))


def dr_grpo(outputs: PolicyOutputs, inputs: ObjectiveInputs) -> jax.Array:
    """The loss of `grpo` with A = r − r̄ and R in the place of |y|: GRPO without its two normalisations (Liu et al. 2025).

    The paper drops the KL term as well, which is β = 0.
    """
    return inputs.mean_per_budget(_token_losses(outputs, centred(inputs.grouped(inputs.reward)), inputs))


def _token_losses(outputs: PolicyOutputs, advantage: jax.Array, inputs: ObjectiveInputs) -> jax.Array:
    """β k3_t − min( ρ_t A, clip(ρ_t) A ): float32[B, R]. advantage: float32[Q, K]."""
    s, ratio = inputs.settings, token_ratios(outputs.logprobs, inputs)
    surrogate = clipped_surrogate(ratio, advantage.reshape(-1, 1), low=s.clip_low, high=s.clip_high)
    return inputs.beta * k3(outputs.logprobs, inputs) - surrogate


def icepop(outputs: PolicyOutputs, inputs: ObjectiveInputs) -> jax.Array:
    """L = −mean_{i,j} 1/|y| Σ_t [ M(ρ_t) A − β k3_t ],  M(ρ) = ρ within [icepop_low, icepop_high], else 0.

    IcePop: GRPO without the tokens on which learner and sampler disagree too much (Ling team 2025, "Every Step Evolves").
    A as in `grpo`. The paper's ρ has the learner's π_θ_old instead of π_θ, and its loss has GRPO's clipped ratio π_θ/π_θ_old too:
    with one update a batch that ratio is 1, and the gradients are the same.
    """
    s, ratio = inputs.settings, token_ratios(outputs.logprobs, inputs)
    kept = jnp.where((ratio >= s.icepop_low) & (ratio <= s.icepop_high), ratio, 0.0)
    advantage = standardised(inputs.grouped(inputs.reward)).reshape(-1, 1)
    return inputs.mean_per_token(inputs.beta * k3(outputs.logprobs, inputs) - kept * advantage)


def gspo(outputs: PolicyOutputs, inputs: ObjectiveInputs) -> jax.Array:
    """L = −mean_{i,j} min( sA, clip(s, 1 − sequence_clip_low, 1 + sequence_clip_high) A ),  s = (Π_t ρ_t)^(1/|y|).

    GSPO: group advantages with the length-normalised probability ratio of the whole response (Zheng et al. 2025).
    A as in `grpo`. There is no KL term, as published.
    """
    ratio, advantage = inputs.grouped(mean_ratios(outputs.logprobs, inputs)), standardised(inputs.grouped(inputs.reward))
    s = inputs.settings
    return -jnp.mean(clipped_surrogate(ratio, advantage, low=s.sequence_clip_low, high=s.sequence_clip_high))


def cispo(outputs: PolicyOutputs, inputs: ObjectiveInputs) -> jax.Array:
    """L = −mean_{i,j} Σ_t sg( min(ρ_t, 1 + clip_high) ) A log π_θ(y_t) / R,  A as in `grpo`, sg: no gradient.

    CISPO: clipped importance weights on every token's log-prob, so that no token loses its gradient (MiniMax-M1 2025).
    ρ_t is not clipped from below, and there is no KL term, as published. The paper divides by the tokens of the group, not by R.
    """
    ratio = jax.lax.stop_gradient(token_ratios(outputs.logprobs, inputs))
    advantage = standardised(inputs.grouped(inputs.reward)).reshape(-1, 1)
    return -inputs.mean_per_budget(jnp.minimum(ratio, 1 + inputs.settings.clip_high) * advantage * outputs.logprobs)


def tba_prime_advantage(policy_logprobs: jax.Array, inputs: ObjectiveInputs) -> jax.Array:
    """A = (r − r̄)/τ − β (k − k̄),  k = Σ_t clip( log π_θ − log π_ref/(γτ), ±log_ratio_clip ), detached: float32[Q, K].

    r̄ and k̄ are means over the K rows of a query. The paper's form has γ = τ = 1.
    """
    chex.assert_equal_shape([policy_logprobs, inputs.mask])
    clip = inputs.settings.log_ratio_clip
    scale = inputs.ref_temperature * inputs.reward_temperature
    log_ratio = jax.lax.stop_gradient(policy_logprobs) - inputs.ref_logprobs / scale
    kl = inputs.grouped(inputs.token_sum(jnp.clip(log_ratio, -clip, clip)))
    reward = inputs.grouped(inputs.reward) / inputs.reward_temperature
    return reward - jnp.mean(reward, axis=1, keepdims=True) - inputs.beta * (kl - jnp.mean(kl, axis=1, keepdims=True))


def tba_prime(outputs: PolicyOutputs, inputs: ObjectiveInputs) -> jax.Array:
    """L = −mean_{i,j} Σ_t w_t A_ij / n_ij,  w_t = min( π_θ/π_behaviour, importance_clip ), or log π_θ if importance_clip is 0.

    TBA′, the token-level form of trajectory balance for larger models (TBA paper, TBA′).
    n = R for all rows (row_divisor `response_budget`), or n_ij = |x_i| + |y_ij|, tokens of prompt and response (`row_length`),
    as in the authors' code where a micro-batch is one row.

    If importance_clip is 0, no log ratio is clipped and n = R, the gradient is β/(2R) times the gradient of trajectory balance.
    """
    advantage = tba_prime_advantage(outputs.logprobs, inputs).reshape(-1, 1)
    weight = outputs.logprobs
    if inputs.settings.importance_clip:
        # Clipped before the exponential, so that neither the value nor the gradient of a large ratio is infinite.
        bound = jnp.log(inputs.settings.importance_clip)
        weight = jnp.exp(jnp.minimum(outputs.logprobs - inputs.behavior_logprobs, bound))
    return -DIVIDED[inputs.settings.row_divisor](inputs, weight * advantage)


def topr(outputs: PolicyOutputs, inputs: ObjectiveInputs) -> jax.Array:
    """L = −mean_{i,j} w R log π_θ(y_ij|x_i),  R = r − c,  w = 1 where R ≥ 0,  w = clip( π_θ/μ, 0, 1 ) where R < 0, detached.

    TOPR: tapered off-policy REINFORCE (Le Roux et al. 2025, eq. 8).
    c = topr_baseline. μ is the row's behaviour, and the ratio is that of the whole response. There is no reference and no β.

    Optimum, on rows of one fixed μ where no R is below 0: μ·R / E R, a weighted likelihood. Rows of negative R lose their weight
    as the policy leaves them, which bounds the loss below. On-policy this is REINFORCE with the baseline c.
    """
    policy = inputs.token_sum(outputs.logprobs)
    chex.assert_equal_shape([policy, inputs.reward])
    reward = inputs.reward - inputs.settings.topr_baseline
    ratio = jnp.minimum(sequence_ratios(outputs.logprobs, inputs), 1.0)
    weight = jax.lax.stop_gradient(jnp.where(reward < 0, ratio, 1.0))
    return -jnp.mean(weight * reward * policy)


def asymre(outputs: PolicyOutputs, inputs: ObjectiveInputs) -> jax.Array:
    """L = −mean_{i,j} (r_ij − V_i) log π_θ(y_ij|x_i),  V_i = r̄_i + δ,  δ = asymre_delta, at most 0.

    AsymRE: off-policy REINFORCE with a baseline below the sampler's mean reward (Arnal et al. 2025).
    There is no reference and no β, and rows are not weighed by a ratio.

    Optimum, on rows of one fixed policy μ of which every reward is at least V: μ·(r − V) / (E r − V). With K rows, r − E r is
    (1 − 1/K) of that, since r̄ holds the row's own reward. If rewards lie below V the loss has no lower bound; the paper shows
    that the policy still improves on μ while δ is below 0, and loses its support at δ = 0.
    """
    policy = inputs.grouped(inputs.token_sum(outputs.logprobs))
    return -jnp.mean((centred(inputs.grouped(inputs.reward)) - inputs.settings.asymre_delta) * policy)


def raft(outputs: PolicyOutputs, inputs: ObjectiveInputs) -> jax.Array:
    """L = −mean_{i,j} w_ij log π_θ(y_ij|x_i),  w_ij = 1 where r_ij is the highest reward of query i, tied rows included, else 0.

    RAFT: supervised fine-tuning on the best responses of each group (Dong et al. 2023).
    A query teaches nothing if its rewards are all equal and not above 0: none of its responses is known to be good. For rewards
    of 0 and 1, L = −mean r log π_θ. The paper's optional KL penalty in the reward is left out.
    """
    policy, rewards = inputs.grouped(inputs.token_sum(outputs.logprobs)), inputs.grouped(inputs.reward)
    best = jnp.max(rewards, axis=1, keepdims=True)
    taught = (best > jnp.min(rewards, axis=1, keepdims=True)) | (best > 0)
    return -jnp.mean(jnp.where(taught & (rewards == best), policy, 0.0))
