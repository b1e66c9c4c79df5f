"""One decoder-only transformer, by configuration: GPT-2, GPT-NeoX, Llama, Mistral, Qwen2 and Qwen3 are settings of it.

Parameters are a nested dict of arrays (parameters.py), stacked over layers. Training scans over the stack with
rematerialisation; decoding (cached.py) unrolls it.
"""

import dataclasses
import functools
import math
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from tba_jax import mesh as mesh_lib
from tba_jax.models import layers, parameters
from tba_jax.models.layers import RopeScaling
from tba_jax.models.parameters import Params, ParamSpec, Specs


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Shape of a decoder. Letters of the axis table: L layers, N heads, G kv_heads, H head_size, D width, F ffn, V vocab.

    architecture: the Hugging Face model_type whose names and config keys its checkpoints use; what is computed is said by the
      other fields alone.
    norm: "rms" or "layer" (layer norm with bias). positions: "rotary" or "learned" (an embedding of max_positions).
    rotary_size: elements of each head that are rotated, the first ones; 0: all. parallel_residual: attention and feed-forward
      both read the layer's input (GPT-NeoX). gated: feed-forward down(act(gate(x)) * up(x)), otherwise down(act(up(x))).
    qkv_bias, out_bias, ffn_bias: biases of those linear maps. qk_norm: RMS norm of each query and key head (Qwen3).
    head: "language_model", or "score": a linear map of `labels` outputs without bias in its place (reward models, labels 1).
    value_head: adds a scalar head with bias for state values (PPO).
    attention: kernel of whole sequences, see layers.attend.
    """

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_size: int
    ffn: int
    vocab: int
    max_positions: int
    architecture: str = "llama"
    norm: str = "rms"
    norm_epsilon: float = 1e-6
    positions: str = "rotary"
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    rotary_size: int = 0
    parallel_residual: bool = False
    activation: str = "silu"
    gated: bool = True
    qkv_bias: bool = False
    out_bias: bool = False
    ffn_bias: bool = False
    qk_norm: bool = False
    tied_embedding: bool = True
    head: str = "language_model"
    labels: int = 1
    value_head: bool = False
    compute_dtype: str = "float32"
    attention: str = "auto"

    def __post_init__(self):
        if self.heads % self.kv_heads:
            raise ValueError(f"model.heads={self.heads} is not divisible by model.kv_heads={self.kv_heads}")
        if self.positions == "rotary" and not self.rotary_size and self.head_size % 2:
            raise ValueError(f"model.head_size={self.head_size} must be even for rotary positions")
        if self.rotary_size % 2 or self.rotary_size > self.head_size:
            raise ValueError(f"rotary_size={self.rotary_size} must be even and at most head_size={self.head_size}")

    @property
    def frequencies(self) -> np.ndarray:
        return layers.rotary_frequencies(self.rotary_size or self.head_size, self.rope_theta, self.rope_scaling)


# Fields of DecoderConfig that say how something is computed, not what: they may differ between the roles of a run.
FREE_FIELDS = ("compute_dtype", "attention")

_STD = 0.02


def param_specs(config: DecoderConfig) -> Specs:
    """The table of all parameters. Weights of linear maps are [layers, inputs, outputs]."""
    c = config
    L, D, N, G, H, F, V = c.layers, c.width, c.heads, c.kv_heads, c.head_size, c.ffn, c.vocab
    residual_std = _STD / math.sqrt(2 * L)  # GPT-2's scaling: the residual stream's variance does not grow with depth

    def linear(sizes: dict[str, int], *, inputs: int = 1, bias: bool, std: float = _STD) -> Specs:
        shape, axes = (L, *sizes.values()), ("layers", *sizes)
        specs = {"weight": ParamSpec(shape=shape, axes=axes, init_std=std, inputs=inputs)}
        if bias:
            specs["bias"] = ParamSpec(shape=(L, *shape[1 + inputs :]), axes=("layers", *axes[1 + inputs :]))
        return specs

    def norm(shape: tuple[int, ...], axes: tuple[str, ...]) -> Specs:
        specs = {"scale": ParamSpec(shape=shape, axes=axes, init_mean=1.0)}
        return specs | ({"bias": ParamSpec(shape=shape, axes=axes)} if c.norm == "layer" else {})

    stacked: Specs = {
        "attention_norm": norm((L, D), ("layers", "embed")),
        "query": linear({"embed": D, "heads": N, "head": H}, bias=c.qkv_bias),
        "key": linear({"embed": D, "kv_heads": G, "head": H}, bias=c.qkv_bias),
        "value": linear({"embed": D, "kv_heads": G, "head": H}, bias=c.qkv_bias),
        "out": linear({"heads": N, "head": H, "embed": D}, inputs=2, bias=c.out_bias, std=residual_std),
        "ffn_norm": norm((L, D), ("layers", "embed")),
        "up": linear({"embed": D, "ffn": F}, bias=c.ffn_bias),
        "down": linear({"ffn": F, "embed": D}, bias=c.ffn_bias, std=residual_std),
    }
    if c.gated:
        stacked["gate"] = linear({"embed": D, "ffn": F}, bias=c.ffn_bias)
    if c.qk_norm:
        stacked |= {name: {"scale": ParamSpec(shape=(L, H), axes=("layers", "head"), init_mean=1.0)} for name in _QK_NORMS}
    specs: Specs = {
        "embedding": {"weight": ParamSpec(shape=(V, D), axes=("vocab", "embed"), init_std=_STD)},
        "layers": stacked,
        "final_norm": norm((D,), ("embed",)),
    }
    if c.positions == "learned":
        table = ParamSpec(shape=(c.max_positions, D), axes=("positions", "embed"), init_std=_STD)
        specs["position_embedding"] = {"weight": table}
    if c.head == "score":
        specs["score"] = {"weight": ParamSpec(shape=(D, c.labels), axes=("embed", "labels"), init_std=_STD, inputs=1)}
    elif not c.tied_embedding:
        specs["lm_head"] = {"weight": ParamSpec(shape=(D, V), axes=("embed", "vocab"), init_std=_STD, inputs=1)}
    if c.value_head:
        weight = ParamSpec(shape=(D, 1), axes=("embed", "labels"), inputs=1)
        specs["value_head"] = {"weight": weight, "bias": ParamSpec(shape=(1,), axes=("labels",))}
    return specs


_QK_NORMS = ("query_norm", "key_norm")


def param_shapes(config: DecoderConfig, dtype: str = "float32") -> Params:
    """See parameters.shapes."""
    return parameters.shapes(param_specs(config), dtype)


def param_shardings(config: DecoderConfig, mesh: Mesh) -> Params:
    """See parameters.shardings."""
    return parameters.shardings(param_specs(config), mesh)


def param_count(config: DecoderConfig) -> int:
    return parameters.count(param_specs(config))


def init_params(key: jax.Array, config: DecoderConfig) -> Params:
    """See parameters.init."""
    return parameters.init(key, param_specs(config))


def cast(params: Params, config: DecoderConfig) -> Params:
    """See parameters.cast."""
    return parameters.cast(params, config.compute_dtype)


def embed(params: Params, tokens: jax.Array, positions: jax.Array, config: DecoderConfig) -> jax.Array:
    """[t, D] of flat int32[t] tokens and positions."""
    x = mesh_lib.constrain(params["embedding"]["weight"], "VD")[tokens]
    if config.positions == "learned":
        x = x + params["position_embedding"]["weight"][positions]
    return mesh_lib.constrain(x, "tD")


# cos and sin of the positions [t], or None where positions are not rotary.
Rotary = tuple[jax.Array, jax.Array] | None


def rotary(positions: jax.Array, config: DecoderConfig) -> Rotary:
    """The tables that all layers share: int32[t] positions."""
    return layers.rotary_tables(positions, config.frequencies) if config.positions == "rotary" else None


def project(x: jax.Array, layer: Params, rotary: Rotary, config: DecoderConfig) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Query [t, N, H], key and value [t, G, H] of a layer's input x [t, D]."""
    x = layers.norm(x, layer["attention_norm"], config.norm_epsilon, config.norm)
    query = layers.linear("tD,DNH->tNH", x, layer["query"])
    key = layers.linear("tD,DGH->tGH", x, layer["key"])
    value = layers.linear("tD,DGH->tGH", x, layer["value"])
    if config.qk_norm:
        query = layers.norm(query, layer["query_norm"], config.norm_epsilon, "rms")
        key = layers.norm(key, layer["key_norm"], config.norm_epsilon, "rms")
    if rotary is not None:
        query, key = layers.rotate(query, *rotary), layers.rotate(key, *rotary)
    return query, key, value


