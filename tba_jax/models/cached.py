"""Decoding with key/value caches: a prompt's cache is computed once and read by all the rows that continue it.

Attention of a new token has two parts under one softmax: the cache of the prompt, which the W rows of a group share, and the
row's own continuation. B = J·W rows in decoding.
"""

import functools
from typing import Any

import chex
import flax.struct
import jax
import jax.numpy as jnp

from tba_jax import mesh as mesh_lib
from tba_jax.models import decoder, layers
from tba_jax.models.decoder import DecoderConfig
from tba_jax.models.parameters import Params

# Per layer (keys, values).
Cache = tuple[tuple[jax.Array, ...], ...]


def unstack(params: Params, config: DecoderConfig) -> Params:
    """The parameters as prefill and decode_step take them: in the compute dtype, `layers` a tuple of one tree for each layer.

    A slice of the stack inside a jitted decode loop would be copied at every call of the loop.
    """
    params = decoder.cast(params, config)
    return params | {"layers": tuple(jax.tree.map(lambda p, i=i: p[i], params["layers"]) for i in range(config.layers))}


@layers.full_precision
def prefill(params: Params, tokens: jax.Array, length: jax.Array, *, config: DecoderConfig) -> tuple[jax.Array, Cache]:
    """Runs prompts.

    Args:
      params: see `unstack`.
      tokens: int32[Q, P], right-padded; length: int32[Q], at least 1. Causality alone keeps padding from what is real.

    Returns:
      logits float32[Q, V] that the first token after each prompt is drawn from, and the cache: per layer (keys, values)
      compute_dtype[Q, G, P, H], heads before time because the decode step reads time-contiguous blocks of one head.
    """
    Q, P = tokens.shape
    chex.assert_shape(length, (Q,))
    positions = jnp.broadcast_to(jnp.arange(P), (Q, P))
    tables = _rotary(positions.reshape(-1), config)
    attend = decoder.whole_rows(Q, P, None, config)
    x = decoder.embed(params, tokens.reshape(-1), positions.reshape(-1), config)
    cache = []
    for layer in params["layers"][:-1]:
        x, kept = decoder.apply_layer(x, layer, tables, attend, config)
        cache.append(tuple(mesh_lib.constrain(kv.swapaxes(1, 2), "QGSH") for kv in kept))
    # Of the last layer, all positions have keys and values, and the last one alone what follows from them.
    layer = params["layers"][-1]
    _, *kept = decoder.project(x, layer, tables, config)
    cache.append(tuple(mesh_lib.constrain(kv.reshape(Q, P, *kv.shape[1:]).swapaxes(1, 2), "QGSH") for kv in kept))
    last = jnp.take_along_axis(x.reshape(Q, P, -1), (length - 1)[:, None, None], axis=1)[:, 0]
    attend_last = functools.partial(_attend_last, cache=cache[-1], before=positions < (length - 1)[:, None])
    last, _ = decoder.apply_layer(last, layer, _rotary(length - 1, config), attend_last, config)
    return decoder.logits_of(params, decoder.final_norm(last, params, config), config=config), tuple(cache)


def _rotary(positions: jax.Array, config: DecoderConfig) -> decoder.Rotary:
    """Tables that are computed once: XLA would compute sines again in each layer that reads them."""
    return jax.lax.optimization_barrier(decoder.rotary(positions, config))


def _attend_last(query: jax.Array, key: jax.Array, value: jax.Array, *, cache: Any, before: jax.Array) -> tuple[jax.Array, None]:
    """The `attend` of a prompt's last token [Q], to those before, bool[Q, P], and to itself."""
    itself = (key[:, :, None], value[:, :, None])
    return layers.attend_in_two_parts(query, cache, itself, before[:, None], jnp.ones((len(query), 1), bool)), None


@flax.struct.dataclass
class Masks:
    """What the rows of a decode step attend to. prompt: bool[J, W, S]; own: bool[B, R], the new token's entry included."""

    prompt: chex.Array
    own: chex.Array


@layers.full_precision
def decode_step(
    params: Params,
    token: jax.Array,
    position: jax.Array,
    entry: jax.Array,
    prompt: Cache,
    own: Cache,
    masks: Masks,
    *,
    config: DecoderConfig,
) -> tuple[jax.Array, Cache]:
    """One token for every row.

    Args:
      params: see `unstack`.
      token: int32[B]; position: int32[B], its position in the row, from 0 at the first prompt token.
      entry: int32[], where its key and value go in every row's own cache. Keys carry their positions, so any order will do.
      prompt: per layer (keys, values) [J, G, S, H]; own: likewise [B, G, R, H].

    Returns:
      logits float32[B, V] that the next token is drawn from, and the new own cache.
    """
    x = decoder.embed(params, token, position, config)
    tables = _rotary(position, config)
    new_own = []
    for layer, shared, mine in zip(params["layers"], prompt, own, strict=True):
        attend = functools.partial(_attend, entry=entry, shared=shared, mine=mine, masks=masks)
        x, kept = decoder.apply_layer(x, layer, tables, attend, config)
        new_own.append(kept)
    return decoder.logits_of(params, decoder.final_norm(x, params, config), config=config), tuple(new_own)


def _attend(query: jax.Array, key: jax.Array, value: jax.Array, *, entry: Any, shared: Any, mine: Any, masks: Masks) -> Any:
    """The `attend` of decoder.apply_layer. Returns [B, N, H], and the own (keys, values) with the new token's."""
    keys, values = (
        jax.lax.dynamic_update_slice_in_dim(before, new[:, :, None], entry, axis=2)
        for before, new in zip(mine, (key, value), strict=True)
    )
    return layers.attend_in_two_parts(query, shared, (keys, values), masks.prompt, masks.own), (keys, values)
