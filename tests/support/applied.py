"""Models as functions of their parameters: each rebuilds the module from its definition, as a traced function does."""

import functools
from typing import Any

import jax
import numpy as np
from flax import nnx

from tba_jax.models import decoder, kv_cache, parameters, scoring
from tba_jax.models.config import DecoderConfig, EncoderConfig
from tba_jax.models.hugging_face import encoders
from tba_jax.models.parameters import Params, Specs


@functools.cache
def define(config: DecoderConfig | EncoderConfig) -> parameters.Definition[Any]:
    return encoders.define(config) if isinstance(config, EncoderConfig) else decoder.define(config)


def merge(params: Params, config: DecoderConfig | EncoderConfig) -> Any:
    """The module; its linear maps are int8 where the parameters are."""
    rounded = _weights(params) == "int8"
    return parameters.module(_sampling(config, "int8", False) if rounded else define(config).graphdef, params)


@functools.cache
def _sampling(config: DecoderConfig, weights: str, unstacked: bool) -> nnx.GraphDef:
    return kv_cache.define(config, weights, unstacked=unstacked).graphdef


def _weights(params: Params) -> str:
    """How the linear maps are rounded that the parameters are of."""
    return "int8" if any(name.endswith("quant_scale") for name in parameters.flatten(params)) else "full"


def unstacked(params: Params, config: DecoderConfig) -> decoder.Decoder:
    return parameters.module(_sampling(config, _weights(params), True), params)


def specs(config: DecoderConfig | EncoderConfig) -> Specs:
    return define(config).specs


def shardings(config: DecoderConfig | EncoderConfig, mesh: jax.sharding.Mesh) -> Params:
    return define(config).shardings(mesh)


def count(config: DecoderConfig | EncoderConfig) -> int:
    return parameters.count(specs(config))


def init(key: jax.Array, config: DecoderConfig | EncoderConfig) -> Params:
    return define(config).init(key)


def random(specs: Specs, *, scale: float, seed: int | list[int] = 0) -> Params:
    """NumPy arrays far enough from how training begins that every parameter matters: norms' scales lie around 1."""
    rng = np.random.default_rng(seed)
    return parameters.map_specs(
        lambda name, spec: (float(name.endswith(".scale")) + scale * rng.standard_normal(spec.shape)).astype(np.float32), specs
    )


def hidden_states(params: Params, tokens: Any, *, config: DecoderConfig, remat: str = "none") -> jax.Array:
    return merge(params, config)(tokens, remat=remat)


def logits_of(params: Params, hidden: Any, *, config: DecoderConfig) -> jax.Array:
    return merge(params, config).head()(hidden)


def response_logprobs(params: Params, *rows: Any, config: DecoderConfig, **settings: Any) -> tuple[jax.Array, jax.Array]:
    return scoring.response_logprobs(merge(params, config), *rows, **settings)


def with_table(weight: Any, config: DecoderConfig) -> Params:
    """Parameters of a decoder with tied embeddings, of which nothing but the embedding is read; the others are 0."""
    zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), parameters.shapes(specs(config)))
    return zeros | {"embedding": {"weight": weight}}


def token_logprobs(params: Params, hidden: Any, tokens: Any, *, config: DecoderConfig, **settings: Any) -> Any:
    return scoring.token_logprobs(merge(params, config), hidden, tokens, **settings)


def sequence_scores(params: Params, tokens: Any, length: Any, *, config: DecoderConfig, remat: str = "none") -> jax.Array:
    return scoring.sequence_scores(merge(params, config), tokens, length, remat=remat)


def prefill(params: Params, tokens: Any, length: Any, *, config: DecoderConfig) -> Any:
    return kv_cache.prefill(unstacked(params, config), tokens, length)


def decode_step(params: Params, *step: Any, config: DecoderConfig, tiled: bool = False) -> Any:
    return kv_cache.decode_step(unstacked(params, config), *step, tiled=tiled)


def quantize(params: Params, config: DecoderConfig) -> Params:
    model = merge(params, config)
    kv_cache.quantize(model)
    return parameters.pure(model)
