"""The decoder on meshes, in blocks and with rematerialisation, and scoring against a NumPy loop over its logits."""

import dataclasses
import functools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tba_jax import sharding
from tba_jax.models import kv_cache, parameters, scoring
from tba_jax.models.config import PRESETS, DecoderConfig
from tests.support import applied
from tests.support.tiny_checkpoints import FIXTURES
from tests.support.tiny_decoders import CONFIGS, EVERYTHING, GROUPED, logits_of_whole, random_params

PAD = 0


def random_rows(B: int, P: int, R: int, vocab: int, seed: int = 0) -> tuple[np.ndarray, ...]:
    """tokens, prompt_length, response_length of random rows; the first two are full and shortest."""
    rng = np.random.default_rng(seed)
    prompt_length, response_length = rng.integers(1, P + 1, B), rng.integers(1, R + 1, B)
    prompt_length[:2], response_length[:2] = (P, 1), (R, 1)
    tokens = rng.integers(1, vocab, (B, P + R))
    tokens[np.arange(P + R) >= (prompt_length + response_length)[:, None]] = PAD
    return tokens.astype(np.int32), prompt_length.astype(np.int32), response_length.astype(np.int32)


# Of the logits of 16 rows at one time step.
BYTES_PER_STEP = 16 * GROUPED.vocab * 4


