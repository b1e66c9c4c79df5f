"""Low-rank adapters against the same update written into the weights, in NumPy, and what of a policy is then trained."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tba_jax import sharding
from tba_jax.models import parameters, scoring
from tba_jax.models import policy as lora_lib
from tba_jax.models.config import DecoderConfig
from tba_jax.models.decoder import Decoder
from tba_jax.models.policy import Policy
from tests.support import applied
from tests.support.tiny_decoders import EVERYTHING, GEMMA

MODEL = DecoderConfig(
    layers=2, width=16, heads=4, kv_heads=2, head_size=4, ffn=24, vocab=12, max_positions=16, tied_embedding=False, qkv_bias=True
)
ALL = lora_lib.LoraConfig(rank=3, alpha=6.0, targets=("layers.*", "lm_head"))
TOKENS = np.random.default_rng(5).integers(0, 12, (2, 9)).astype(np.int32)


def random_tree(specs: parameters.Specs, seed: int) -> parameters.Params:
    return applied.random(specs, scale=0.3, seed=seed)


POLICY = Policy(model=MODEL, lora=ALL)
BASE, ADAPTERS = random_tree(POLICY.model_specs, 0), random_tree(POLICY.trained_specs, 1)


def logits_of(model: Decoder) -> jax.Array:
    return model.head()(model(TOKENS, remat="full").reshape(-1, MODEL.width))


@jax.jit
def logits(params: parameters.Params) -> jax.Array:
    return logits_of(applied.merge(params, MODEL))


def update_by_hand(base: parameters.Params, adapters: parameters.Params, lora: lora_lib.LoraConfig) -> parameters.Params:
    """W + (alpha / rank) A B by loops over layers, float64."""
    flat, low = parameters.flatten(base), parameters.flatten(adapters)
    for name in [name for name in low if name.endswith("lora_a")]:
        a, b = low[name].astype(np.float64), low[name.replace("lora_a", "lora_b")].astype(np.float64)
        weight = name.replace("lora_a", "weight")
        if not name.startswith("layers."):
            a, b = a[None], b[None]
        updates = [np.tensordot(one_a, one_b, axes=(-1, 0)) for one_a, one_b in zip(a, b, strict=True)]
        update = np.stack(updates).reshape(flat[weight].shape)
        flat[weight] = (flat[weight] + lora.alpha / lora.rank * update).astype(np.float32)
    return parameters.unflatten(flat)


@pytest.mark.parametrize("targets", [("layers.*", "lm_head"), ("layers.attention.query", "layers.attention.v*")], ids=str)
def test_attached_and_merged_adapters_equal_the_update_by_hand(targets):
    policy = Policy(model=MODEL, lora=dataclasses.replace(ALL, targets=targets))
    base, adapters = random_tree(policy.model_specs, 0), random_tree(policy.trained_specs, 1)
    expected_params = update_by_hand(base, adapters, policy.lora)
    merged = jax.jit(functools.partial(policy.for_sampling, weights="full"))(adapters, base)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-5), merged, expected_params)
    expected = logits(expected_params)
    assert np.abs(expected - logits(base)).max() > 0.1
    np.testing.assert_allclose(logits(merged), expected, atol=2e-5)
    attached = jax.jit(lambda a: logits_of(policy.for_training(a, base)))
    np.testing.assert_allclose(attached(adapters), expected, atol=2e-5)
    names = {name.rpartition(".")[0] for name in parameters.flatten(policy.trained_specs)}
    assert names == {name for name in LINEARS if any(name.startswith(t.rstrip("*")) for t in targets)}


LINEARS = {f"layers.attention.{name}" for name in ("query", "key", "value", "out")} | {"lm_head"}
LINEARS |= {f"layers.feed_forward.{name}" for name in ("gate", "up", "down")}


def test_a_run_starts_from_its_base():
    """Adapters begin as PEFT's, by Kaiming's uniform initialiser at a = √5: A in ±1/√fan_in, and B 0."""
    drawn = jax.jit(POLICY.initial)(BASE, jax.random.key(0))
    np.testing.assert_array_equal(jax.jit(lambda a: logits_of(POLICY.for_training(a, BASE)))(drawn), logits(BASE))
    adapters = parameters.flatten(drawn)
    for name in (name for name in adapters if name.endswith("lora_a")):
        a = np.asarray(adapters[name], np.float64)
        fan_in = np.prod(a.shape[name.startswith("layers.") : -1])
        assert np.abs(a).max() <= fan_in**-0.5 < 1.1 * np.abs(a).max()
        np.testing.assert_allclose(a.std(), (3 * fan_in) ** -0.5, rtol=0.15)
        assert not np.any(adapters[name.replace("lora_a", "lora_b")])
    assert Policy(model=MODEL).initial(BASE, jax.random.key(0)) is BASE


def test_a_merge_with_bfloat16_weights_keeps_small_updates():
    policy = Policy(model=dataclasses.replace(MODEL, compute_dtype="bfloat16"), lora=ALL)
    rounded, small = jax.tree.map(lambda x: x.astype(jnp.bfloat16), BASE), jax.tree.map(lambda x: x / 40, ADAPTERS)
    assert policy.snapshot_dtype == "float32" and Policy(model=policy.model).snapshot_dtype == "bfloat16"
    found = jax.jit(functools.partial(policy.for_sampling, weights="full"))(small, rounded)
    expected = update_by_hand(jax.tree.map(np.float32, rounded), small, ALL)
    nearest = jax.tree.map(lambda x: x.astype(jnp.bfloat16), expected)
    for name, leaf in parameters.flatten(found).items():
        assert leaf.dtype == jnp.bfloat16
        same = np.mean(np.asarray(leaf) == np.asarray(parameters.flatten(nearest)[name]))
        assert same > 0.99, (name, same)  # float32 and float64 sums may round to neighbours
    assert (found["layers"]["feed_forward"]["up"]["weight"] != rounded["layers"]["feed_forward"]["up"]["weight"]).mean() > 0.1


def test_gradients_are_those_of_the_merged_weights():
    policy = Policy(model=dataclasses.replace(MODEL, **GEMMA), lora=ALL)
    base, adapters = random_tree(policy.model_specs, 0), random_tree(policy.trained_specs, 1)

    def loss(adapters, merged: bool):
        plain = applied.merge(policy.for_sampling(adapters, base, "full"), policy.model)
        model = plain if merged else policy.for_training(adapters, base)
        settings = dict(space=EVERYTHING, logit_bytes=4 * 2 * 12 * 4)
        return jnp.mean(jnp.sin(scoring.token_logprobs(model, model(TOKENS), TOKENS, **settings)[0]))

    found, expected = (jax.jit(jax.grad(loss), static_argnums=1)(adapters, merged) for merged in (False, True))
    # Logits are as large as 10 here: float32 rounds their sums by some 1e-6 of that, and gradients by as much of theirs, on some
    # processors up to 1.4e-5. A wrong scale or transposed factor is off by as much as the gradients are, which reach 1.
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=3e-5, rtol=3e-5), found, expected)


def test_meshes_give_what_one_device_gives():
    mesh = sharding.make_mesh((2, 2, 2), setting="learner.mesh")
    sharded = jax.device_put(ADAPTERS, POLICY.trained_shardings(mesh)), jax.device_put(BASE, POLICY.model_shardings(mesh))
    compute = jax.jit(lambda adapters, base: logits_of(POLICY.for_training(adapters, base)))
    np.testing.assert_allclose(sharding.on_mesh(mesh, compute)(*sharded), compute(ADAPTERS, BASE), atol=1e-5)


def test_a_target_that_the_model_does_not_have_is_named():
    policy = Policy(model=MODEL, lora=dataclasses.replace(ALL, targets=("layers.attention.query", "layers.embedding")))
    with pytest.raises(ValueError, match=r"lora.targets: 'layers.embedding' matches no linear map .*'layers.feed_forward.down'"):
        _ = policy.trained_specs
