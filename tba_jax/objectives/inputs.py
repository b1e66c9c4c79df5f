"""The inputs of every objective: one batch of Q queries × K completions, B = Q·K, with consecutive rows for each query."""

import dataclasses

import chex
import flax.struct
import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True, kw_only=True)
class ObjectiveSettings:
    """Static settings of objectives, with the defaults of experiment/schema.py.

    completions: K. importance_clip: upper bound of π_θ/π_behaviour in TBA′, 0 for no importance weights. log_ratio_clip: bound
    of a token's log π_θ − log π_ref in TBA′, nats. row_divisor: what TBA′ divides the sum over a row's tokens by:
    `response_budget` (R) or `row_length` (tokens of its prompt and response). clip_low, clip_high: ratios are clipped to
    [1 − low, 1 + high]. sequence_clip_low, sequence_clip_high: the same for GSPO. icepop_low, icepop_high: IcePop drops tokens
    whose ratio is outside of these bounds. gae_lambda: λ of GAE. value_coefficient: weight of PPO's value loss. asymre_delta: δ
    of AsymRE, at most 0. topr_baseline: c of TOPR. Both are in units of the reward.
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
    asymre_delta: float = -0.1
    topr_baseline: float = 0.0


@flax.struct.dataclass
class PolicyOutputs:
    """The model's outputs, through which gradients flow.

    logprobs: float32[B, R], nats at the scoring temperature, 0 where masked; log_z: float32[B], nats, the learned log Z(x) of
    each row's query, 0 if there is no log Z head; values: float32[B, R], in units of the reward, the value head's estimate for
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
        """The values with 0 where masked: [B, R] -> [B, R].

        Raises:
          AssertionError: the shape differs from the mask's.
        """
        chex.assert_equal_shape([per_token, self.ref_logprobs, self.behavior_logprobs, self.mask])
        return jnp.where(self.mask, per_token, 0.0)

    def grouped(self, per_row: jax.Array) -> jax.Array:
        """The values by query: [B] -> [Q, K].

        Raises:
          AssertionError: the shape differs from the reward's, or B is not a multiple of K.
        """
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
