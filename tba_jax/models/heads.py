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

    log_z: log Z(x) of a prompt, see log_partition; value_head: V of a state, see state_values. Both begin at 0.
    """

    log_z: Any = None
    value_head: Any = None

    def __init__(self, policy: Decoder, *, log_z: bool, value_head: bool, rngs: nnx.Rngs):
        """Args: log_z, value_head: whether the policy gets this head."""
        self.policy = policy
        if log_z:
            self.log_z = ScalarHead(policy.config.width, bias=True, std=0.0, rngs=rngs)
        if value_head:
            self.value_head = ScalarHead(policy.config.width, bias=True, std=0.0, rngs=rngs)


def define(policy: Policy, *, log_z: bool, value_head: bool) -> Definition[PolicyWithHeads]:
    """The definition of a policy, adapters included, with the heads that are asked for."""
    return parameters.define(
        lambda rngs: PolicyWithHeads(policy.adapted.make(rngs), log_z=log_z, value_head=value_head, rngs=rngs)
    )


def sequence_scores(model: Decoder, tokens: jax.Array, token_mask: jax.Array, *, remat: str) -> jax.Array:
    """Scores of whole sequences, read at the last real token (the `ForSequenceClassification` models of transformers).

    Args:
      model: of a config with head="score".
      tokens: int32[B, T]; token_mask: bool[B, T], true on real tokens, consecutive in a row; padding on either side.
      remat: a name of layers.REMAT.

    Returns:
      float32[B, labels]; a reward model has one label.
    """
    T = tokens.shape[1]
    first, length = jnp.argmax(token_mask, axis=1), jnp.sum(token_mask, axis=1)
    # Moved to the left end of the row, so that causal attention needs no mask.
    tokens = jnp.take_along_axis(tokens, (jnp.arange(T)[None, :] + first[:, None]) % T, axis=1)
    hidden = model(tokens, remat=remat)
    last = jax.vmap(lambda row, n: jax.lax.dynamic_index_in_dim(row, n - 1, keepdims=False))(hidden, length)
    return model.score(last)


def state_values(head: ScalarHead, hidden: jax.Array) -> jax.Array:
    """V = w · state + b: float32[B, R], the value of the state before each response token.

    Args:
      hidden: [B, R, D], see scoring.response_hidden_states; one forward pass serves log-probs and values.
    """
    return head(hidden)[..., 0]


def mean_prompt_states(model: Decoder, prompt_tokens: jax.Array, prompt_length: jax.Array) -> jax.Array:
    """Means of the last hidden states over the tokens of each prompt.

    Args:
      prompt_tokens: int32[Q, P], left-padded; prompt_length: int32[Q].

    Returns:
      float32[Q, D], no gradient flows through it; 0 where a prompt has no tokens.
    """
    P = prompt_tokens.shape[1]
    # Moved to the left end of the row, so that causal attention needs no mask.
    tokens = jnp.take_along_axis(prompt_tokens, (jnp.arange(P)[None, :] + (P - prompt_length)[:, None]) % P, axis=1)
    hidden = jax.lax.stop_gradient(model(tokens))
    real = (jnp.arange(P)[None, :] < prompt_length[:, None])[..., None]
    return jnp.sum(jnp.where(real, hidden.astype(jnp.float32), 0.0), axis=1) / jnp.maximum(prompt_length, 1)[:, None]


def log_partition(head: ScalarHead, prompt_states: jax.Array) -> jax.Array:
    """log Z_φ(x) = w · mean prompt state + b: float32[Q], nats. prompt_states: float32[Q, D], see mean_prompt_states."""
    return head(prompt_states)[:, 0]
