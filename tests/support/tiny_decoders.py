"""Small decoders of every kind, with parameters that all matter."""

import dataclasses
import functools

import jax

from tba_jax.models import parameters, scoring
from tba_jax.models.config import GPT_OSS, DecoderConfig, RopeScaling
from tba_jax.models.parameters import Params
from tests.support import applied

# What Gemma 3 does otherwise, with a window that is shorter than rows.
GEMMA = dict(norm="offset_rms", norm_place="both", qk_norm="head", scaled_embedding=True, query_scalar=20)
GEMMA |= dict(activation="gelu_tanh", layer_pattern="lg", window=3, local_rope_theta=50.0)
# What GPT-NeoX does otherwise.
NEOX = dict(kv_heads=4, norm="layer", rotary_size=2, parallel_residual=True, activation="gelu", gated=False)
NEOX |= dict(qkv_bias=True, out_bias=True, ffn_bias=True)
# What GPT-2 does otherwise.
GPT2 = dict(kv_heads=4, norm="layer", positions="learned", activation="gelu_tanh", gated=False, qkv_bias=True)
SCALING = RopeScaling(factor=4.0, low_frequency=1.0, high_frequency=4.0, original_positions=16)
GROUPED = DecoderConfig(layers=2, width=32, heads=4, kv_heads=2, head_size=8, ffn=48, vocab=40, max_positions=64)
CONFIGS = {
    "grouped, tied": GROUPED,
    "multi-head, untied": dataclasses.replace(GROUPED, kv_heads=4, tied_embedding=False, rope_theta=500.0),
    "parallel residual, partial rotary": dataclasses.replace(GROUPED, **NEOX),
    "learned positions": dataclasses.replace(GROUPED, **GPT2),
    "query and key norms": dataclasses.replace(GROUPED, qk_norm="head"),
    "norms after": dataclasses.replace(GROUPED, norm_place="after", qk_norm="token"),
    "local and global layers": dataclasses.replace(GROUPED, layers=3, **GEMMA),
    "scaled rotary": dataclasses.replace(GROUPED, rope_scaling=SCALING),
    "gpt-oss": dataclasses.replace(
        GROUPED,
        **GPT_OSS | dict(window=3, rope_theta=50.0, rope_scaling=dataclasses.replace(SCALING, yarn=True)),
        **dict(experts=6, experts_per_token=2, ffn=12),
    ),
    "experts": dataclasses.replace(GROUPED, qk_norm="head", experts=6, experts_per_token=2, norm_top_k=True, ffn=12),
}
EVERYTHING = scoring.ResponseSpace(temperature=1.0, banned_tokens=(), eos_id=-1)


def random_params(config: DecoderConfig) -> Params:
    """Parameters large enough that attention is far from uniform, norms away from 1, biases from 0."""
    drawn = parameters.flatten(applied.random(applied.specs(config), scale=0.25, seed=0))
    if config.norm == "offset_rms":
        drawn = {name: leaf - 1 if name.endswith(".scale") else leaf for name, leaf in drawn.items()}
    return parameters.unflatten(drawn)


@functools.partial(jax.jit, static_argnames="config")
def logits_of_whole(params: Params, tokens: jax.Array, config: DecoderConfig) -> jax.Array:
    hidden = applied.hidden_states(params, tokens, config=config, remat="none")
    return applied.logits_of(params, hidden.reshape(-1, config.width), config=config).reshape(*tokens.shape, -1)
