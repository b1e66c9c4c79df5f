"""One decoder-only transformer, by configuration: parameters as one table, and pure functions over them.

Parameters are a nested dict of arrays, stacked over layers. Training scans over the stack with rematerialisation;
decoding unrolls it with static slices. The architecture is Llama's: RMS norms before attention and feed-forward,
rotary positions (rotate-half convention), grouped-query attention, SwiGLU.
"""

import dataclasses
import math
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from tba_jax import mesh as mesh_lib

Params = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Shape of a decoder. Letters of the axis table: L layers, N heads, G kv_heads, H head_size, D width, F ffn, V vocab."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_size: int
    ffn: int
    vocab: int
    max_positions: int
    rope_theta: float = 10_000.0
    norm_epsilon: float = 1e-6
    tied_embedding: bool = True
    compute_dtype: str = "float32"

    def __post_init__(self):
        if self.heads % self.kv_heads:
            raise ValueError(f"model.heads={self.heads} is not divisible by model.kv_heads={self.kv_heads}")
        if self.head_size % 2:
            raise ValueError(f"model.head_size={self.head_size} must be even for rotary positions")


@dataclasses.dataclass(frozen=True)
class ParamSpec:
    """One parameter: shape, logical axes (mesh.RULES), and the standard deviation of its normal init (0 = all ones)."""

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    init_std: float


def param_specs(config: DecoderConfig) -> dict[str, Any]:
    """The table of all parameters, as a tree of ParamSpec."""
    c = config
    L, D, N, G, H, F, V = c.layers, c.width, c.heads, c.kv_heads, c.head_size, c.ffn, c.vocab
    std = 0.02
    residual_std = std / math.sqrt(2 * L)  # GPT-2's scaling: the residual stream's variance does not grow with depth
    specs: dict[str, Any] = {
        "embedding": ParamSpec((V, D), ("vocab", "embed"), std),
        "layers": {
            "attention_norm": ParamSpec((L, D), ("layers", "embed"), 0.0),
            "query": ParamSpec((L, D, N, H), ("layers", "embed", "heads", "head"), std),
            "key": ParamSpec((L, D, G, H), ("layers", "embed", "kv_heads", "head"), std),
            "value": ParamSpec((L, D, G, H), ("layers", "embed", "kv_heads", "head"), std),
            "out": ParamSpec((L, N, H, D), ("layers", "heads", "head", "embed"), residual_std),
            "ffn_norm": ParamSpec((L, D), ("layers", "embed"), 0.0),
            "gate": ParamSpec((L, D, F), ("layers", "embed", "ffn"), std),
            "up": ParamSpec((L, D, F), ("layers", "embed", "ffn"), std),
            "down": ParamSpec((L, F, D), ("layers", "ffn", "embed"), residual_std),
        },
        "final_norm": ParamSpec((D,), ("embed",), 0.0),
    }
    if not c.tied_embedding:
        specs["lm_head"] = ParamSpec((D, V), ("embed", "vocab"), std)
    return specs


def map_specs(function: Any, config: DecoderConfig) -> Any:
    """Maps function(name, ParamSpec) over the parameter table; `name` is the dotted path."""

    def call(path: Any, spec: ParamSpec) -> Any:
        return function(".".join(str(entry.key) for entry in path), spec)

    return jax.tree_util.tree_map_with_path(call, param_specs(config), is_leaf=lambda x: isinstance(x, ParamSpec))


def param_shapes(config: DecoderConfig, dtype: str = "float32") -> Params:
    """The parameters as jax.ShapeDtypeStruct, without allocating anything."""
    return map_specs(lambda _, spec: jax.ShapeDtypeStruct(spec.shape, jnp.dtype(dtype)), config)


def param_shardings(config: DecoderConfig, mesh: Mesh) -> Params:
    """NamedSharding of every parameter. Raises ValueError where a mesh axis does not divide a dimension."""
    return map_specs(lambda name, spec: mesh_lib.sharding(mesh, spec.axes, spec.shape, name=name), config)


def param_count(config: DecoderConfig) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(param_shapes(config)))


def init_params(key: jax.Array, config: DecoderConfig) -> Params:
    """Random float32 parameters. Jit with out_shardings=param_shardings(...) to create them sharded."""

    def init(name: str, spec: ParamSpec) -> jax.Array:
        if spec.init_std == 0.0:
            return jnp.ones(spec.shape, jnp.float32)
        name_key = jax.random.fold_in(key, np.uint32(hash_name(name)))
        return spec.init_std * jax.random.normal(name_key, spec.shape, jnp.float32)

    return map_specs(init, config)


