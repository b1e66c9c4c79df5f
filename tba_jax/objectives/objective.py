"""What every objective reads and declares, and the measurements of a batch, which do not depend on the objective.

A batch has Q queries × K completions, B = Q·K, consecutive rows for each query.
"""

import dataclasses
from collections.abc import Callable

import chex
import flax.struct
import jax
import jax.numpy as jnp

# Nats. e^60, and the sum of a batch's such numbers, are within float32. A larger ratio of a token counts as e^60.
_LARGEST = 60.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ObjectiveSettings:
    """Static settings of objectives, with the defaults of experiment/schema.py.

    completions: K. importance_clip: upper bound of π_θ/π_behaviour in TBA′, 0 for no importance weights. log_ratio_clip: bound of
    a token's log π_θ − log π_ref in TBA′, nats. row_divisor: what TBA′ divides the sum over a row's tokens by:
    `response_budget` (R) or `row_length` (tokens of its prompt and response). clip_low, clip_high: ratios are clipped to [1 −
    low, 1 + high]. sequence_clip_low, sequence_clip_high: the same for GSPO. icepop_low, icepop_high: IcePop drops tokens
    whose ratio is outside of these bounds. gae_lambda: λ of GAE. value_coefficient: weight of PPO's value loss.
    divergence_alpha: α of f-trajectory balance. flow_gap_low, flow_gap_high: bounds of GFlowRL's flow gap, nats.
    asymre_delta: δ of AsymRE, at most 0. topr_baseline: c of TOPR. Both are in units of the reward.
    """

    completions: int
    importance_clip: float = 8.0
    log_ratio_clip: float = 10.0
    row_divisor: str = "response_budget"
    clip_low: float = 0.2
    clip_high: float = 0.2
    sequence_clip_low: float = 3e-4
    sequence_clip_high: float = 4e-4
    icepop_low: float = 0.5
    icepop_high: float = 5.0
    gae_lambda: float = 0.95
    value_coefficient: float = 0.1
    divergence_alpha: float = 1.0
    flow_gap_low: float = 2.0
    flow_gap_high: float = 4.0
    asymre_delta: float = -0.1
    topr_baseline: float = 0.0


@flax.struct.dataclass
class PolicyOutputs:
    """The model's outputs, through which gradients flow.

    logprobs: float32[B, R], nats at the scoring temperature, 0 where masked; log_z: float32[B], nats, the learned or given
    log Z(x) of each row's query, 0 if there is none; values: float32[B, R], in units of the reward, the value head's estimate for
    the state before each token, arbitrary where masked, None if there is no value head.
    """

    logprobs: chex.Array
    log_z: chex.Array
    values: chex.Array | None = None


@flax.struct.dataclass
class ObjectiveInputs:
    """A batch, which carries no gradient.

    ref_logprobs: float32[B, R], nats at the scoring temperature, 0 where masked; behavior_logprobs: float32[B, R], nats
    of the sampling distribution, 0 where masked; mask: bool[B, R]; reward: float32[B]; beta: float32[], the KL
    coefficient β; ref_temperature: float32[], γ; reward_temperature: float32[], τ; state_values: float32[B, R], in units of the
    reward, Monte-Carlo estimates for the state before each token, NaN if it was not estimated (see step_advantages), arbitrary
    where masked, None if the rows have no such estimates; prompt_length: int32[B], tokens, which row_divisor
    `row_length` alone reads.
    """

    ref_logprobs: chex.Array
    behavior_logprobs: chex.Array
    mask: chex.Array
    reward: chex.Array
    beta: chex.Array
    ref_temperature: chex.Array
    reward_temperature: chex.Array
    settings: ObjectiveSettings = flax.struct.field(pytree_node=False)
    state_values: chex.Array | None = None
    prompt_length: chex.Array | None = None

    def masked(self, per_token: jax.Array) -> jax.Array:
        """The values with 0 where masked: [B, R] -> [B, R]. Raises AssertionError: the shape differs from the mask's."""
        chex.assert_equal_shape([per_token, self.ref_logprobs, self.behavior_logprobs, self.mask])
        return jnp.where(self.mask, per_token, 0.0)

    def grouped(self, per_row: jax.Array) -> jax.Array:
        """The values by query: [B] -> [Q, K]. Raises AssertionError: the shape differs from the reward's."""
        chex.assert_equal_shape([per_row, self.reward])
        chex.assert_is_divisible(per_row.shape[0], self.settings.completions)
        return per_row.reshape(-1, self.settings.completions)

    def token_sum(self, per_token: jax.Array) -> jax.Array:
        """Σ_t x_t of each response: [B, R] -> [B]."""
        return jnp.sum(self.masked(per_token), axis=1)

    def lengths(self) -> jax.Array:
        """|y|, tokens: int32[B]. A row without tokens has length 1, since lengths are divisors."""
        return jnp.maximum(jnp.sum(self.mask, axis=1), 1)

    def mean_per_token(self, per_token: jax.Array) -> jax.Array:
        """mean_{i,j} 1/|y_ij| Σ_t x_t: [B, R] -> []."""
        return jnp.mean(self.token_sum(per_token) / self.lengths())

    def mean_per_budget(self, per_token: jax.Array) -> jax.Array:
        """mean_{i,j} Σ_t x_t / R: [B, R] -> []. R, the most tokens a response may have, is the same for all rows."""
        return jnp.mean(self.token_sum(per_token)) / self.mask.shape[1]

    def mean_per_row_length(self, per_token: jax.Array) -> jax.Array:
        """mean_{i,j} Σ_t x_t / (|x_i| + |y_ij|), tokens of the prompt and the response: [B, R] -> []."""
        assert self.prompt_length is not None
        chex.assert_equal_shape([self.prompt_length, self.reward])
        return jnp.mean(self.token_sum(per_token) / (self.prompt_length + jnp.sum(self.mask, axis=1)))

    def log_target(self) -> jax.Array:
        """log p̃(y|x) = ( log π_ref(y|x) / γ + r(y;x) / β ) / τ: float32[B], nats (TBA paper; γ and τ: red-teaming).

        The optimum p* is p̃ / Z. At γ = τ = 1 it is π_ref·exp(r/β) / Z.
        """
        chex.assert_rank([self.beta, self.ref_temperature, self.reward_temperature], 0)
        ref = self.token_sum(self.ref_logprobs)
        return (ref / self.ref_temperature + self.reward / self.beta) / self.reward_temperature


