"""Scalar heads on the decoder: scores of whole sequences (reward models, classifiers) and values of states (PPO)."""

import jax
import jax.numpy as jnp

from tba_jax.models import decoder
from tba_jax.models.parameters import Params


def sequence_scores(
    params: Params, tokens: jax.Array, token_mask: jax.Array, *, config: decoder.DecoderConfig, remat: str
) -> jax.Array:
    """Scores of whole sequences, read at the last real token (the `ForSequenceClassification` models of transformers).

    Args:
      params: of a config with head="score".
      tokens: int32[B, T]; token_mask: bool[B, T], true on real tokens, consecutive in a row; padding on either side.
      remat: a name of layers.REMAT.

    Returns:
      float32[B, labels]; a reward model has one label.
    """
    T = tokens.shape[1]
    first, length = jnp.argmax(token_mask, axis=1), jnp.sum(token_mask, axis=1)
    # Moved to the left end of the row, so that causal attention needs no mask.
    tokens = jnp.take_along_axis(tokens, (jnp.arange(T)[None, :] + first[:, None]) % T, axis=1)
    hidden = decoder.hidden_states(params, tokens, None, config=config, remat=remat)
    last = jax.vmap(lambda row, n: jax.lax.dynamic_index_in_dim(row, n - 1, keepdims=False))(hidden, length)
    return _float32_product(last, params["score"]["weight"])


def state_values(params: Params, hidden: jax.Array) -> jax.Array:
    """float32[B, R]: the value of the state before each response token.

    Args:
      params: of a config with value_head=True.
      hidden: [B, R, D], see scoring.response_hidden_states; one forward pass serves log-probs and values.
    """
    head = params["value_head"]
    return (_float32_product(hidden, head["weight"]) + head["bias"].astype(jnp.float32))[..., 0]


def _float32_product(x: jax.Array, weight: jax.Array) -> jax.Array:
    return jnp.matmul(x.astype(jnp.float32), weight.astype(jnp.float32), precision="highest")