def hash_name(name: str) -> int:
    """A 32-bit FNV-1a hash: a parameter's init depends on its name alone, not on what else the model has."""
    value = 2166136261
    for byte in name.encode():
        value = ((value ^ byte) * 16777619) & 0xFFFFFFFF
    return value


def _rms_norm(x: jax.Array, scale: jax.Array, epsilon: float) -> jax.Array:
    x32 = x.astype(jnp.float32)  # the mean of squares overflows and loses digits in bfloat16
    normed = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + epsilon)
    return (normed * scale.astype(jnp.float32)).astype(x.dtype)


def _rotary_tables(positions: jax.Array, config: DecoderConfig) -> tuple[jax.Array, jax.Array]:
    """cos, sin: float32[..., 1, H/2] for int32[...] positions; the 1 broadcasts over heads."""
    inverse_frequency = config.rope_theta ** (-jnp.arange(0, config.head_size, 2, dtype=jnp.float32) / config.head_size)
    angle = positions.astype(jnp.float32)[..., None, None] * inverse_frequency
    return jnp.cos(angle), jnp.sin(angle)


def _rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Applies rotary positions to x: [..., heads, H], pairing element i with i + H/2 (rotate-half)."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def _project_qkv(x: jax.Array, layer: Params, cos: jax.Array, sin: jax.Array, config: DecoderConfig) -> tuple[jax.Array, ...]:
    """Normed and rotated query [..., N, H], key and value [..., G, H] of x [..., D]."""
    normed = _rms_norm(x, layer["attention_norm"], config.norm_epsilon)
    query = _rotate(jnp.einsum("...D,DNH->...NH", normed, layer["query"]), cos, sin)
    key = _rotate(jnp.einsum("...D,DGH->...GH", normed, layer["key"]), cos, sin)
    value = jnp.einsum("...D,DGH->...GH", normed, layer["value"])
    return query, key, value


def _ffn(x: jax.Array, layer: Params, config: DecoderConfig) -> jax.Array:
    normed = _rms_norm(x, layer["ffn_norm"], config.norm_epsilon)
    gated = jax.nn.silu(normed @ layer["gate"]) * (normed @ layer["up"])
    return x + gated @ layer["down"]


