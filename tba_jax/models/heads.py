"""Scalar heads on the decoder: scores of whole sequences (reward models, classifiers), values of states, log Z of prompts."""

import jax
import jax.numpy as jnp

from tba_jax.models import decoder
from tba_jax.models.parameters import Params, ParamSpec, Specs, map_specs


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
      params: of a config with value_head=True, or {"value_head": parameters of value_head_specs}.
      hidden: [B, R, D], see scoring.response_hidden_states; one forward pass serves log-probs and values.
    """
    head = params["value_head"]
    return (_float32_product(hidden, head["weight"]) + head["bias"].astype(jnp.float32))[..., 0]


def log_z_specs(config: decoder.DecoderConfig) -> Specs:
    """Of the head of `log_partition`; it is not a part of the policy."""
    weight = ParamSpec(shape=(config.width, 1), axes=("embed", "labels"), inputs=1)
    return {"weight": weight, "bias": ParamSpec(shape=(1,), axes=("labels",))}


def value_head_specs(config: decoder.DecoderConfig) -> Specs:
    """Of a head of `state_values` that is not a part of the policy."""
    return log_z_specs(config)


def initial_log_z(config: decoder.DecoderConfig) -> Params:
    """The head that says log Z = 0 of every prompt."""
    return map_specs(lambda _, spec: jnp.zeros(spec.shape, jnp.float32), log_z_specs(config))


def initial_value_head(config: decoder.DecoderConfig) -> Params:
    """The head that says V = 0 of every state."""
    return map_specs(lambda _, spec: jnp.zeros(spec.shape, jnp.float32), value_head_specs(config))


def mean_prompt_states(
    params: Params, prompt_tokens: jax.Array, prompt_length: jax.Array, *, config: decoder.DecoderConfig
) -> jax.Array:
    """Means of the last hidden states over the tokens of each prompt.

    Args:
      params: of the policy.
      prompt_tokens: int32[Q, P], left-padded; prompt_length: int32[Q].

    Returns:
      float32[Q, D], no gradient flows through it; 0 where a prompt has no tokens.
    """
    P = prompt_tokens.shape[1]
    # Moved to the left end of the row, so that causal attention needs no mask.
    tokens = jnp.take_along_axis(prompt_tokens, (jnp.arange(P)[None, :] + (P - prompt_length)[:, None]) % P, axis=1)
    hidden = decoder.hidden_states(jax.lax.stop_gradient(params), tokens, None, config=config, remat="none")
    real = (jnp.arange(P)[None, :] < prompt_length[:, None])[..., None]
    return jnp.sum(jnp.where(real, hidden.astype(jnp.float32), 0.0), axis=1) / jnp.maximum(prompt_length, 1)[:, None]


def log_partition(head: Params, prompt_states: jax.Array) -> jax.Array:
    """log Z_φ(x) = w · mean prompt state + b: float32[Q], nats. prompt_states: float32[Q, D], see mean_prompt_states."""
    return (_float32_product(prompt_states, head["weight"]) + head["bias"])[:, 0]


def _float32_product(x: jax.Array, weight: jax.Array) -> jax.Array:
    return jnp.matmul(x.astype(jnp.float32), weight.astype(jnp.float32), precision="highest")
