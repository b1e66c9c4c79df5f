"""Bidirectional post-norm encoders, by configuration: BERT and RoBERTa, with a sentence-embedding or a classification head.

Parameters are a nested dict of arrays (parameters.py), stacked over layers and scanned. Rows are padded on the right: BERT's
positions are indices in the row, and both classification heads read the first token. `check_rows` holds host arrays to it.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from tba_jax import mesh as mesh_lib
from tba_jax.models import layers, parameters
from tba_jax.models.parameters import Params, ParamSpec, Specs

HEADS = ("embedding", "classification")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    """Shape of an encoder. Letters of the axis table: L layers, N heads, H head_size, D width, F ffn, V vocab.

    architecture: the Hugging Face model_type whose names and config keys its checkpoints use, "bert" or "roberta"; what is
      computed is said by the other fields alone.
    max_positions: rows of the position table. position_offset: 0: a token's position is its index in the row (BERT); n > 0: the
      first real token has position n, the next n + 1, and padding n - 1 (RoBERTa: n is the padding token's id + 1).
    token_types: rows of the token-type table (BERT's segments).
    activation: a name of layers.ACTIVATIONS.
    head: "embedding": none, see `embed`; "classification": a linear map to `labels` of the pooled first token, see `classify`.
    labels: names of the classes, in the order of the logits; empty with an embedding head.
    pooler: a square linear map and tanh on the first token: BERT's pooler, the `classifier.dense` of RoBERTa. Classification
      needs it; the embedding does not read it.
    attention: kernel, see layers.attend.
    """

    architecture: str
    layers: int
    width: int
    heads: int
    head_size: int
    ffn: int
    vocab: int
    max_positions: int
    token_types: int
    norm_epsilon: float = 1e-12
    activation: str = "gelu"
    position_offset: int = 0
    head: str = "embedding"
    labels: tuple[str, ...] = ()
    pooler: bool = False
    compute_dtype: str = "float32"
    attention: str = "auto"

    def __post_init__(self):
        if self.head not in HEADS:
            raise ValueError(f"head={self.head!r} is not a head of an encoder; choose one of {', '.join(HEADS)}")
        if self.activation not in layers.ACTIVATIONS:
            raise ValueError(f"activation={self.activation!r} is unknown; choose one of {', '.join(layers.ACTIVATIONS)}")
        if self.head == "embedding" and self.labels:
            raise ValueError(f"labels={self.labels} need head='classification', not 'embedding'")
        if self.head == "classification" and not (self.labels and self.pooler):
            raise ValueError(f"head='classification' needs labels and pooler=True, got {self.labels} and {self.pooler}")
        if repeated := sorted({name for name in self.labels if self.labels.count(name) > 1}):
            raise ValueError(f"labels={self.labels} name {repeated} more than once")
        if self.position_limit < 1:
            raise ValueError(f"max_positions={self.max_positions} leaves no position at position_offset={self.position_offset}")

    @property
    def position_limit(self) -> int:
        """The most tokens a row can have."""
        return self.max_positions - self.position_offset


_STD = 0.02


def param_specs(config: EncoderConfig) -> Specs:
    """The table of all parameters. Weights of linear maps are [layers, inputs, outputs]."""
    c = config
    L, D, N, H, F, V = c.layers, c.width, c.heads, c.head_size, c.ffn, c.vocab

    def linear(inputs: dict[str, int], outputs: dict[str, int], stacked: dict[str, int]) -> Specs:
        weight, bias = stacked | inputs | outputs, stacked | outputs
        return {
            "weight": ParamSpec(shape=tuple(weight.values()), axes=tuple(weight), init_std=_STD, inputs=len(inputs)),
            "bias": ParamSpec(shape=tuple(bias.values()), axes=tuple(bias)),
        }

    def norm(stacked: dict[str, int]) -> Specs:
        shape, axes = (*stacked.values(), D), (*stacked, "embed")
        return {"scale": ParamSpec(shape=shape, axes=axes, init_mean=1.0), "bias": ParamSpec(shape=shape, axes=axes)}

    def table(rows: int, axis: str) -> Specs:
        return {"weight": ParamSpec(shape=(rows, D), axes=(axis, "embed"), init_std=_STD)}

    stack, width, heads = {"layers": L}, {"embed": D}, {"heads": N, "head": H}
    specs: Specs = {
        "embedding": table(V, "vocab"),
        "position_embedding": table(c.max_positions, "positions"),
        "token_type_embedding": table(c.token_types, "token_types"),
        "embedding_norm": norm({}),
        "layers": {
            "query": linear(width, heads, stack),
            "key": linear(width, heads, stack),
            "value": linear(width, heads, stack),
            "out": linear(heads, width, stack),
            "attention_norm": norm(stack),
            "up": linear(width, {"ffn": F}, stack),
            "down": linear({"ffn": F}, width, stack),
            "ffn_norm": norm(stack),
        },
    }
    # The head is a feed-forward of width F = D: two dimensions of one weight cannot both be "embed".
    if c.pooler:
        specs["pooler"] = linear(width, {"ffn": D}, {})
    if c.head == "classification":
        specs["classifier"] = linear({"ffn": D}, {"labels": len(c.labels)}, {})
    return specs


def param_shapes(config: EncoderConfig, dtype: str = "float32") -> Params:
    """See parameters.shapes."""
    return parameters.shapes(param_specs(config), dtype)


def param_shardings(config: EncoderConfig, mesh: Mesh) -> Params:
    """See parameters.shardings."""
    return parameters.shardings(param_specs(config), mesh)


def param_count(config: EncoderConfig) -> int:
    return parameters.count(param_specs(config))


def init_params(key: jax.Array, config: EncoderConfig) -> Params:
    """See parameters.init."""
    return parameters.init(key, param_specs(config))


def label_index(config: EncoderConfig, name: str) -> int:
    """The column of `classify`'s logits that belongs to the class `name`.

    Raises:
      ValueError: the encoder has no such label; names those it has.
    """
    if name not in config.labels:
        has = f"its labels are {', '.join(map(repr, config.labels))}" if config.labels else "it has no classification head"
        raise ValueError(f"the encoder has no label {name!r}: {has}")
    return config.labels.index(name)


def check_rows(tokens: np.ndarray, token_mask: np.ndarray, *, config: EncoderConfig) -> None:
    """Checks, on the host, what a jitted function cannot: call it on rows that come from elsewhere.

    Args: see hidden_states.

    Raises:
      ValueError: a row is longer than the encoder's positions, has no real token or padding before a real one, or a token
        that is not in the vocabulary. Names the row and the number.
    """
    chex.assert_equal_shape([tokens, token_mask])
    _check_length(tokens.shape, config)
    for row in np.flatnonzero(~token_mask[:, 0])[:1]:
        what = "has padding before a real token; pad on the right" if token_mask[row].any() else "has no real token"
        raise ValueError(f"row {row} {what}")
    for row in np.flatnonzero((token_mask[:, 1:] & ~token_mask[:, :-1]).any(axis=1))[:1]:
        raise ValueError(f"row {row} has padding before a real token; pad on the right")
    for row, column in np.argwhere((tokens < 0) | (tokens >= config.vocab))[:1]:
        raise ValueError(f"row {row} holds token {tokens[row, column]}, the encoder's vocabulary has {config.vocab}")


def _check_length(shape: Sequence[int], config: EncoderConfig) -> None:
    if shape[1] > config.position_limit:
        raise ValueError(
            f"rows of {shape[1]} tokens are longer than the {config.position_limit} positions of the encoder: truncate the texts"
        )


def positions_and_mask(token_mask: jax.Array, *, config: EncoderConfig) -> tuple[jax.Array, jax.Array]:
    """Positions and attention mask of right-padded rows.

    Args:
      token_mask: bool[B, T], true on real tokens.

    Returns:
      positions int32[B, T]; mask bool[B, 1, T, T] (query, key): every query attends to the real tokens. A row without any
      attends to its padding, so that no row of the softmax is empty.
    """
    B, T = token_mask.shape
    positions = jnp.broadcast_to(jnp.arange(T), (B, T))
    if config.position_offset:
        positions = jnp.cumsum(token_mask, axis=1) * token_mask + config.position_offset - 1
    keys = token_mask | ~jnp.any(token_mask, axis=1, keepdims=True)
    return positions, jnp.broadcast_to(keys[:, None, None, :], (B, 1, T, T))


def _layer(x: jax.Array, layer: Params, attend: Any, config: EncoderConfig) -> jax.Array:
    """One layer on flat tokens x [t, D]. attend(query, key, value) -> [t, N, H]."""
    query, key, value = (layers.linear("tD,DNH->tNH", x, layer[name]) for name in ("query", "key", "value"))
    attention_out = layers.linear("tNH,NHD->tD", attend(query, key, value), layer["out"])
    x = layers.norm(x + attention_out, layer["attention_norm"], config.norm_epsilon, "layer")
    inner = layers.ACTIVATIONS[config.activation](layers.linear("tD,DF->tF", x, layer["up"]))
    ffn_out = layers.linear("tF,FD->tD", inner, layer["down"])
    return layers.norm(x + ffn_out, layer["ffn_norm"], config.norm_epsilon, "layer")


@layers.full_precision
def hidden_states(
    params: Params,
    tokens: jax.Array,
    token_mask: jax.Array,
    *,
    config: EncoderConfig,
    token_types: jax.Array | None = None,
) -> jax.Array:
    """Hidden states after the last layer.

    Args:
      params: float32 parameters, see param_specs; cast inside.
      tokens: int32[B, T], padded on the right with any token of the vocabulary.
      token_mask: bool[B, T], true on real tokens.
      token_types: int32[B, T], the segment of each token; None: all 0.

    Returns:
      compute_dtype[B, T, D]; what stands at padding is not to be used.

    Raises:
      ValueError: T is more than the encoder's positions.
    """
    chex.assert_rank([tokens, token_mask], 2)
    chex.assert_equal_shape([tokens, token_mask] if token_types is None else [tokens, token_mask, token_types])
    _check_length(tokens.shape, config)
    B, T = tokens.shape
    params = parameters.cast(params, config.compute_dtype)
    positions, mask = positions_and_mask(token_mask, config=config)

    def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        query, key, value = (x.reshape(B, T, *x.shape[1:]) for x in (query, key, value))
        attended = layers.attend(query, key, value, mask, causal=False, kernel=config.attention)
        return attended.reshape(B * T, *attended.shape[2:])

    def layer_step(x: jax.Array, layer: Params) -> tuple[jax.Array, None]:
        return _layer(x, layer, attend, config), None

    segments = jnp.zeros_like(tokens) if token_types is None else token_types
    x = mesh_lib.constrain(params["embedding"]["weight"], "VD")[tokens.reshape(-1)]
    x = x + params["position_embedding"]["weight"][positions.reshape(-1)]
    x = x + params["token_type_embedding"]["weight"][segments.reshape(-1)]
    x = layers.norm(mesh_lib.constrain(x, "tD"), params["embedding_norm"], config.norm_epsilon, "layer")
    x, _ = jax.lax.scan(layer_step, x, params["layers"])
    return x.reshape(B, T, -1)


@layers.full_precision
def classify(
    params: Params,
    tokens: jax.Array,
    token_mask: jax.Array,
    *,
    config: EncoderConfig,
    token_types: jax.Array | None = None,
) -> jax.Array:
    """float32[B, labels]: logits of the classes, in the order of config.labels; label_index finds one by name.

    Args: see hidden_states.

    Raises:
      ValueError: the encoder has no classification head.
    """
    if config.head != "classification":
        raise ValueError(f"an encoder with head={config.head!r} does not classify")
    hidden = hidden_states(params, tokens, token_mask, config=config, token_types=token_types)
    # logits = W₂ tanh(W₁ h₀ + b₁) + b₂, in float32: one small product a row, and the reward reads it.
    pooled = jnp.tanh(layers.linear("BD,DF->BF", hidden[:, 0].astype(jnp.float32), params["pooler"]))
    head = params["classifier"]
    return pooled @ head["weight"].astype(jnp.float32) + head["bias"].astype(jnp.float32)


@layers.full_precision
def embed(
    params: Params,
    tokens: jax.Array,
    token_mask: jax.Array,
    *,
    config: EncoderConfig,
    token_types: jax.Array | None = None,
) -> jax.Array:
    """float32[B, D]: sentence embeddings of length 1, so that their dot products are cosine similarities.

    The mean of the hidden states over real tokens, special tokens included, then L2-normalised: Reimers and Gurevych, 2019
    (arXiv:1908.10084, section 3, MEAN) and the convention of the published MiniLM models. A row without real tokens gives 0.

    Args: see hidden_states.
    """
    hidden = hidden_states(params, tokens, token_mask, config=config, token_types=token_types).astype(jnp.float32)
    weights = token_mask[:, :, None].astype(jnp.float32)
    # e = m / |m|, m = Σ_t h_t / number of real tokens; the floors are those of the published code.
    mean = jnp.sum(hidden * weights, axis=1) / jnp.maximum(jnp.sum(weights, axis=1), 1e-9)
    return mean * jax.lax.rsqrt(jnp.maximum(jnp.sum(mean * mean, axis=-1, keepdims=True), 1e-24))