def _full_attention_layer(
    x: jax.Array, layer: Params, cos: jax.Array, sin: jax.Array, mask: jax.Array, config: DecoderConfig
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One layer over whole sequences. x: [B, T, D]; cos, sin: [B·T, 1, H/2]. Returns x [B, T, D], key and value [B, T, G, H].

    Projections run on flat tokens [B·T, D]: XLA's CPU backend is several times slower on the gradients of the same
    matrix products with two leading axes.
    """
    B, T, D = x.shape
    flat = x.reshape(B * T, D)
    query, key, value = (y.reshape(B, T, *y.shape[1:]) for y in _project_qkv(flat, layer, cos, sin, config))
    attended = jax.nn.dot_product_attention(query, key, value, mask=mask)
    flat = flat + jnp.einsum("tNH,NHD->tD", attended.reshape(B * T, *attended.shape[2:]), layer["out"])
    return _ffn(flat, layer, config).reshape(B, T, D), key, value


def cast(params: Params, config: DecoderConfig) -> Params:
    """Parameters in the compute dtype; the float32 master weights stay with the caller."""
    return jax.tree.map(lambda p: p.astype(config.compute_dtype), params)


def positions_and_mask(token_mask: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Positions and causal mask of padded rows.

    Args:
      token_mask: bool[B, T], true on real tokens.

    Returns:
      positions int32[B, T], counted from the first real token; mask bool[B, 1, T, T] (query, key). Padding attends to
      itself only, so that no row of the softmax is empty.
    """
    T = token_mask.shape[1]
    positions = jnp.maximum(jnp.cumsum(token_mask, axis=1) - 1, 0)
    causal = jnp.tril(jnp.ones((T, T), bool))
    mask = (causal & token_mask[:, None, :]) | jnp.eye(T, dtype=bool)
    return positions, mask[:, None]


def hidden_states(params: Params, tokens: jax.Array, token_mask: jax.Array, *, config: DecoderConfig, remat: bool) -> jax.Array:
    """Final hidden states of whole sequences, for teacher-forced scoring.

    Args:
      params: float32 parameters, see param_specs.
      tokens: int32[B, T].
      token_mask: bool[B, T], true on real tokens; padding may be on either side.
      remat: recompute each layer in the backward pass instead of keeping its activations.

    Returns:
      compute_dtype[B, T, D], after the final norm.
    """
    chex.assert_equal_shape([tokens, token_mask])
    params = cast(params, config)
    positions, mask = positions_and_mask(token_mask)
    cos, sin = _rotary_tables(positions.reshape(-1), config)

    def layer_step(x: jax.Array, layer: Params) -> tuple[jax.Array, None]:
        return _full_attention_layer(x, layer, cos, sin, mask, config)[0], None

    x = params["embedding"][tokens]
    x, _ = jax.lax.scan(jax.checkpoint(layer_step) if remat else layer_step, x, params["layers"])
    return _rms_norm(x, params["final_norm"], config.norm_epsilon)


def logits_of(params: Params, hidden: jax.Array, *, config: DecoderConfig) -> jax.Array:
    """float32[..., V] logits of hidden states [..., D]: float32 because log-prob sums over long rows need it."""
    weight = params["embedding"].T if config.tied_embedding else params["lm_head"]
    return jnp.matmul(hidden, weight.astype(hidden.dtype), preferred_element_type=jnp.float32)


def prefill(
    params: Params, tokens: jax.Array, token_mask: jax.Array, *, cache_length: int, config: DecoderConfig
) -> tuple[jax.Array, Any]:
    """Runs the prompts and fills the cache.

    Args:
      params: parameters already in the compute dtype.
      tokens: int32[Q, P], left-padded; token_mask: bool[Q, P].

    Returns:
      logits float32[Q, V] at the last prompt token, and the cache: per layer (key, value) compute_dtype[Q, G, S, H],
      heads before time because the decode step reads time-contiguous blocks of one head.
    """
    positions, mask = positions_and_mask(token_mask)
    cos, sin = _rotary_tables(positions.reshape(-1), config)
    room = cache_length - tokens.shape[1]
    x = params["embedding"][tokens]
    cache = []
    for i in range(config.layers):
        layer = jax.tree.map(lambda p, i=i: p[i], params["layers"])
        x, key, value = _full_attention_layer(x, layer, cos, sin, mask, config)
        cache.append(tuple(jnp.pad(kv.swapaxes(1, 2), ((0, 0), (0, 0), (0, room), (0, 0))) for kv in (key, value)))
    last = _rms_norm(x[:, -1], params["final_norm"], config.norm_epsilon)
    return logits_of(params, last, config=config), tuple(cache)


def decode_step(
    params: Params,
    token: jax.Array,
    position: jax.Array,
    slot: jax.Array,
    cache: Any,
    cache_mask: jax.Array,
    *,
    config: DecoderConfig,
) -> tuple[jax.Array, Any]:
    """One token for every row.

    Args:
      params: parameters already in the compute dtype.
      token: int32[B]; position: int32[B], its rotary position; slot: int32[], where its key and value go in the cache.
      cache: per layer (key, value) [B, G, S, H]; cache_mask: bool[B, S], true on the slots to attend to, `slot` included.

    Returns:
      logits float32[B, V] for the next token, and the new cache.
    """
    N, G, H = config.heads, config.kv_heads, config.head_size
    cos, sin = _rotary_tables(position, config)
    bias = jnp.where(cache_mask, 0.0, -jnp.inf)[:, None, None, :]
    x = params["embedding"][token]
    B = x.shape[0]
    new_cache = []
    for i in range(config.layers):
        layer = jax.tree.map(lambda p, i=i: p[i], params["layers"])
        query, key, value = _project_qkv(x, layer, cos, sin, config)
        keys, values = (
            jax.lax.dynamic_update_slice_in_dim(old, new[:, :, None], slot, axis=2)
            for old, new in zip(cache[i], (key, value), strict=True)
        )
        grouped = query.reshape(B, G, N // G, H)
        scores = jnp.einsum("BGnH,BGSH->BGnS", grouped, keys, preferred_element_type=jnp.float32) / math.sqrt(H)
        weights = jax.nn.softmax(scores + bias, axis=-1).astype(x.dtype)
        attended = jnp.einsum("BGnS,BGSH->BGnH", weights, values).reshape(B, N, H)
        x = x + jnp.einsum("BNH,NHD->BD", attended, layer["out"])
        x = _ffn(x, layer, config)
        new_cache.append((keys, values))
    final = _rms_norm(x, params["final_norm"], config.norm_epsilon)
    return logits_of(params, final, config=config), tuple(new_cache)
