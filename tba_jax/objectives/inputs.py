"""What every objective receives: one batch of Q queries × K completions."""

import chex
import flax.struct
import jax
import jax.numpy as jnp

Measurements = dict[str, jax.Array]


@flax.struct.dataclass
class ObjectiveInputs:
    """A batch as objectives see it; rows of one query are consecutive, B = Q·K.

    ref_logprobs: float32[B, R], nats at the scoring temperature, 0 where masked; behavior_logprobs: float32[B, R], nats
    of the sampling distribution, 0 where masked; mask: bool[B, R]; reward: float32[B]; beta: float32[], the KL
    coefficient; completions: K, static.
    """

    ref_logprobs: chex.Array
    behavior_logprobs: chex.Array
    mask: chex.Array
    reward: chex.Array
    beta: chex.Array
    completions: int = flax.struct.field(pytree_node=False)

    def grouped_sums(self, policy_logprobs: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Sequence sums of the policy's and the reference's log-probs, and rewards, each float32[Q, K].

        Raises:
          AssertionError: shapes disagree or B is not a multiple of K.
        """
        chex.assert_equal_shape([policy_logprobs, self.ref_logprobs, self.mask])
        chex.assert_type([policy_logprobs, self.ref_logprobs, self.reward], jnp.float32)
        B, K = policy_logprobs.shape[0], self.completions
        chex.assert_is_divisible(B, K)
        sums = [jnp.sum(jnp.where(self.mask, logprobs, 0.0), axis=1) for logprobs in (policy_logprobs, self.ref_logprobs)]
        policy, ref, reward = (values.reshape(B // K, K) for values in (*sums, self.reward))
        return policy, ref, reward
