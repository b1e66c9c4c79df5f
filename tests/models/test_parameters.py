"""Definitions of modules, the trees of arrays that stand for them elsewhere, gradients of the head, and rounded weights."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tba_jax.models import decoder, kv_cache, parameters
from tests.support import applied
from tests.support.tiny_decoders import EVERYTHING, GEMMA, GROUPED, logits_of_whole


def test_gradients_of_the_head_are_summed_over_blocks_in_float32():
    """96 blocks of a bfloat16 model: summed in bfloat16 they would be off by more than a hundredth of the largest."""
    config = dataclasses.replace(GROUPED, compute_dtype="bfloat16")
    rng, B, R, V = np.random.default_rng(0), 2, 96, config.vocab
    table = (0.3 * rng.standard_normal((V, config.width))).astype(np.float32)
    hidden = rng.standard_normal((B, R, config.width)).astype(config.compute_dtype)
    tokens = rng.integers(0, V, (B, R)).astype(np.int32)

    def loss(table, steps: int):
        settings = dict(config=config, space=EVERYTHING, logit_bytes=4 * B * V * steps)
        return applied.token_logprobs(applied.with_table(table, config), hidden, tokens, **settings)[0].sum()

    gradient = jax.grad(loss)
    whole, blocks = (jax.jit(gradient, static_argnums=1)(table, steps) for steps in (R, 1))
    assert whole.dtype == jnp.float32
    np.testing.assert_allclose(blocks, whole, atol=1e-5 * np.abs(whole).max())
    program = str(jax.make_jaxpr(gradient, static_argnums=1)(table, 1))
    assert program.count(f"bf16[{V},{config.width}] = convert_element_type") == 1  # the head is cast before the loop over blocks


def test_parameters_of_other_keys_are_refused():
    """nnx.merge counts leaves, and takes them in the order of their keys."""
    config = dataclasses.replace(GROUPED, layers=12)
    definition, unstacked = decoder.define(config), kv_cache.define(config)
    params = applied.random(definition.specs, scale=0.3)
    renamed = params | {"last_norm": params["final_norm"]}
    del renamed["final_norm"]
    with pytest.raises(ValueError, match=r"not those of the Decoder: \['final_norm'\]\['scale'\] is missing or unknown"):
        parameters.module(definition.graphdef, renamed)
    # Texts in the place of numbers: "10" comes before "2".
    texts = parameters.cast(kv_cache.unstack(params, config), "float32")
    with pytest.raises(ValueError, match="not those of the Decoder"):
        parameters.module(unstacked.graphdef, texts)


def test_weights_are_rounded_per_output_channel():
    config = dataclasses.replace(GROUPED, tied_embedding=False, **GEMMA)
    params = applied.random(applied.specs(config), scale=0.15, seed=0)
    params["layers"]["feed_forward"]["gate"]["weight"][1, :, 3] = 0.0  # a channel without weights has no largest one
    quantized = jax.jit(functools.partial(applied.quantize, config=config))(params)
    rounded = parameters.flatten(quantized)
    restored = dict(parameters.flatten(params))
    for name in [name for name in rounded if name.endswith(".quant_scale")]:
        weight_name = name.replace("quant_scale", "weight")
        weight, integers, scale = restored[weight_name], np.asarray(rounded[weight_name]), np.asarray(rounded[name])
        first = weight.ndim - scale.ndim  # axes of inputs, which come after that of the stack
        axes = tuple(range(1, 1 + first)) if name.startswith("layers.") else tuple(range(first))
        largest = np.abs(weight).max(axis=axes)
        np.testing.assert_allclose(scale, np.where(largest > 0, largest, 1) / 127, rtol=1e-6)
        restored[weight_name] = integers * np.expand_dims(scale, axes)
        assert integers.dtype == np.int8
        assert np.all(np.abs(restored[weight_name] - weight) <= np.expand_dims(scale, axes) / 2 * 1.001)
    assert sum(name.endswith(".quant_scale") for name in rounded) == 8  # all linear maps, and neither embedding nor norms
    tokens = np.arange(12, dtype=np.int32).reshape(2, 6)
    found, expected = (logits_of_whole(of, tokens, config) for of in (quantized, parameters.unflatten(restored)))
    np.testing.assert_allclose(found, expected, atol=1e-4)
