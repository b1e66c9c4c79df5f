"""The response space against NumPy loops, on blocks and through the whole model; packed rows against each by itself."""

import dataclasses
import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tba_jax import packing, sharding
from tba_jax.models import parameters, scoring
from tba_jax.models.config import DecoderConfig
from tba_jax.packing import Limits
from tests.support import applied

B, R, V, EOS = 4, 7, 11, 2
SCORED = DecoderConfig(layers=2, width=16, heads=4, kv_heads=2, head_size=4, ffn=24, vocab=V, max_positions=16)


def space(**changes) -> scoring.ResponseSpace:
    return scoring.ResponseSpace(**dict(temperature=0.7, banned_tokens=(0, 5), eos_id=EOS) | changes)


def numpy_distribution(logits: np.ndarray, t: int, space: scoring.ResponseSpace) -> np.ndarray:
    """float64[V]: the probabilities of token t."""
    probabilities = np.zeros(V)
    for v in range(V):
        if v not in space.banned_tokens and (v != space.eos_id or t + 1 >= space.min_length):
            probabilities[v] = np.exp(float(logits[v]) / space.temperature)
    return probabilities / probabilities.sum()


@pytest.mark.parametrize("min_length, banned", [(2, ()), (R, (0, 5))], ids=str)
def test_restricted_distributions_equal_a_numpy_loop(min_length, banned):
    wanted = space(min_length=min_length, banned_tokens=banned)
    logits = np.random.default_rng(0).normal(size=(B, R, V)).astype(np.float32)
    position = np.random.default_rng(1).integers(0, R, (B, R)).astype(np.int32)  # rows of a decode loop began at different times
    restricted = np.asarray(jax.jit(functools.partial(scoring.restrict, space=wanted))(logits, position))
    chosen = jax.jit(jax.vmap(lambda v: scoring.chosen_logprobs(restricted / wanted.temperature, jnp.full((B, R), v))[0]))
    found = np.moveaxis(chosen(jnp.arange(V)), 0, -1)
    expected = np.array([[numpy_distribution(logits[b, t], position[b, t], wanted) for t in range(R)] for b in range(B)])
    np.testing.assert_array_equal(np.isfinite(found), expected > 0)
    np.testing.assert_allclose(np.exp(found), expected, atol=1e-6)
    np.testing.assert_array_equal(restricted, np.where(expected > 0, logits, -np.inf))


def test_the_derivative_of_chosen_logprobs_equals_a_numpy_loop():
    """Σ_t w_t log π(y_t), of large logits too; a token outside of the space has no gradient, and the entropy gives none."""
    rng = np.random.default_rng(0)
    logits, tokens, weights = 30 * rng.normal(size=(R, V)), rng.integers(1, V, R), rng.normal(size=R)
    logits[:, 0] = -np.inf

    def summed(logits: jax.Array) -> jax.Array:
        chosen, entropy = scoring.chosen_logprobs(logits, tokens)
        return jnp.sum(weights * chosen) + jnp.sum(entropy)

    expected = np.zeros((R, V))
    for t in range(R):
        probabilities = np.exp(logits[t] - logits[t].max())
        expected[t] = weights[t] * ((np.arange(V) == tokens[t]) - probabilities / probabilities.sum())
    found = jax.jit(jax.grad(summed))(logits.astype(np.float32))
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert not found[:, 0].any()


def test_the_probabilities_of_all_allowed_responses_sum_to_one(min_length=2):
    """Of up to 3 tokens of 3 symbols; shorter ones than min_length have none."""
    length, symbols = 3, (1, 3, 7)
    wanted = space(min_length=min_length, banned_tokens=tuple(v for v in range(V) if v not in (*symbols, EOS)))
    ended = [(*t, EOS) for n in range(length) for t in itertools.product(symbols, repeat=n)]
    responses = ended + list(itertools.product(symbols, repeat=length))
    lengths = np.array([len(response) for response in responses], np.int32)
    padded = np.array([(4, 6, *response) + (0,) * (length + 1 - len(response)) for response in responses], np.int32)
    in_two_blocks = 4 * len(padded) * V * 2
    settings = dict(R=length, config=SCORED, space=wanted, logit_bytes=in_two_blocks, remat="none")
    score = jax.jit(functools.partial(applied.response_logprobs, **settings))
    logprobs, entropy = score(params_of(SCORED), padded, np.full(len(padded), 2, np.int32), lengths)
    probabilities = np.exp(np.asarray(logprobs, np.float64).sum(axis=1))
    assert (probabilities[lengths < min_length] == 0).all() and (probabilities[lengths >= min_length] > 0).all()
    np.testing.assert_allclose(probabilities.sum(), 1, rtol=1e-5)
    assert np.isfinite(entropy).all()