def _ffn(x: jax.Array, layer: Params, config: DecoderConfig) -> jax.Array:
    activation = layers.ACTIVATIONS[config.activation]
    up = layers.linear("tD,DF->tF", x, layer["up"])
    inner = activation(layers.linear("tD,DF->tF", x, layer["gate"])) * up if config.gated else activation(up)
    return layers.linear("tF,FD->tD", inner, layer["down"])


def apply_layer(x: jax.Array, layer: Params, rotary: Rotary, attend: Any, config: DecoderConfig) -> tuple[jax.Array, Any]:
    """One layer on flat tokens x [t, D]. attend(query, key, value) -> ([t, N, H], what is to be kept)."""
    norm = functools.partial(layers.norm, epsilon=config.norm_epsilon, kind=config.norm)
    attended, kept = attend(*project(x, layer, rotary, config))
    attention_out = layers.linear("tNH,NHD->tD", attended, layer["out"])
    if config.parallel_residual:
        return x + attention_out + _ffn(norm(x, layer["ffn_norm"]), layer, config), kept
    x = x + attention_out
    return x + _ffn(norm(x, layer["ffn_norm"]), layer, config), kept


def final_norm(x: jax.Array, params: Params, config: DecoderConfig) -> jax.Array:
    return layers.norm(x, params["final_norm"], config.norm_epsilon, config.norm)


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


