"""Definitions of modules, the trees of arrays that stand for them elsewhere, and the head's weights in the log-prob kernel."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tba_jax.models import decoder, kv_cache, parameters, scoring
from tba_jax.models.policy import LoraConfig, Policy
from tests.support import applied
from tests.support.tiny_decoders import EVERYTHING, GROUPED


def test_a_definition_holds_no_weights_and_rebuilds_the_module():
    definition, again = decoder.define(GROUPED), decoder.define(GROUPED)
    assert definition.graphdef == again.graphdef and hash(definition.graphdef) == hash(again.graphdef)
    assert not jax.tree.leaves(definition.graphdef)
    params = applied.random(definition.specs, scale=0.3)
    jax.tree.map(np.testing.assert_array_equal, parameters.pure(parameters.module(definition.graphdef, params)), params)


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


def test_adapters_on_the_head_go_through_the_kernel():
    """In blocks, with gradients of the adapters, against the head with the adapters merged."""
    config = dataclasses.replace(GROUPED, tied_embedding=False)
    policy = Policy(model=config, lora=LoraConfig(rank=2, alpha=4.0, targets=("lm_head",)))
    base = applied.random(policy.model_specs, scale=0.3)
    adapters = applied.random(policy.trained_specs, scale=0.3, seed=1)
    rng = np.random.default_rng(2)
    hidden = rng.standard_normal((2, 6, config.width)).astype(np.float32)
    tokens = rng.integers(0, config.vocab, (2, 6)).astype(np.int32)

    def logprobs(adapters, merged: bool):
        plain = parameters.module(policy.base.graphdef, policy.merged(adapters, base))
        model = plain if merged else policy.for_training(adapters, base)
        found = scoring.token_logprobs(model, hidden, tokens, space=EVERYTHING, logit_bytes=4 * 2 * config.vocab * 2)[0]
        return found.sum(), found

    compute = jax.jit(jax.grad(logprobs, has_aux=True), static_argnums=1)
    for found, expected in zip(*(jax.tree.leaves(compute(adapters, merged)) for merged in (False, True)), strict=True):
        assert np.abs(expected).max() > 0.1
        np.testing.assert_allclose(found, expected, atol=1e-4 * max(1, np.abs(expected).max()))


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
