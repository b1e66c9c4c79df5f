"""Scalar heads (layers.ScalarHead) on the last state of a sequence, on each state of a response, and on the mean of a prompt."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from tba_jax.models import parameters
from tba_jax.models.decoder import Decoder
from tba_jax.models.layers import ScalarHead
from tba_jax.models.parameters import Definition
from tba_jax.models.policy import Policy


class PolicyWithHeads(nnx.Module):
    """The policy, adapters included, and the scalar heads that a trainer's objective asks for.

    log_z_head: log Z(x) of a prompt, see log_partition; value_head: V of a state, see state_values. Both begin at 0.
    """

    log_z_head: Any = None
    value_head: Any = None

    def __init__(self, policy: Decoder, *, log_z_head: bool, value_head: bool, rngs: nnx.Rngs):
        """Args: log_z_head, value_head: whether the policy gets this head."""
        self.policy = policy
        if log_z_head:
            self.log_z_head = ScalarHead(policy.config.width, bias=True, std=0.0, rngs=rngs)
        if value_head:
            self.value_head = ScalarHead(policy.config.width, bias=True, std=0.0, rngs=rngs)


def define(policy: Policy, *, log_z_head: bool, value_head: bool) -> Definition[PolicyWithHeads]:
    """The definition of a policy, adapters included, with the heads that are asked for."""
    return parameters.define(
        lambda rngs: PolicyWithHeads(policy.adapted.make(rngs), log_z_head=log_z_head, value_head=value_head, rngs=rngs)
    )


def sequence_scores(model: Decoder, tokens: jax.Array, length: jax.Array, *, remat: str) -> jax.Array:
    """Scores of whole sequences, read at the last real token (the `ForSequenceClassification` models of transformers).

    Args:
      model: of a config with head="score".
      tokens: int32[B, T], padded on the right; length: int32[B], real tokens.
      remat: a name of layers.REMAT.

    Returns:
      float32[B, labels]; a reward model has one label.
    """
    hidden = model(tokens, remat=remat)
    last = jax.vmap(lambda row, n: jax.lax.dynamic_index_in_dim(row, n - 1, keepdims=False))(hidden, length)
    return model.score(last)


def state_values(head: ScalarHead, hidden: jax.Array) -> jax.Array:
    """V = w · state + b: float32[B, R], the value of the state before each response token.

    Args:
      hidden: [B, R, D], see scoring.response_hidden_states; one forward pass serves log-probs and values.
    """
    return head(hidden)[..., 0]


def mean_prompt_states(model: Decoder, tokens: jax.Array, prompt_length: jax.Array) -> jax.Array:
    """Means of the last hidden states over the tokens of each prompt.

    Args:
      tokens: int32[Q, n], rows that begin with a prompt, whatever follows it; prompt_length: int32[Q], at most n.

    Returns:
      float32[Q, D], no gradient flows through it; 0 where a prompt has no tokens.
    """
    hidden = jax.lax.stop_gradient(model(tokens))
    real = (jnp.arange(tokens.shape[1])[None, :] < prompt_length[:, None])[..., None]
    return jnp.sum(jnp.where(real, hidden.astype(jnp.float32), 0.0), axis=1) / jnp.maximum(prompt_length, 1)[:, None]


def log_partition(head: ScalarHead, prompt_states: jax.Array) -> jax.Array:
    """log Z_φ(x) = w · mean prompt state + b: float32[Q], nats. prompt_states: float32[Q, D], see mean_prompt_states."""
    return head(prompt_states)[:, 0]
