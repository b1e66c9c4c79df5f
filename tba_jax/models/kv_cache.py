"""Decoding with key/value caches: a prompt's cache is computed once and read by all the rows that continue it.

Attention of a new token has two parts under one softmax: the cache of the prompt, which the W rows of a group share, and the
row's own continuation. B = J·W rows in decoding. Models here are unstacked (see `define`).
"""

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import chex
import flax.struct
import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tba_jax import sharding
from tba_jax.models import attention, parameters
from tba_jax.models.attention import Rotary
from tba_jax.models.config import DecoderConfig
from tba_jax.models.decoder import Decoder
from tba_jax.models.layers import full_precision, linear_maps
from tba_jax.models.parameters import Definition, Params
from tba_jax.programs import shaped

# Per layer (keys, values).
Cache = tuple[tuple[jax.Array, ...], ...]

_TILE_COLUMNS = 128  # of a TPU's tile


def define(config: DecoderConfig, weights: str = "full", *, unstacked: bool = True) -> Definition[Decoder]:
    """The definition of a decoder whose linear maps have weights in the compute dtype ("full"), or "int8" (Einsum.quantize).

    Args: unstacked: see `unstack`.
    """

    def make(rngs: nnx.Rngs) -> Decoder:
        model = Decoder(config, unstacked=unstacked, rngs=rngs)
        if weights == "int8":
            quantize(model)
        return model

    return parameters.define(make)


def quantize(model: Decoder) -> None:
    """Makes all linear maps of the model int8; embeddings, norms and biases stay as they are."""
    for _, linear in linear_maps(model):
        linear.quantize()


def unstack(params: Params, config: DecoderConfig) -> Params:
    """The parameters of an unstacked decoder, in the compute dtype, from the parameters of a stacked one.

    A slice of the stack inside a jitted decode loop would be copied at every call of the loop.
    """
    params = parameters.cast(params, config.compute_dtype)
    stacked = params.get("layers", {})  # a part of the parameters may be without
    return params | {"layers": {i: jax.tree.map(lambda p, i=i: p[i], stacked) for i in range(config.layers)}}


def one_by_one(params: Params) -> Iterator[Params]:
    """Takes the parameters out of `params`. Yields each as a tree of its own, which `unstack` takes; `add` joins the results."""

    def leaves(tree: Params, path: tuple[str, ...]) -> Iterator[Params]:
        for key in list(tree):
            if isinstance(tree[key], dict):
                yield from leaves(tree[key], (*path, key))
            else:
                yield parameters.unflatten({".".join((*path, key)): tree.pop(key)})

    return leaves(params, ())


def add(whole: Params, part: Params) -> None:
    """Puts the parameters of an unstacked decoder's part into those of the whole."""
    for key, value in part.items():
        if isinstance(value, dict):
            add(whole.setdefault(key, {}), value)
        else:
            whole[key] = value


def release(whole: Params, part: Params, config: DecoderConfig) -> None:
    """Takes out of the parameters of an unstacked decoder those that `unstack` makes of a part, one of `one_by_one`."""
    for name in parameters.flatten(part):
        *folders, leaf = name.split(".")
        stacked = folders[:1] == ["layers"]
        for path in [["layers", i, *folders[1:]] for i in range(config.layers)] if stacked else [folders]:
            functools.reduce(lambda tree, key: tree.get(key, {}), path, whole).pop(leaf, None)


def without(whole: Params, part: Params, config: DecoderConfig) -> Params:
    """A copy of `whole` after `release`; `whole` stays as it is."""
    rest = jax.tree.map(lambda x: x, whole)
    release(rest, part, config)
    return rest


def largest(params: Params) -> Params:
    """The parameter with the most bytes, as `one_by_one` yields it. Args: params: arrays or shapes."""
    flat = parameters.flatten(params)
    name = max(flat, key=lambda each: math.prod(flat[each].shape) * flat[each].dtype.itemsize)
    return parameters.unflatten({name: flat[name]})


def head_by_head(params: Params, config: DecoderConfig, put: Callable[[Any, Format], Any]) -> Params:
    """The parameters of an unstacked decoder as its decode step reads them on TPUs: query, key and value weights lie by head.

    Where heads fill the columns of a TPU's tiles, weights that do not lie so would be copied at every call of the decode loop.
    Args: params: arrays or shapes, or a part of them. put: as jax.device_put.
    """
    if config.head_size % _TILE_COLUMNS:
        return params

    def layer(tree: Params) -> Params:
        mixed = {
            name: maps | {"weight": put(maps["weight"], Format(Layout((1, 0, 2)), maps["weight"].sharding))}
            for name, maps in tree.get("attention", {}).items()
            if name in ("query", "key", "value") and "weight" in maps
        }
        return tree | {"attention": tree["attention"] | mixed} if mixed else tree

    return params | {"layers": {i: layer(tree) for i, tree in params["layers"].items()}}


def others(params: Params, part: Params) -> list[Any]:
    """The parameters that are not in a part. Args: part: one of `one_by_one`, or `largest`."""
    names = parameters.flatten(part).keys()
    return [x for name, x in parameters.flatten(params).items() if name not in names]


