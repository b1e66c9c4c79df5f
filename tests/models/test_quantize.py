"""Weight-only int8 against rounding by hand, and how far it moves log-probs."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tba_jax.models import kv_cache
from tba_jax.models.config import DecoderConfig
from tests.support import applied
from tests.support.tiny_decoders import EVERYTHING, GEMMA

MODEL = DecoderConfig(
    layers=2, width=32, heads=4, kv_heads=2, head_size=8, ffn=48, vocab=40, max_positions=32, tied_embedding=False
)


def test_weights_are_rounded_per_output_channel():
    params = applied.random(applied.specs(MODEL), scale=0.15, seed=0)
    params["layers"]["feed_forward"]["gate"]["weight"][1, :, 3] = 0.0  # a channel without weights has no largest one
    quantized = jax.jit(functools.partial(applied.quantize, config=MODEL))(params)
    attention, feed_forward = quantized["layers"]["attention"], quantized["layers"]["feed_forward"]
    for name, inputs in {"query": (1,), "out": (1, 2), "gate": (1,), "down": (1,)}.items():
        found = (attention | feed_forward)[name]
        weight = (params["layers"]["attention"] | params["layers"]["feed_forward"])[name]["weight"]
        largest = np.abs(weight).max(axis=inputs, keepdims=True)
        scale = np.where(largest > 0, largest, 1) / 127
        assert found["weight"].dtype == jnp.int8 and found["weight"].shape == weight.shape
        assert found["quant_scale"].shape == np.squeeze(scale, inputs).shape
        restored = np.asarray(found["weight"], np.float32) * scale
        assert np.all(np.abs(restored - weight) <= scale / 2 * 1.001)
        np.testing.assert_allclose(np.squeeze(scale, inputs), found["quant_scale"], rtol=1e-6)
    assert quantized["lm_head"]["weight"].dtype == jnp.int8 and quantized["lm_head"]["quant_scale"].shape == (40,)
    for untouched in ("embedding", "final_norm"):
        jax.tree.map(np.testing.assert_array_equal, quantized[untouched], params[untouched])


@pytest.mark.parametrize("dtype, limit, family", [("bfloat16", 0.3, {}), ("float32", 0.1, GEMMA)])
def test_quantised_policies_stay_close_and_agree_on_both_paths(dtype, limit, family):
    config = dataclasses.replace(MODEL, compute_dtype=dtype, **family)
    params = applied.random(applied.specs(config), scale=0.15, seed=0)
    quantized = jax.jit(functools.partial(applied.quantize, config=config))(params)
    rng = np.random.default_rng(1)
    prompts, responses = rng.integers(0, 40, (4, 6)).astype(np.int32), rng.integers(0, 40, (4, 8)).astype(np.int32)
    lengths = np.full(4, 6, np.int32), np.full(4, 8, np.int32)
    score = jax.jit(
        functools.partial(applied.response_logprobs, R=8, config=config, space=EVERYTHING, logit_bytes=1 << 20, remat="none")
    )
    rows = np.concatenate([prompts, responses], axis=1), *lengths
    exact, found = score(params, *rows)[0], score(quantized, *rows)[0]
    assert 1e-4 < np.abs(found - exact).max() < limit
    prefill = jax.jit(lambda params: applied.prefill(kv_cache.unstack(params, config), prompts, lengths[0], config=config))
    logits, _ = prefill(quantized)
    first = jax.nn.log_softmax(logits)[np.arange(4), responses[:, 0]]
    np.testing.assert_allclose(first, found[:, 0], atol=1e-5 if dtype == "float32" else 0.05)