def whole_rows(B: int, T: int, mask: jax.Array | None, config: DecoderConfig) -> Any:
    """The `attend` of `apply_layer` for B whole sequences; keeps key and value [B, T, G, H]."""

    def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> tuple[jax.Array, Any]:
        query, key, value = (x.reshape(B, T, *x.shape[1:]) for x in (query, key, value))
        attended = layers.attend(query, key, value, mask, causal=mask is None, kernel=config.attention)
        return attended.reshape(B * T, *attended.shape[2:]), (key, value)

    return attend


@layers.full_precision
def hidden_states(
    params: Params, tokens: jax.Array, token_mask: jax.Array | None, *, config: DecoderConfig, remat: str
) -> jax.Array:
    """Final hidden states of whole sequences, for teacher-forced scoring.

    Args:
      params: float32 parameters, see param_specs.
      tokens: int32[B, T].
      token_mask: bool[B, T], true on real tokens, padding on either side; or None, if rows are padded on the right or not at
        all: then causality alone keeps padding from what is real, and no mask is made.
      remat: what the backward pass recomputes, a name of layers.REMAT.

    Returns:
      compute_dtype[B, T, D], after the final norm.
    """
    B, T = tokens.shape
    params = cast(params, config)
    positions, mask = jnp.broadcast_to(jnp.arange(T), (B, T)), None
    if token_mask is not None:
        chex.assert_equal_shape([tokens, token_mask])
        positions, mask = positions_and_mask(token_mask)
    positions = positions.reshape(-1)
    attend = whole_rows(B, T, mask, config)

    def layer_step(x: jax.Array, layer: Params) -> tuple[jax.Array, None]:
        return apply_layer(x, layer, tables, lambda *qkv: (attend(*qkv)[0], None), config)

    tables = rotary(positions, config)
    x = embed(params, tokens.reshape(-1), positions, config)
    x, _ = jax.lax.scan(layers.remat(layer_step, remat), x, params["layers"])
    return final_norm(x, params, config).reshape(B, T, -1)


@layers.full_precision
def logits_of(params: Params, hidden: jax.Array, *, config: DecoderConfig) -> jax.Array:
    """float32[t, V] logits of hidden states [t, D]: float32 because log-prob sums over long rows need it."""
    if config.head != "language_model":
        raise ValueError(f"a model with head={config.head!r} has no language-model head")
    if config.tied_embedding:
        equation, weights = "tD,VD->tV", {"weight": params["embedding"]["weight"]}
    else:
        equation, weights = "tD,DV->tV", params["lm_head"]
    return layers.linear(equation, hidden, weights, dtype=jnp.float32)