def test_spaces_are_static_and_checked():
    assert hash(space()) == hash(space()) and space() == space() != space(min_length=2)
    with pytest.raises(ValueError, match="min_length=2 holds back the end of sequence, and eos_id=-1 names none"):
        space(min_length=2, eos_id=-1)
    with pytest.raises(ValueError, match="force_eos=True puts an end of sequence, and eos_id=-1 names none"):
        space(force_eos=True, eos_id=-1)


def scored_rows(rows: int) -> tuple[np.ndarray, ...]:
    """tokens int32[rows, 5 + R], prompt_length and response_length int32[rows]: pairs of rows, each with a prompt."""
    rng = np.random.default_rng(rows)
    prompt, response = rng.integers(1, 6, rows // 2).repeat(2).astype(np.int32), rng.integers(0, R + 1, rows).astype(np.int32)
    tokens = rng.integers(0, V, (rows, 5 + R)).astype(np.int32)
    return np.where(np.arange(5 + R) < prompt[:, None], tokens[::2].repeat(2, axis=0), tokens), prompt, response


def params_of(model: DecoderConfig) -> parameters.Params:
    return applied.random(applied.define(model).specs, scale=0.25)


def limits(rows: int, *, tokens: int, ways: int = 1, shares: bool = True) -> Limits:
    return Limits(rows=rows, group=2, prompt=5, response=R, tokens=tokens, ways=ways, shares=shares)


def scored(
    rows: tuple[np.ndarray, ...], *, sizes: tuple[int, int, int] = (1, 1, 1), model: DecoderConfig = SCORED, **limited: Any
) -> np.ndarray:
    mesh = sharding.make_mesh(sizes, setting="test", devices=jax.devices()[: math.prod(sizes)])
    definition = applied.define(model)
    score = scoring.program(mesh, graphdef=definition.graphdef, R=R, space=space(), logit_megabytes=1)
    packed, _ = packing.of_rows(*rows, limits=limits(len(rows[0]), ways=sharding.row_ways(mesh), **limited))
    packed = jax.device_put(packed, scoring.packed_shardings(mesh))
    return np.asarray(score(jax.device_put(params_of(model), definition.shardings(mesh)), packed))


def scored_alone(rows: tuple[np.ndarray, ...], model: DecoderConfig = SCORED) -> np.ndarray:
    settings: dict[str, Any] = dict(R=R, space=space(), logit_bytes=1 << 20, remat="none", config=model)
    return np.asarray(jax.jit(functools.partial(applied.response_logprobs, **settings))(params_of(model), *rows)[0])


@pytest.mark.parametrize(
    "score_tokens, sizes, shares", [(1, (1, 1, 1), True), (25, (2, 2, 1), True), (36, (2, 1, 2), False)], ids=str
)
def test_packed_rows_are_scored_as_each_by_itself(score_tokens, sizes, shares):
    """20 rows of 12 tokens: 1, 2 or 3 at a time on a device that has 10 or 5, which 2 and 3 do not divide; then full rows."""
    tokens, prompts, responses = rows = scored_rows(20)
    for each in (rows, (tokens, np.full_like(prompts, 5), np.full_like(responses, R))):
        found = scored(each, tokens=score_tokens, sizes=sizes, shares=shares)
        np.testing.assert_allclose(found, scored_alone(each), atol=1e-5)


@pytest.mark.parametrize(
    "changes",
    [dict(positions="learned"), dict(layer_pattern="lg", window=4, local_rope_theta=100.0), dict(sinks=True)],
    ids=str,
)
def test_positions_windows_and_sinks_go_on_from_a_shared_prompt(changes):
    model, rows = dataclasses.replace(SCORED, **changes), scored_rows(20)
    without, expected = scored_alone(rows), scored_alone(rows, model)
    assert not np.allclose(expected, without, atol=0.01), "the change matters"
    for shares in (False, True):
        np.testing.assert_allclose(scored(rows, tokens=40, shares=shares, model=model), expected, atol=1e-5)


def test_memory_of_scoring_is_that_of_a_micro_batch():
    one, definition = sharding.make_mesh((1, 1, 1), setting="test", devices=jax.devices()[:1]), applied.define(SCORED)

    def temporaries(score_tokens: int, *, rows: int) -> int:
        score: Any = scoring.program(one, graphdef=definition.graphdef, R=R, space=space(), logit_megabytes=1)
        of = limits(rows, tokens=score_tokens)
        packed = packing.empty(of, of.sequences)
        return score.lower(parameters.shapes(definition.specs), packed).compile().memory_analysis().temp_size_in_bytes

    in_micro_batches, whole = temporaries(16 * 12, rows=512), temporaries(0, rows=512)
    assert in_micro_batches < 1.5 * temporaries(0, rows=16) + 512 * 12 * 4 * 4 < 0.5 * whole