def numpy_scores(params, rows, config, temperature: float, banned: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Log-probs and entropies by a loop over rows (each alone, without padding) and tokens, float64."""
    tokens, prompt_length, response_length = rows
    logprobs, entropies = np.zeros((2, len(tokens), response_length.max()))
    allowed = np.array([v for v in range(config.vocab) if v not in banned])
    for b, (n, m) in enumerate(zip(prompt_length, response_length, strict=True)):
        logits = np.asarray(logits_of_whole(params, tokens[b : b + 1, : n + m], config), np.float64)[0]
        for t in range(m):
            weights = np.exp(logits[n - 1 + t, allowed] / temperature)
            probabilities = weights / weights.sum()
            logprobs[b, t] = np.log(probabilities[list(allowed).index(tokens[b, n + t])])
            entropies[b, t] = -(probabilities * np.log(probabilities)).sum()
    return logprobs, entropies


def score_and_gradient(params, rows, *, logit_bytes: int, remat: str, config=GROUPED):
    space = scoring.ResponseSpace(temperature=0.9, banned_tokens=(PAD,), eos_id=-1)

    def loss(p, *rows):
        settings = dict(R=7, config=config, space=space, logit_bytes=logit_bytes, remat=remat)
        logprobs, entropy = applied.response_logprobs(p, *rows, **settings)
        weights = jnp.sin(jnp.arange(logprobs.size, dtype=jnp.float32)).reshape(logprobs.shape)
        return (weights * logprobs).mean(), (logprobs, entropy)

    (_, scores), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(params, *rows)
    return scores, gradient


@pytest.fixture(scope="module")
def one_device() -> tuple:
    """Parameters, 16 rows, and their scores and gradients on one device, all logits at once."""
    params, rows = random_params(GROUPED), random_rows(16, 5, 7, 40)
    return params, rows, score_and_gradient(params, rows, logit_bytes=1 << 20, remat="none")


def test_response_logprobs_equal_a_numpy_loop(one_device):
    params, rows, (scores, _) = one_device
    expected = numpy_scores(params, [column[:6] for column in rows], GROUPED, 0.9, (PAD,))
    for found, each in zip(scores, expected, strict=True):
        np.testing.assert_allclose(found[:6], each, atol=1e-5)


@pytest.mark.parametrize("steps, remat", [(0, "dots"), (3, "full")])  # 3 does not divide 7; 0: one all the same
def test_blocks_and_remat_change_no_scores_and_no_gradients(one_device, steps, remat):
    params, rows, expected = one_device
    found = score_and_gradient(params, rows, logit_bytes=max(steps * BYTES_PER_STEP, 1), remat=remat)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(found))  # padding is a banned token in masked positions
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-5), found, expected)


def test_logits_are_never_there_all_at_once():
    B, R, D, V = 16, 1024, 64, 50_000
    config = DecoderConfig(layers=1, width=D, heads=1, kv_heads=1, head_size=D, ffn=D, vocab=V, max_positions=R)
    shapes = [jax.ShapeDtypeStruct(*each) for each in (((V, D), jnp.float32), ((B, R, D), jnp.float32), ((B, R), jnp.int32))]

    def blocked(weight, hidden, tokens):
        settings = dict(config=config, space=EVERYTHING, logit_bytes=128 << 20)
        return applied.token_logprobs(applied.with_table(weight, config), hidden, tokens, **settings)[0].sum()

    program = jax.jit(jax.grad(blocked, argnums=(0, 1))).lower(*shapes).compile()
    assert program.memory_analysis().temp_size_in_bytes < B * R * V * 4 / 5


def test_blocks_that_are_not_used_are_skipped_and_none_keeps_the_head():
    B, R, D, V, used = 2, 64, 48, 5_000, 37
    config = DecoderConfig(layers=1, width=D, heads=1, kv_heads=1, head_size=D, ffn=D, vocab=V, max_positions=R)
    rng = np.random.default_rng(0)
    weight, hidden = (rng.standard_normal(shape).astype(np.float32) for shape in ((V, D), (B, R, D)))
    tokens, counted = rng.integers(0, V, (B, R)).astype(np.int32), np.arange(R) < used
    skipped = np.where(np.arange(R)[:, None] < 40, hidden, np.nan)

    def loss(weight, hidden, used, steps):
        settings = dict(config=config, space=EVERYTHING, logit_bytes=4 * B * V * steps)
        logprobs, entropy = applied.token_logprobs(applied.with_table(weight, config), hidden, tokens, used=used, **settings)
        return jnp.sum(jnp.where(counted, jnp.sin(logprobs), 0.0)), jnp.where(counted, entropy, 0.0)

    value = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True), static_argnums=3)
    blocks, whole = value(weight, skipped, used, 4), value(weight, hidden, used, R)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4, rtol=1e-4), blocks, whole)
    # 16 blocks; the weight is there as it is, cast, and as its gradient.
    program = value.lower(weight, hidden, used, 4).compile()
    assert program.memory_analysis().temp_size_in_bytes < 4 * weight.nbytes


@pytest.mark.parametrize(
    "name, kernel",
    [
        ("parallel residual, partial rotary", "xla"),
        ("norms after", "xla"),
        ("local and global layers", "splash"),
        ("gpt-oss", "xla"),
    ],
)
def test_meshes_give_the_loss_and_gradients_of_one_device(name, kernel):
    """The tensor axis does not divide the vocabulary, which therefore stays whole."""
    config = dataclasses.replace(CONFIGS[name], tied_embedding=False, vocab=41, layers=2 if CONFIGS[name].window else 1)
    params, rows = random_params(config), random_rows(16, 5, 7, 40)
    settings = dict(logit_bytes=3 * BYTES_PER_STEP, remat="full", config=config)
    expected = score_and_gradient(params, rows, **settings)
    mesh = sharding.make_mesh((2, 2, 2), setting="trainer.mesh")  # data, fsdp, tensor
    with jax.set_mesh(mesh):
        sharded = jax.device_put(params, applied.shardings(config, mesh))
        settings["config"] = dataclasses.replace(config, attention=kernel)
        found = score_and_gradient(sharded, sharding.put_rows(mesh, rows), **settings)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-5), found, expected)


def gathered(sizes: tuple[int, int, int], *, differentiate: bool, config: DecoderConfig = GROUPED) -> list[tuple[int, ...]]:
    """The shapes of all arrays that scoring of 16 rows exchanges between the devices of a mesh, but for sums of results."""
    mesh = sharding.make_mesh(sizes, setting="trainer.mesh")
    settings = dict(R=7, config=config, space=EVERYTHING, logit_bytes=2 * BYTES_PER_STEP, remat="full")
    params = jax.device_put(random_params(config), applied.shardings(config, mesh))

    def score(params, *rows):
        return applied.response_logprobs(params, *rows, **settings)[0].sum()

    with jax.set_mesh(mesh):
        traced = jax.jit(jax.grad(score) if differentiate else score)
        program = traced.lower(params, *sharding.put_rows(mesh, random_rows(16, 5, 7, 40))).compile().as_text()
    found = re.findall(r"= \w+\[([\d,]*)\]\S* (?:all-to-all|all-gather|collective-permute)\(", program)
    return [tuple(map(int, shape.split(","))) for shape in found]


def test_devices_gather_weights_and_never_rows():
    """Under fully-sharded data parallelism a device computes with whole weights and its own rows, not the other way round."""
    assert not gathered((8, 1, 1), differentiate=False)
    shapes = gathered((2, 2, 2), differentiate=True)
    assert shapes and not [shape for shape in shapes if {16, 16 * (5 + 7 - 1)} & set(shape)], shapes


def test_presets_have_the_published_sizes():
    """Parameters of the published checkpoints: a tied embedding is counted once, and the vision model of Gemma 3 is left out."""
    published = json.loads((FIXTURES / "published_parameters.json").read_text())
    assert {name: applied.count(config) for name, config in PRESETS.items()} == published


def test_init_of_the_layers_does_not_depend_on_the_head():
    both = [applied.define(dataclasses.replace(GROUPED, **changes)) for changes in ({}, dict(tied_embedding=False, vocab=41))]
    tied, untied = (jax.jit(made.init)(jax.random.key(3))["layers"]["feed_forward"] for made in both)
    jax.tree.map(np.testing.assert_array_equal, tied, untied)
    assert not (tied["up"]["weight"] == tied["gate"]["weight"]).any()
    np.testing.assert_allclose(np.std(tied["up"]["weight"]), 0.02, rtol=0.05)
    np.testing.assert_allclose(np.std(tied["down"]["weight"]), 0.02 / np.sqrt(4), rtol=0.05)


@pytest.mark.parametrize(
    "changes, sentence",
    [
        (dict(kv_heads=3), r"model\.heads=4 is not divisible by model\.kv_heads=3"),
        (dict(head_size=7), r"model\.head_size=7 must be even"),
        (dict(layer_pattern="lg", window=0), "layer_pattern='lg' does not go with window=0"),
        (dict(layer_pattern="lx", window=4), "layer_pattern='lx' does not go with window=4"),
    ],
    ids=str,
)
def test_impossible_shapes_name_the_settings(changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        dataclasses.replace(GROUPED, **changes)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_float32_products_ask_for_full_precision(dtype):
    config = dataclasses.replace(GROUPED, compute_dtype=dtype)
    whole = parameters.shapes(applied.specs(config))
    params = jax.eval_shape(functools.partial(kv_cache.unstack, config=config), whole)
    tokens, index = jax.ShapeDtypeStruct((2, 5), jnp.int32), jax.ShapeDtypeStruct((2,), jnp.int32)
    prefill = functools.partial(applied.prefill, config=config)
    _, cache = jax.eval_shape(prefill, params, tokens, index)
    masks = kv_cache.Masks(prompt=np.ones((2, 1, 5), bool), own=np.ones((2, 5), bool))

    def loss(params, tokens):
        hidden = applied.hidden_states(params, tokens, config=config, remat="full")
        return applied.logits_of(params, hidden[0], config=config).sum()

    programs = (
        jax.make_jaxpr(jax.grad(loss))(whole, tokens),
        jax.make_jaxpr(prefill)(params, tokens, index),
        jax.make_jaxpr(functools.partial(applied.decode_step, config=config))(params, index, index, 0, cache, cache, masks),
    )
    for program in map(str, programs):
        products, exact = program.count("dot_general["), program.count("precision=(Precision.HIGHEST, Precision.HIGHEST)")
        assert products > 18  # nine a layer
        assert exact == (products if dtype == "float32" else 0)
