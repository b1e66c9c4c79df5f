"""What every objective receives: one batch of Q queries × K completions, B = Q·K, rows of one query consecutive."""

import dataclasses

import chex
import flax.struct
import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True, kw_only=True)
class ObjectiveSettings:
    """Static settings of objectives.

    completions: K; importance_clip: the upper bound of π_θ/π_behaviour, 0 = without importance weights; log_ratio_clip:
    nats, the bound of a token's log π_θ − log π_ref in TBA′.
    """

    completions: int
    importance_clip: float = 8.0
    log_ratio_clip: float = 10.0


@flax.struct.dataclass
class PolicyOutputs:
    """What gradients flow through.

    logprobs: float32[B, R], nats at the scoring temperature, 0 where masked; log_z: float32[B], nats, the learned log Z(x) of
    each row's query, 0 where none is learned.
    """

    logprobs: chex.Array
    log_z: chex.Array


@flax.struct.dataclass
class ObjectiveInputs:
    """A batch as objectives see it.

    ref_logprobs: float32[B, R], nats at the scoring temperature, 0 where masked; behavior_logprobs: float32[B, R], nats
    of the sampling distribution, 0 where masked; mask: bool[B, R]; reward: float32[B]; beta: float32[], the KL
    coefficient β; ref_temperature: float32[], γ; reward_temperature: float32[], τ.
    """

    ref_logprobs: chex.Array
    behavior_logprobs: chex.Array
    mask: chex.Array
    reward: chex.Array
    beta: chex.Array
    ref_temperature: chex.Array
    reward_temperature: chex.Array
    settings: ObjectiveSettings = flax.struct.field(pytree_node=False)

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

    def log_target(self) -> jax.Array:
        """log p̃(y|x) = ( log π_ref(y|x) / γ + r(y;x) / β ) / τ: float32[B], nats (PAPER §1; γ and τ: §3).

        The optimum p* is p̃ / Z. At γ = τ = 1 it is π_ref·exp(r/β) / Z.
        """
        chex.assert_rank([self.beta, self.ref_temperature, self.reward_temperature], 0)
        ref = jnp.sum(self.masked(self.ref_logprobs), axis=1)
        return (ref / self.ref_temperature + self.reward / self.beta) / self.reward_temperature