# A pure function to float32[]: a mean over the groups of a batch, so micro-batches of whole groups can be averaged.
Loss = Callable[[PolicyOutputs, ObjectiveInputs], jax.Array]
# By the coefficients of a step, float32[]: times this factor, the gradient of a loss is −mean A ∇ log π_θ in which a reward of r
# counts as r, so that learner.clip_norm means the same for every objective and every β.
RewardUnit = Callable[[ObjectiveInputs], jax.Array]

# The coefficients that trajectory balance reads besides β.
TEMPERATURES = ("ref_temperature", "reward_temperature")


def residual_in_nats(inputs: ObjectiveInputs) -> jax.Array:
    """βτ/2, of losses (log Z + log π_θ − (… + r/β)/τ)²."""
    return inputs.beta * inputs.reward_temperature / 2


def residual_in_rewards(inputs: ObjectiveInputs) -> jax.Array:
    """1/(2β), of losses (β log π_θ/π − A)²."""
    return 1 / (2 * inputs.beta)


def advantage_in_rewards(inputs: ObjectiveInputs) -> jax.Array:
    """1, of policy-gradient losses −A log π_θ. Where A is divided by a deviation, rewards count in deviations."""
    return jnp.ones(())


def advantage_over_temperature(inputs: ObjectiveInputs) -> jax.Array:
    """τ, of policy-gradient losses whose rewards are r/τ."""
    return inputs.reward_temperature


def preference(inputs: ObjectiveInputs) -> jax.Array:
    """1/β, of losses −log σ(β Δ): the reward is the preference, 1 for the better response and 0 for the other."""
    return 1 / inputs.beta


@dataclasses.dataclass(frozen=True, kw_only=True)
class Objective:
    """An objective and its requirements, which config checks and the learner read.

    loss: see Loss; reward_unit: see RewardUnit, None if nobody knows it, and then gradients cannot be clipped; min_completions:
    the smallest K; behavior_logprobs: it reads the log-probs of π_behaviour; positive_beta: it has no optimum or no gradient
    at β = 0, which drops the KL term of other objectives; full_support: its optimum requires a sampler that can draw every
    response; as_drawn: rows must be what π_behaviour draws by itself: none truncated, none with a forced end, none chosen by
    its reward, none repeated; given_log_z: rows' queries have a log Z from a file; log_z_head, value_head: PolicyOutputs must
    have a learned log_z or values; state_values: rows must carry Monte-Carlo state values; reads_reference: it reads
    ref_logprobs, be it in a KL term that β = 0 leaves out; k3: at β > 0 it has the k3 estimate of KL(π_θ‖π_ref), which needs
    a π_ref that is a distribution; clipped: the share, float32[], of its ratios π_θ/π_behaviour, of tokens or of rows, that
    are beyond its bounds, None where it bounds none; settings: the settings learner.* that it reads (fields of
    ObjectiveSettings, learning rates of its heads, `log_z_path`, and the schedules `beta`, `ref_temperature`,
    `reward_temperature`): a new run is refused that sets others.
    """

    loss: Loss
    reward_unit: RewardUnit | None = None
    min_completions: int = 2
    behavior_logprobs: bool = False
    positive_beta: bool = False
    full_support: bool = False
    as_drawn: bool = False
    given_log_z: bool = False
    log_z_head: bool = False
    value_head: bool = False
    state_values: bool = False
    reads_reference: bool = True
    k3: bool = False
    clipped: Callable[[jax.Array, ObjectiveInputs], jax.Array] | None = None
    settings: tuple[str, ...] = ()


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

    ratio_mean, ratio_max: over the tokens' π_θ/π_behaviour.
    effective_sample_share: (Σ w)² / (B Σ w²) of the rows' w = Π_t π_θ/π_behaviour: 1 on-policy, 1/B if one row has all weight.
    """
    log_ratio = inputs.masked(policy_logprobs - inputs.behavior_logprobs)
    ratio = inputs.masked(jnp.exp(jnp.clip(log_ratio, -_LARGEST, _LARGEST)))
    log_weight = jnp.sum(log_ratio, axis=1)
    weight = jnp.exp(log_weight - jnp.max(log_weight))
    return {
        "ratio_mean": jnp.sum(ratio) / _tokens(inputs),
        "ratio_max": jnp.max(ratio),
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
    log_z = jnp.mean(target - policy, axis=1)  # see trajectory_balance.vargrad_log_z
    found = {"log_z": jnp.mean(log_z), "log_z_std": jnp.std(log_z)}
    if inputs.settings.completions > 1:
        rewards = inputs.grouped(inputs.reward)
        found["log_weight_std"] = jnp.sqrt(jnp.mean(jnp.var(target - policy, axis=1)))
        found["advantage_std"] = inputs.beta * found["log_weight_std"]
        found["equal_reward_groups"] = jnp.mean((jnp.max(rewards, axis=1) == jnp.min(rewards, axis=1)).astype(jnp.float32))
    return found