def unstacked_shapes(params: Params, config: DecoderConfig, mesh: Mesh) -> Params:
    """What `unstack` makes of shapes on a mesh, as jax.ShapeDtypeStruct: each layer is split as the stack is."""
    shapes = jax.eval_shape(functools.partial(unstack, config=config), params)
    layer = jax.tree.map(lambda x: NamedSharding(mesh, PartitionSpec(*x.sharding.spec[1:])), params["layers"])
    rest = {name: jax.tree.map(lambda x: NamedSharding(mesh, x.sharding.spec), tree) for name, tree in params.items()}
    return shaped(shapes, rest | {"layers": dict.fromkeys(range(config.layers), layer)})


@full_precision
def prefill(model: Decoder, tokens: jax.Array, length: jax.Array) -> tuple[jax.Array, Cache]:
    """Logits float32[Q, V] of the first token after each prompt, and the cache: per layer (keys, values)
    compute_dtype[Q, G, P, H]. Heads come before time because the decode step reads time-contiguous blocks of one head.

    Args:
      tokens: int32[Q, P], right-padded, so that causality alone keeps real tokens from attending to padding.
      length: int32[Q], at least 1.
    """
    Q, P = tokens.shape
    chex.assert_shape(length, (Q,))
    positions = jnp.broadcast_to(jnp.arange(P), (Q, P))
    c = model.config
    tables = _rotary(positions.reshape(-1), c)
    x = model.embed_tokens(tokens.reshape(-1), positions.reshape(-1))
    cache = []
    *blocks, last_block = model.layers
    *kinds, last_local = c.local_layers
    for block, local in zip(blocks, kinds, strict=True):
        attend = attention.whole_rows(Q, P, None, causal=True, kernel=c.attention, window=c.window * local)
        x, kept = block(x, tables[local], attend)
        cache.append(tuple(sharding.constrain(kv.swapaxes(1, 2), "QGSH") for kv in kept))
    # The last layer computes keys and values at all positions, and everything after them at the last position alone.
    _, *kept = last_block.project(x, tables[last_local])
    cache.append(tuple(sharding.constrain(kv.reshape(Q, P, *kv.shape[1:]).swapaxes(1, 2), "QGSH") for kv in kept))
    last = jnp.take_along_axis(x.reshape(Q, P, -1), (length - 1)[:, None, None], axis=1)[:, 0]
    before = positions < (length - 1)[:, None]
    if last_local:
        before &= positions >= (length - c.window)[:, None]
    last, _ = last_block(last, _rotary(length - 1, c)[last_local], attention.last_of_prompt(cache[-1], before))
    return model.head()(model.final_norm(last)), tuple(cache)


def _rotary(positions: jax.Array, config: DecoderConfig) -> dict[bool, Rotary]:
    """The rotary tables of local (True) and global layers, behind a barrier: else XLA would compute them in each layer again."""
    kinds = sorted(set(config.local_layers))
    return {local: jax.lax.optimization_barrier(attention.rotary(positions, config, local=local)) for local in kinds}


@flax.struct.dataclass
class Masks:
    """The cache entries that rows attend to. prompt: bool[J, W, S]; own: bool[B, R], the new token's entry included."""

    prompt: chex.Array
    own: chex.Array


def within_window(masks: Masks, window: int, *, prompt_age: jax.Array, own_age: jax.Array) -> Masks:
    """The masks of local layers, from the masks of global layers.

    Args: prompt_age, own_age: int32[J, W, S] and int32[B, R], how many positions each entry is behind the new token.
    """
    return Masks(prompt=masks.prompt & (prompt_age < window), own=masks.own & (own_age < window))


@full_precision
def decode_step(
    model: Decoder,
    token: jax.Array,
    position: jax.Array,
    entry: jax.Array,
    prompt: Cache,
    own: Cache,
    masks: Masks,
    local_masks: Masks | None = None,
    *,
    tiled: bool = False,
) -> tuple[jax.Array, Cache]:
    """Logits float32[B, V] of the next token of every row, and the new own cache.

    Args:
      token: int32[B]; position: int32[B], its position in the row, from 0 at the first prompt token.
      entry: int32[], the place of the new key and value in every row's own cache. Keys carry their positions, so the order of
        entries does not matter.
      prompt: per layer (keys, values) [J, G, S, H]; own: likewise [B, G, R, H], or with heads side by side, see
        attention.attend_in_two_parts. Entries that masks do not have are not read.
      masks: of global layers; local_masks: of local layers, without the entries before the window (see `within_window`).
      tiled: static, see attention.one_token.
    """
    x = model.embed_tokens(token, position)
    tables = _rotary(position, model.config)
    new_own = []
    for block, local, shared, mine in zip(model.layers, model.config.local_layers, prompt, own, strict=True):
        reads = local_masks if local else masks
        assert reads is not None, "a model with local layers needs their masks"
        attend = attention.one_token(shared, mine, entry, reads.prompt, reads.own, tiled=tiled)
        x, kept = block(x, tables[local], attend)
        new_own.append(kept)
    return model.head()(model.final_norm(x)), tuple(new_own)
