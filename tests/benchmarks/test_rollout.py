"""The rollout as one pure function: an engine's rows, teacher-forced log-probs, and its ends."""

import dataclasses
import functools

import chex
import jax
import numpy as np
import pytest

from benchmarks import rollout
from benchmarks.rollout import Rollout
from tba_jax import sharding, trajectory
from tba_jax.decoding import requests as requests_lib
from tba_jax.decoding import sampling as sampling_lib
from tba_jax.decoding.engine import Engine
from tba_jax.decoding.requests import Request
from tba_jax.models import kv_cache
from tests.support import applied
from tests.support.tiny_engine import BANNED, EOS, MODEL, PAD, PARAMS, SPACE, mixed_sampling, row_keys

pytestmark = pytest.mark.slow

Q, W, P, R = 3, 4, 5, 7
B = Q * W
PROMPTS = ([3, 4, 5], [6], [7, 3, 8, 5, 10])
PROMPT_LENGTH = np.array([len(prompt) for prompt in PROMPTS], np.int32)
# Padded on the right with a token like any other.
PROMPT_TOKENS = np.array([prompt + [6] * (P - len(prompt)) for prompt in PROMPTS], np.int32)
STATIC = dict(config=MODEL, graphdef=kv_cache.define(MODEL).graphdef, space=SPACE, response_length=R, pad_id=PAD)
# One program for most tests of this file: sampling settings are traced.
jit_rollout = jax.jit(functools.partial(chex.assert_max_traces(rollout.rollout, n=1), **STATIC))


def run(sampling: sampling_lib.Sampling, seed: int = 0) -> Rollout:
    return jax.device_get(jit_rollout(PARAMS, PROMPT_TOKENS, PROMPT_LENGTH, row_keys(B, seed), sampling))


@pytest.fixture(scope="module")
def engine() -> Engine:
    mesh = sharding.make_mesh((1, 1, 1), setting="searchers.mesh", devices=jax.devices()[:1])
    made = Engine(MODEL, SPACE, mesh, slots=4, samples=2, prompt_length=P, response_length=R, pad_id=PAD, chunk=2)
    made.set_policy(PARAMS, 0)
    return made


@pytest.mark.parametrize("seed", range(4))
def test_the_rows_are_those_of_an_engine(engine, seed):
    sampling, keys = mixed_sampling(B), row_keys(B, seed)
    found = run(sampling, seed)
    requests = [
        Request(
            name=f"q{q}",
            prompt=prompt,
            keys=keys[q * W : (q + 1) * W],
            sampling=jax.tree.map(lambda x, q=q: x[q * W : (q + 1) * W], sampling),
        )
        for q, prompt in enumerate(PROMPTS)
    ]
    expected = requests_lib.concatenate(engine.generate(requests))
    for field in dataclasses.fields(Rollout):
        compare = np.testing.assert_array_equal
        if field.name.endswith("logprobs"):
            compare = functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-5)
        compare(getattr(found, field.name), getattr(expected, field.name), err_msg=field.name)
        assert getattr(found, field.name).dtype == getattr(expected, field.name).dtype
    assert 0 < found.finished.sum() < B


def test_policy_logprobs_equal_teacher_forced_ones():
    found = run(mixed_sampling(B), seed=9)
    responses = [tokens[:length] for tokens, length in zip(np.asarray(found.tokens), found.length, strict=True)]
    prompts = [prompt for prompt in PROMPTS for _ in range(W)]
    rows = trajectory.token_columns(prompts, responses, prompt_length=P, response_length=R, pad_id=PAD)
    score = functools.partial(applied.response_logprobs, R=R, config=MODEL, space=SPACE, logit_bytes=1 << 20, remat="none")
    expected, _ = jax.jit(score)(PARAMS, *rows.values())
    np.testing.assert_allclose(found.policy_logprobs, expected, rtol=0, atol=1e-5)
    mask = trajectory.response_mask(found.length, R)
    assert not found.policy_logprobs[~mask].any() and not found.behavior_logprobs[~mask].any()
    assert (found.tokens[~mask] == PAD).all() and not np.isin(found.tokens[mask], BANNED).any()


def test_rows_end_by_their_first_end_or_are_full():
    lengths, finished = set(), set()
    for seed in range(12):
        found = run(sampling_lib.constant(B, temperature=1.3), seed)
        for tokens, length, done in zip(found.tokens, found.length, found.finished, strict=True):
            ends = np.flatnonzero(tokens == EOS)
            assert done == (len(ends) > 0) and length == (ends[0] + 1 if done else R)
            lengths.add(int(length))
            finished.add((bool(done), int(length)))
    assert lengths == set(range(1, R + 1)) and {(True, R), (False, R)} <= finished


def test_a_batch_that_has_ended_is_padding_from_there_on():
    """Where the end is the only token that is left, every row has length 1."""
    space = dataclasses.replace(SPACE, banned_tokens=tuple(i for i in range(MODEL.vocab) if i != EOS))
    ended = jax.jit(functools.partial(rollout.rollout, **STATIC | dict(space=space)))
    found = ended(PARAMS, PROMPT_TOKENS, PROMPT_LENGTH, row_keys(B), sampling_lib.constant(B, temperature=1.0))
    assert (found.length == 1).all() and found.finished.all()
    np.testing.assert_array_equal(found.tokens, np.tile([EOS] + [PAD] * (R - 1), (B, 1)))
    assert not found.policy_logprobs.any() and not found.behavior_logprobs.any()


def test_one_response_token():
    one = jax.jit(functools.partial(rollout.rollout, **STATIC | dict(response_length=1)))
    found = one(PARAMS, PROMPT_TOKENS, PROMPT_LENGTH, row_keys(B), sampling_lib.constant(B, temperature=1.0))
    longer = run(sampling_lib.constant(B, temperature=1.0))
    np.testing.assert_array_equal(found.tokens, longer.tokens[:, :1])
    np.testing.assert_allclose(found.policy_logprobs, longer.policy_logprobs[:, :1], atol=1e-5)
    np.testing.assert_array_equal(found.finished, found.tokens[:, 0] == EOS)


def test_rows_split_over_a_mesh_are_those_of_one_device():
    """As a program that generates and learns in one runs it: queries over four devices, heads over two."""
    order = [0, 1, 2, 0]
    keys, sampling = row_keys(4 * W), sampling_lib.constant(4 * W, temperature=1.0)
    mesh = sharding.make_mesh((2, 2, 2), setting="trainer.mesh")
    function = functools.partial(rollout.rollout, **STATIC)
    arguments = PROMPT_TOKENS[order], PROMPT_LENGTH[order], keys, sampling
    expected = jax.jit(function)(PARAMS, *arguments)
    sharded = jax.device_put(PARAMS, applied.shardings(MODEL, mesh)), *sharding.put_rows(mesh, arguments)
    found = sharding.on_mesh(mesh, jax.jit(function, out_shardings=sharding.rows_sharding(mesh)))(*sharded)
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    np.testing.assert_array_equal(found.length, expected.length)
    np.testing.assert_allclose(found.policy_logprobs, expected.policy_logprobs, rtol=0, atol=1e-5)
