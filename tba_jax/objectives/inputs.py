"""What every objective receives: one batch of Q queries × K completions, B = Q·K, rows of one query consecutive."""

import dataclasses

import chex
import flax.struct
import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True, kw_only=True)
class ObjectiveSettings:
    """Static settings of objectives.

    completions: K. Of TBA′: importance_clip, the upper bound of π_θ/π_behaviour, 0 = without importance weights, and
    log_ratio_clip, nats, the bound of a token's log π_θ − log π_ref. clip_low, clip_high: a ratio counts within [1 − low,
    1 + high]; sequence_clip_low, sequence_clip_high: likewise of GSPO; icepop_low, icepop_high: the ratios whose tokens count;
    gae_lambda: λ; value_coefficient: of the value's loss beside the policy's.

    The defaults are those of experiment/schema.py.
    """

    completions: int
    importance_clip: float = 8.0
    log_ratio_clip: float = 10.0
    clip_low: float = 0.2
    clip_high: float = 0.2
    sequence_clip_low: float = 3e-4
    sequence_clip_high: float = 4e-4
    icepop_low: float = 0.5
    icepop_high: float = 5.0
    gae_lambda: float = 0.95
    value_coefficient: float = 0.1


@flax.struct.dataclass
class PolicyOutputs:
    """What gradients flow through.

    logprobs: float32[B, R], nats at the scoring temperature, 0 where masked; log_z: float32[B], nats, the learned log Z(x) of
    each row's query, 0 where none is learned; values: float32[B, R], in units of the reward, of the state before each token,
    anything where masked; None where none are learned.
    """

    logprobs: chex.Array
    log_z: chex.Array
    values: chex.Array | None = None


@flax.struct.dataclass
class ObjectiveInputs:
    """A batch as objectives see it.

    ref_logprobs: float32[B, R], nats at the scoring temperature, 0 where masked; behavior_logprobs: float32[B, R], nats
    of the sampling distribution, 0 where masked; mask: bool[B, R]; reward: float32[B]; beta: float32[], the KL
    coefficient β; ref_temperature: float32[], γ; reward_temperature: float32[], τ; state_values: float32[B, R], Monte-Carlo
    values of the state before each token, in units of the reward, NaN where it was not valued (see step_advantages), anything
    where masked; None where rows have none.
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

    def masked(self, per_token: jax.Array) -> jax.Array:
        """[B, R], 0 where masked.

        Raises:
          AssertionError: the shape is not that of the mask.
        """
        chex.assert_equal_shape([per_token, self.ref_logprobs, self.behavior_logprobs, self.mask])
        return jnp.where(self.mask, per_token, 0.0)

    def grouped(self, per_row: jax.Array) -> jax.Array:
        """[B] -> [Q, K].

        Raises:
          AssertionError: the shape is not that of the reward, or B is not a multiple of K.
        """
        chex.assert_equal_shape([per_row, self.reward])
        chex.assert_is_divisible(per_row.shape[0], self.settings.completions)
        return per_row.reshape(-1, self.settings.completions)

    def token_sum(self, per_token: jax.Array) -> jax.Array:
        """Σ_t x_t of each response: [B, R] -> [B]."""
        return jnp.sum(self.masked(per_token), axis=1)

    def lengths(self) -> jax.Array:
        """|y|, tokens: int32[B], 1 where a row has none, so that it divides."""
        return jnp.maximum(jnp.sum(self.mask, axis=1), 1)

    def mean_per_token(self, per_token: jax.Array) -> jax.Array:
        """mean_{i,j} 1/|y_ij| Σ_t x_t: [B, R] -> []."""
        return jnp.mean(self.token_sum(per_token) / self.lengths())

    def mean_per_budget(self, per_token: jax.Array) -> jax.Array:
        """mean_{i,j} Σ_t x_t / R: [B, R] -> []. R, the most tokens a response may have, is the same for all rows."""
        return jnp.mean(self.token_sum(per_token)) / self.mask.shape[1]

    def log_target(self) -> jax.Array:
        """log p̃(y|x) = ( log π_ref(y|x) / γ + r(y;x) / β ) / τ: float32[B], nats (PAPER §1; γ and τ: §3).

        The optimum p* is p̃ / Z. At γ = τ = 1 it is π_ref·exp(r/β) / Z.
        """
        chex.assert_rank([self.beta, self.ref_temperature, self.reward_temperature], 0)
        ref = self.token_sum(self.ref_logprobs)
        return (ref / self.ref_temperature + self.reward / self.beta) / self.reward_temperature
