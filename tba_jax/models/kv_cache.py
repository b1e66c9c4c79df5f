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
from tba_jax.models.attention import MASKED, Attend, Rotary
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
    """Takes the parameters out of `params` and yields each as a tree of its own. `add` joins what `unstack` makes of them."""

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
    Where heads fill the columns of tiles, others would be copied at every call of the decode loop.

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
        x, kept, _ = block(x, tables[local], attend)
        cache.append(tuple(sharding.constrain(kv.swapaxes(1, 2), "QGSH") for kv in kept))
    # The last layer computes keys and values at all positions, and everything after them at the last position alone.
    _, *kept = last_block.project(x, tables[last_local])
    cache.append(tuple(sharding.constrain(kv.reshape(Q, P, *kv.shape[1:]).swapaxes(1, 2), "QGSH") for kv in kept))
    last = jnp.take_along_axis(x.reshape(Q, P, -1), (length - 1)[:, None, None], axis=1)[:, 0]
    before = positions < (length - 1)[:, None]
    if last_local:
        before &= positions >= (length - c.window)[:, None]
    last, *_ = last_block(last, _rotary(length - 1, c)[last_local], last_of_prompt(cache[-1], before))
    return model.head()(model.final_norm(last)), tuple(cache)


@full_precision
def prefill_after(model: Decoder, tokens: jax.Array, kept: jax.Array, length: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
    """Logits float32[Q, V] as of `prefill`, and the caches, where these hold the keys and values of the first tokens already.

    Args:
      tokens: int32[Q, P], those after the first `kept`, right-padded. kept, length: int32[Q], tokens in the cache, and in all,
        which are more.
      cache: per layer (keys, values) [Q, G, S, H], S at least the longest length. Entries from `kept` on are written.
    """
    Q, P = tokens.shape
    chex.assert_shape((kept, length), (Q,))
    c, S = model.config, cache[0][0].shape[2]
    positions = kept[:, None] + jnp.arange(P)
    before = jnp.arange(S) < positions[..., None]
    local_before = before & (jnp.arange(S) > positions[..., None] - c.window)
    tables = _rotary(positions.reshape(-1), c)
    # Padding lies past the longest prompt, where learned positions end.
    embedded = positions if c.positions != "learned" else jnp.minimum(positions, c.max_positions - 1)
    x = model.embed_tokens(tokens.reshape(-1), embedded.reshape(-1))
    new = []
    for block, local, old in zip(model.layers, c.local_layers, cache, strict=True):
        x, written, _ = block(x, tables[local], _many_tokens(old, kept, local_before if local else before))
        new.append(tuple(sharding.constrain(kv, "QGSH") for kv in written))
    last = jnp.take_along_axis(x.reshape(Q, P, -1), (length - kept - 1)[:, None, None], axis=1)[:, 0]
    return model.head()(model.final_norm(last)), tuple(new)


def _many_tokens(cache: tuple[jax.Array, ...], kept: jax.Array, before: jax.Array) -> Attend:
    """The `attend` of P new tokens in each of Q rows, which keeps the row's caches with the new tokens' keys and values.

    Args: before: bool[Q, P, S], the entries that each token reads besides its own.
    """
    Q, P, S = before.shape

    def written(old: jax.Array, new: jax.Array) -> jax.Array:
        new = new.reshape(Q, P, *new.shape[1:]).swapaxes(1, 2)
        room = jnp.pad(old, ((0, 0), (0, 0), (0, P), (0, 0)))  # for padding of the tokens
        put = jax.vmap(functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=1))
        return put(room, new, kept)[:, :, :S]

    def attend_new(query: jax.Array, key: jax.Array, value: jax.Array, sinks: jax.Array | None) -> tuple[jax.Array, Any]:
        now = written(cache[0], key), written(cache[1], value)
        by_row = [x.reshape(Q, P, *x.shape[1:]) for x in (query, key, value)]

        def of_row(row: tuple[Any, ...]) -> jax.Array:
            (query, key, value), caches, its = row
            itself = key[:, :, None], value[:, :, None]
            one = jax.tree.map(lambda x: x[None], caches)
            return attend_in_two_parts(query, one, itself, its[None], jnp.ones((P, 1), bool), sinks)

        # Row by row: the scores of one row alone are there at a time.
        return jax.lax.map(of_row, (tuple(by_row), now, before)).reshape(query.shape), now

    return attend_new


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
      prompt, own: per layer (keys, values), see attend_in_two_parts. Entries that masks do not have are not read.
      masks: of global layers; local_masks: of local layers, without the entries before the window (see `within_window`).
      tiled: static, see one_token.
    """
    x = model.embed_tokens(token, position)
    tables = _rotary(position, model.config)
    new_own = []
    for block, local, shared, mine in zip(model.layers, model.config.local_layers, prompt, own, strict=True):
        reads = local_masks if local else masks
        assert reads is not None, "a model with local layers needs their masks"
        attend = one_token(shared, mine, entry, reads.prompt, reads.own, tiled=tiled)
        x, kept, _ = block(x, tables[local], attend)
        new_own.append(kept)
    return model.head()(model.final_norm(x)), tuple(new_own)


def last_of_prompt(cache: tuple[jax.Array, ...], before: jax.Array) -> Attend:
    """The `attend` of the last token of Q prompts, which reads itself and earlier tokens. It keeps nothing.

    Args: cache: keys, values [Q, G, P, H]; before: bool[Q, P], the earlier tokens that are read.
    """

    def attend_last(query: jax.Array, key: jax.Array, value: jax.Array, sinks: jax.Array | None) -> tuple[jax.Array, None]:
        itself = (key[:, :, None], value[:, :, None])
        return attend_in_two_parts(query, cache, itself, before[:, None], jnp.ones((len(query), 1), bool), sinks), None

    return attend_last


def one_token(
    prompt: tuple[jax.Array, ...],
    own: tuple[jax.Array, ...],
    entry: jax.Array,
    prompt_mask: jax.Array,
    own_mask: jax.Array,
    *,
    tiled: bool = False,
) -> Attend:
    """The `attend` of one new token in each row. It keeps the row's own keys and values, with the new token's at `entry`,
    int32[].

    Args: tiled: static, the form for TPUs: caches are read as they were before the step, and the new token is a part of its own.
      If the step read what it has written, XLA would write the whole cache, not one entry. Others: see attend_in_two_parts.
    """
    prompt = tuple(x[:, :, : prompt_mask.shape[-1]] for x in prompt)
    before = own_mask & (jnp.arange(own_mask.shape[-1]) != entry)

    def read(caches: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        return tuple(x[:, :, : own_mask.shape[-1]] for x in caches)

    def attend_cached(query: jax.Array, key: jax.Array, value: jax.Array, sinks: jax.Array | None) -> tuple[jax.Array, Any]:
        def written(cached: jax.Array, new: jax.Array) -> jax.Array:
            new = new.reshape(len(new), cached.shape[1], 1, cached.shape[3])
            return jax.lax.dynamic_update_slice_in_dim(cached, new, entry, axis=2)

        if not tiled:
            kept = written(own[0], key), written(own[1], value)
            return attend_in_two_parts(query, prompt, read(kept), prompt_mask, own_mask, sinks), kept
        itself = key, value
        attended = attend_in_two_parts(query, prompt, read(own), prompt_mask, before, sinks, itself=itself, least_rows=2)
        attended, key, value = jax.lax.optimization_barrier((attended, key, value))  # the caches are written after they are read
        return attended, (written(own[0], key), written(own[1], value))

    return attend_cached


def attend_in_two_parts(
    query: jax.Array,
    prompt: tuple[jax.Array, ...],
    own: tuple[jax.Array, ...],
    prompt_mask: jax.Array,
    own_mask: jax.Array,
    sinks: jax.Array | None = None,
    *,
    itself: tuple[jax.Array, jax.Array] | None = None,
    least_rows: int = 1,
) -> jax.Array:
    """Attention of one new token a row: to the prompt that its group shares and to its own continuation, one softmax over both.

    Args:
      query, result: [B, N, H] with B = J·W; prompt: keys and values [J, G, S, H].
      own: keys and values [B, G, R, H]; or [B, G/t, R, t·H], where t heads lie side by side in an entry.
      prompt_mask: bool[J, W, S]; own_mask: bool[B, R]. sinks: see attention.attend.
      itself: key and value [B, G, H] of the new token, where `own` does not have them.
      least_rows: static: a matrix product has so many rows of queries; rows of zeros are added. On TPUs 2: XLA computes a product
        of one row in other units, and copies the caches of the whole decode loop into another layout for them.
    """
    (prompt_keys, prompt_values), (own_keys, own_values) = prompt, own
    B, N, H = query.shape
    J, G, S, _ = prompt_keys.shape
    W, n, dtype, scale = B // J, N // G, query.dtype, 1 / math.sqrt(H)
    product, together = functools.partial(_product, least_rows=least_rows), G // own_keys.shape[1]
    query = query.reshape(B, G, n, H)
    prompt_query = _by_group(query, J).reshape(J, G, W * n, H)
    prompt_scores = product("JGxH,JGSH->JGxS", prompt_query, prompt_keys, preferred_element_type=jnp.float32)
    prompt_scores = jnp.where(prompt_mask[:, None, :, None, :], prompt_scores.reshape(J, G, W, n, S) * scale, MASKED)
    own_scores = product("BGnH,BGRH->BGnR", _side_by_side(query, together), own_keys, preferred_element_type=jnp.float32)
    own_scores = jnp.where(own_mask[:, None, None, :], own_scores.reshape(B, G, n, -1) * scale, MASKED)
    largest = jnp.maximum(_by_row(jnp.max(prompt_scores, axis=-1)), jnp.max(own_scores, axis=-1))
    if itself is not None:
        scores = jnp.einsum("BGnH,BGH->BGn", query, itself[0], preferred_element_type=jnp.float32) * scale
        largest = jnp.maximum(largest, scores)
    prompt_weights = jnp.exp(prompt_scores - _by_group(largest, J)[..., None])
    own_weights = jnp.exp(own_scores - largest[..., None])
    total = _by_row(jnp.sum(prompt_weights, axis=-1)) + jnp.sum(own_weights, axis=-1)
    if sinks is not None:
        total = total + jnp.exp(sinks.astype(jnp.float32).reshape(G, n) - largest)  # infinite: the weights of the others are 0
    of_prompt = product("JGxS,JGSH->JGxH", prompt_weights.reshape(J, G, W * n, S).astype(dtype), prompt_values)
    own_weights = own_weights.astype(dtype).reshape(B, G // together, together * n, -1)
    attended = _by_row(of_prompt.reshape(J, G, W, n, H)) + _apart(product("BGnR,BGRH->BGnH", own_weights, own_values), together)
    if itself is not None:
        weights = jnp.exp(scores - largest)
        total, attended = total + weights, attended + weights.astype(dtype)[..., None] * itself[1][:, :, None]
    return (attended / total[..., None]).astype(dtype).reshape(B, N, H)


def _by_group(x: jax.Array, groups: int) -> jax.Array:
    """[B, G, n, ...] -> [J, G, W, n, ...]."""
    return x.reshape(groups, -1, *x.shape[1:]).swapaxes(1, 2)


def _by_row(x: jax.Array) -> jax.Array:
    """The inverse of _by_group."""
    x = x.swapaxes(1, 2)
    return x.reshape(-1, *x.shape[2:])


def _product(equation: str, rows: jax.Array, cache: jax.Array, *, least_rows: int, **options: Any) -> jax.Array:
    """einsum of rows [., ., x, .] and a cache. Args: least_rows: see attend_in_two_parts."""
    added = max(0, least_rows - rows.shape[2])
    return jnp.einsum(equation, jnp.pad(rows, ((0, 0), (0, 0), (0, added), (0, 0))), cache, **options)[:, :, : rows.shape[2]]


def _side_by_side(query: jax.Array, together: int) -> jax.Array:
    """[B, G, n, H] -> [B, G/t, t·n, t·H]: queries whose products with t heads side by side are those with their own head."""
    if together == 1:
        return query
    B, G, n, H = query.shape
    own = jnp.eye(together, dtype=bool)[:, None, :, None]
    query = query.reshape(B, G // together, together, n, 1, H)
    return jnp.where(own, query, 0).reshape(B, G // together, together * n, together * H)


def _apart(attended: jax.Array, together: int) -> jax.Array:
    """[B, G/t, t·n, t·H] -> [B, G, n, H]: the part of each query's own head."""
    if together == 1:
        return attended
    B, groups, rows, _ = attended.shape
    attended = attended.reshape(B, groups, together, rows // together, together, -1)
    heads = jnp.stack([attended[:, :, t, :, t] for t in range(together)], axis=2)
    return heads.reshape(B, groups * together, *heads.shape[3:])
