"""Generation against teacher-forced scoring and a NumPy sampler; sampling frequencies against the exact distribution."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tba_jax import mesh as mesh_lib
from tba_jax import trajectory
from tba_jax.decoding import generate as generate_lib
from tba_jax.decoding import sampling as sampling_lib
from tba_jax.decoding.generate import Generation
from tba_jax.models import decoder, parameters, scoring
from tba_jax.models.lora import LoraConfig
from tba_jax.models.policy import Policy

MODEL = decoder.DecoderConfig(layers=2, width=16, heads=4, kv_heads=2, head_size=4, ffn=24, vocab=11, max_positions=16)
PAD, EOS, BANNED = 0, 2, (0, 1, 9)
Q, S, P, R = 3, 4, 5, 7
B = Q * S
TEMPERATURE = 0.7  # the scoring temperature
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": "0"})


def random_params() -> decoder.Params:
    """Large enough that attention is far from uniform, and the end not too likely."""
    rng = np.random.default_rng(0)
    return parameters.map_specs(
        lambda _, spec: (spec.init_mean + 0.4 * rng.standard_normal(spec.shape)).astype(np.float32), decoder.param_specs(MODEL)
    )


PARAMS = random_params()
PROMPTS, PROMPT_LENGTH = trajectory.left_pad([[1, 4, 5], [6], [7, 3, 8, 5, 10]], P, PAD)
STATIC = dict(
    config=MODEL,
    samples_per_query=S,
    response_length=R,
    eos_id=EOS,
    pad_id=PAD,
    banned_tokens=BANNED,
    scoring_temperature=TEMPERATURE,
)
# One program for all tests of this file: sampling settings are traced, so only `truncating` may make a second.
jit_generate = jit(functools.partial(chex.assert_max_traces(generate_lib.generate, n=2), **STATIC), static_argnames="truncating")
jit_scores = jit(
    functools.partial(
        scoring.response_logprobs, config=MODEL, temperature=TEMPERATURE, banned_tokens=BANNED, logit_bytes=1 << 20, remat="none"
    )
)


@jit
def all_logits(params: decoder.Params, tokens: jax.Array, token_mask: jax.Array) -> jax.Array:
    hidden = decoder.hidden_states(params, tokens, token_mask, config=MODEL, remat="none")
    return decoder.logits_of(params, hidden.reshape(-1, MODEL.width), config=MODEL).reshape(*tokens.shape, -1)


def teacher_forced_logits(tokens: np.ndarray) -> np.ndarray:
    """float32[B, R, V]: the logits that every response token was sampled from, in one pass over the whole rows."""
    prompts = np.repeat(PROMPTS, S, axis=0)
    prompt_mask = np.arange(P)[None, :] >= P - np.repeat(PROMPT_LENGTH, S)[:, None]
    mask = np.concatenate([prompt_mask, np.ones((B, R), bool)], axis=1)
    return np.array(all_logits(PARAMS, np.concatenate([prompts, tokens], axis=1), mask))[:, P - 1 : -1]


def row_keys(seed: int = 0) -> np.ndarray:
    return np.asarray(generate_lib.row_keys(seed, 7, np.arange(B, dtype=np.uint32)))


def run(sampling: sampling_lib.Sampling, *, seed: int = 0, truncating: bool | None = None) -> Generation:
    truncating = sampling_lib.is_truncating(sampling) if truncating is None else truncating
    return jax.device_get(jit_generate(PARAMS, PROMPTS, PROMPT_LENGTH, row_keys(seed), sampling, truncating=truncating))


def mixed_sampling() -> sampling_lib.Sampling:
    """Twelve rows that use every setting, alone and together; row 0 is greedy."""
    return sampling_lib.Sampling(
        temperature=np.array([0, 1, 0.7, 1.5, 1, 1, 1, 2, 2, 1.1, 3, 0.5], np.float32),
        top_k=np.array([0, 0, 0, 0, 3, 0, 0, 4, 100, 1, 5, 2], np.int32),
        top_p=np.array([1, 1, 1, 1, 1, 0.7, 1, 0.8, 1, 1, 0.6, 1], np.float32),
        min_p=np.array([0, 0, 0, 0, 0, 0, 0.2, 0.05, 0.1, 0, 0.1, 0.9], np.float32),
    )


def numpy_distribution(
    logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float, banned=BANNED
) -> np.ndarray:
    """float64[V]: temperature, top-k, top-p of what is left, min-p, renormalised; the most likely token stays."""
    logits = logits.astype(np.float64)
    logits[list(banned)] = -np.inf
    if temperature == 0:
        return np.eye(len(logits))[logits.argmax()]
    probs = np.exp((logits - logits.max()) / temperature)
    probs /= probs.sum()
    kept: list[int] = []
    order = [int(i) for i in np.argsort(-probs, kind="stable")][: top_k or len(probs)]
    mass, total = 0.0, sum(probs[order])
    for i in order:
        if not kept or (mass / total < top_p and probs[i] >= min_p * probs[order[0]]):
            kept.append(i)
        mass += probs[i]
    out = np.zeros_like(probs)
    out[kept] = probs[kept] / probs[kept].sum()
    return out


@pytest.mark.parametrize("seed", range(3))
def test_logprobs_equal_teacher_forced_ones(seed):
    sampling = mixed_sampling()
    found = run(sampling, seed=seed)
    mask = trajectory.response_mask(found.length, R)
    expected, _ = jit_scores(PARAMS, np.repeat(PROMPTS, S, axis=0), np.repeat(PROMPT_LENGTH, S), found.tokens, found.length)
    np.testing.assert_allclose(found.policy_logprobs, expected, rtol=0, atol=1e-5)
    logits = teacher_forced_logits(found.tokens)
    for row, t in zip(*np.nonzero(mask), strict=True):
        settings = {field.name: getattr(sampling, field.name)[row].item() for field in dataclasses.fields(sampling)}
        behavior = numpy_distribution(logits[row, t], **settings)
        np.testing.assert_allclose(found.behavior_logprobs[row, t], np.log(behavior[found.tokens[row, t]]), rtol=0, atol=2e-5)
    assert not found.behavior_logprobs[~mask].any() and not found.policy_logprobs[~mask].any()


def test_an_untruncated_row_at_the_scoring_temperature_is_the_policy():
    for truncating in (False, True):
        found = run(sampling_lib.constant(B, temperature=TEMPERATURE), truncating=truncating)
        np.testing.assert_allclose(found.behavior_logprobs, found.policy_logprobs, rtol=0, atol=2e-6)


def test_greedy_is_the_argmax_of_every_step():
    greedy = sampling_lib.constant(B, temperature=0.0)
    found, other_keys = run(greedy, seed=1), run(greedy, seed=2)
    jax.tree.map(np.testing.assert_array_equal, found, other_keys)
    tokens = np.full((B, R), PAD, np.int32)
    done = np.zeros(B, bool)
    for t in range(R):
        logits = teacher_forced_logits(tokens)[:, t]
        logits[:, list(BANNED)] = -np.inf
        tokens[:, t] = np.where(done, PAD, logits.argmax(axis=1))
        done |= tokens[:, t] == EOS
    np.testing.assert_array_equal(found.tokens, tokens)
    np.testing.assert_array_equal(found.finished, done)
    assert not found.behavior_logprobs.any() and (found.policy_logprobs.sum(axis=1) < 0).all()


def test_rows_end_by_their_first_end_or_at_the_limit():
    lengths, finished = set(), set()
    for seed in range(12):
        found = run(sampling_lib.constant(B, temperature=1.3), seed=seed)
        for tokens, length, done in zip(found.tokens, found.length, found.finished, strict=True):
            ends = np.flatnonzero(tokens == EOS)
            assert done == (len(ends) > 0)
            assert length == (ends[0] + 1 if done else R)
            assert (tokens[length:] == PAD).all()
            assert not np.isin(tokens[:length], BANNED).any()
            lengths.add(int(length))
            finished.add((bool(done), int(length)))
    assert lengths == set(range(1, R + 1))
    assert {(True, R), (False, R)} <= finished


def test_a_batch_that_has_ended_stops_early_with_padding():
    """Where the end is the only token that is left, every row has length 1."""
    others = tuple(i for i in range(MODEL.vocab) if i != EOS)
    ended = jit(functools.partial(generate_lib.generate, **STATIC | dict(banned_tokens=others), truncating=False))
    found = jax.device_get(ended(PARAMS, PROMPTS, PROMPT_LENGTH, row_keys(), sampling_lib.constant(B, temperature=1.0)))
    assert (found.length == 1).all() and found.finished.all()
    np.testing.assert_array_equal(found.tokens, np.tile([EOS] + [PAD] * (R - 1), (B, 1)))
    assert not found.policy_logprobs.any()


def test_one_response_token():
    one = jit(functools.partial(generate_lib.generate, **STATIC | dict(response_length=1), truncating=False))
    found = jax.device_get(one(PARAMS, PROMPTS, PROMPT_LENGTH, row_keys(), sampling_lib.constant(B, temperature=1.0)))
    longer = run(sampling_lib.constant(B, temperature=1.0))
    np.testing.assert_array_equal(found.tokens, longer.tokens[:, :1])
    np.testing.assert_allclose(found.policy_logprobs, longer.policy_logprobs[:, :1], atol=1e-5)
    np.testing.assert_array_equal(found.finished, found.tokens[:, 0] == EOS)


def test_a_row_is_the_same_whatever_it_shares_a_batch_with():
    """Queries in another order, keys along with them: rows move along; a lone query gives its rows again."""
    sampling = mixed_sampling()
    whole = run(sampling)
    keys = row_keys()
    order = np.array([2, 0, 1])
    rows = np.arange(B).reshape(Q, S)[order].reshape(-1)
    moved_sampling = jax.tree.map(lambda x: x[rows], sampling)
    moved = jit_generate(PARAMS, PROMPTS[order], PROMPT_LENGTH[order], keys[rows], moved_sampling, truncating=True)
    lone = jit(functools.partial(generate_lib.generate, **STATIC, truncating=True))
    alone = lone(PARAMS, PROMPTS[:1], PROMPT_LENGTH[:1], keys[:S], jax.tree.map(lambda x: x[:S], sampling))
    for found, expected in ((moved, jax.tree.map(lambda x: x[rows], whole)), (alone, jax.tree.map(lambda x: x[:S], whole))):
        np.testing.assert_array_equal(found.tokens, expected.tokens)
        np.testing.assert_allclose(found.policy_logprobs, expected.policy_logprobs, atol=1e-5)


def test_row_keys_differ_by_run_writer_and_row():
    rows = np.arange(50, dtype=np.uint32)
    keys = [np.asarray(generate_lib.row_keys(seed, writer, rows)) for seed, writer in ((0, 1), (1, 1), (0, 2))]
    assert keys[0].shape == (50, 2) and keys[0].dtype == np.uint32
    assert len({tuple(key) for part in keys for key in part.tolist()}) == 150
    np.testing.assert_array_equal(generate_lib.row_keys(0, 1, rows[10:20]), keys[0][10:20])


def chi_square_limit(degrees: int) -> float:
    """The 99.99 % point, by Wilson and Hilferty's cube."""
    return degrees * (1 - 2 / (9 * degrees) + 3.719 * (2 / (9 * degrees)) ** 0.5) ** 3


DRAWS, CHUNK = 100_000, 20_000


@functools.partial(jax.jit, static_argnames="truncating")
def draw(logits: jax.Array, sampling: sampling_lib.Sampling, uniform: jax.Array, *, truncating: bool) -> jax.Array:
    log_probs = sampling_lib.behavior_log_distribution(logits[None], sampling, banned_tokens=BANNED, truncating=truncating)
    return sampling_lib.sample(jnp.broadcast_to(log_probs, (len(uniform), logits.shape[0])), uniform)


@pytest.mark.parametrize(
    "settings",
    [
        dict(temperature=1.0),
        dict(temperature=0.5),
        dict(temperature=1.7),
        dict(temperature=1.0, top_k=7),
        dict(temperature=1.0, top_p=0.6),
        dict(temperature=1.0, min_p=0.15),
        dict(temperature=1.5, top_k=20, top_p=0.9, min_p=0.05),
    ],
    ids=str,
)
def test_frequencies_are_those_of_the_distribution(settings):
    """V = 59: blocks of 7, the last one ragged; banned tokens have no probability."""
    V = 59
    rng = np.random.default_rng(3)
    logits = (1.5 * rng.standard_normal(V)).astype(np.float32)
    logits[[20, 21, 22, 23, 24, 25, 26, 27, 40]] = -np.inf  # a whole block and more
    sampling = sampling_lib.constant(1, **settings)
    uniforms = rng.random((DRAWS // CHUNK, CHUNK), np.float32)
    truncating = sampling_lib.is_truncating(sampling)
    tokens = np.concatenate([draw(logits, sampling, uniform, truncating=truncating) for uniform in uniforms])
    expected = numpy_distribution(logits, **dict(top_k=0, top_p=1.0, min_p=0.0) | settings)
    counts = np.bincount(tokens, minlength=V)
    assert not counts[expected == 0].any(), np.flatnonzero((expected == 0) & (counts > 0))
    support = expected > 0
    assert 3 < support.sum() < V - len(BANNED)
    statistic = np.sum((counts - DRAWS * expected)[support] ** 2 / (DRAWS * expected[support]))
    assert statistic < chi_square_limit(int(support.sum()) - 1)


@pytest.mark.parametrize("V", [1, 2, 16, 17, 59, 2000])
def test_the_inverse_cdf_at_its_edges_never_draws_an_impossible_token(V):
    """Uniforms at and around every step of the distribution, at 0 and at the largest float32 below 1."""
    rng = np.random.default_rng(5)
    block = max(1, int(V**0.5))
    few = rng.permutation(V)[:block] if V < 100 else np.arange(block)
    for where in (few, np.arange(0, V, block)):
        probs = np.zeros(V)
        probs[where] = np.exp(2 * rng.standard_normal(len(where))) * (rng.random(len(where)) < 0.5)
        probs[where[0]] += 0.01
        probs /= probs.sum()
        with np.errstate(divide="ignore"):
            log_probs = np.log(probs).astype(np.float32)
        steps = np.cumsum(probs)[probs > 0]
        near = np.concatenate([steps + k * 2.0**-25 for k in range(-2, 3)] + [[0.0, 1 - 2.0**-24]]).astype(np.float32)
        near = np.unique(near[(near >= 0) & (near < 1)])
        for first in range(0, len(near), 256):
            uniform = np.resize(near[first : first + 256], 256)
            tokens = np.asarray(jit_sample(np.broadcast_to(log_probs, (256, V)), uniform))
            assert (probs[tokens] > 0).all()
            # Each token owns its stretch of [0, 1), up to rounding.
            upper = np.cumsum(probs)[tokens]
            assert (uniform < upper + 1e-5).all() and (uniform > upper - probs[tokens] - 1e-5).all()


def test_rounded_cumulative_masses_draw_no_impossible_token():
    """XLA sums a few hundred numbers as a tree, so cumulative masses may rise without mass, fall, or miss the target."""
    mass = np.array([[0.5, 0.0, 0.5], [0.0, 0.5, 0.0], [0.25, 0.75, 0.0]], np.float32)
    cumulative = np.array([[0.5, 0.6, 1.0], [0.1, 0.5, 0.4], [0.25, 0.9, 0.9]], np.float32)
    target = np.array([0.55, 0.05, 0.95], np.float32)
    assert np.asarray(sampling_lib._first_above(mass, cumulative, target)).tolist() == [2, 1, 1]


jit_sample = jax.jit(sampling_lib.sample)


def test_exploration_has_the_asked_shares_and_leaves_rows_untruncated():
    rows = 20_000
    plain = sampling_lib.constant(rows, temperature=0.7)
    found = sampling_lib.explore(
        plain,
        np.random.default_rng(0),
        temperature_probability=0.3,
        temperature_factor=1.1 / 0.7,
        top_p_probability=0.2,
        top_p_low=0.6,
    )
    hotter, truncated = found.temperature != np.float32(0.7), found.top_p < 1
    assert hotter.mean() == pytest.approx(0.3, abs=0.015) and truncated.mean() == pytest.approx(0.2, abs=0.015)
    assert (hotter & truncated).mean() == pytest.approx(0.06, abs=0.01)
    assert 0.7 < found.temperature[hotter].min() < 0.71 and 1.09 < found.temperature[hotter].max() <= np.float32(1.1)
    assert found.temperature[hotter].mean() == pytest.approx(0.9, abs=0.01)
    assert 0.6 <= found.top_p[truncated].min() < 0.61 and found.top_p[truncated].mean() == pytest.approx(0.8, abs=0.01)
    for field in dataclasses.fields(found):
        assert getattr(found, field.name).dtype == getattr(plain, field.name).dtype
    assert not sampling_lib.is_truncating(plain) and sampling_lib.is_truncating(found)
    off = dict(temperature_probability=0.0, temperature_factor=2.0, top_p_probability=0.0, top_p_low=0.5)
    jax.tree.map(np.testing.assert_array_equal, sampling_lib.explore(plain, np.random.default_rng(0), **off), plain)


@pytest.mark.parametrize("settings", [dict(top_k=3), dict(top_p=0.99), dict(min_p=0.01)], ids=str)
def test_one_truncating_row_is_noticed(settings):
    sampling = sampling_lib.constant(5, temperature=1.0)
    for name, value in settings.items():
        getattr(sampling, name)[4] = value
    assert sampling_lib.is_truncating(sampling)


@pytest.mark.parametrize("weights", ["full", "int8"])
def test_searchers_on_a_mesh_sample_what_one_device_samples(weights):
    """Adapters merged and weights rounded on eight devices; prefill, cache and loop split over rows and heads."""
    policy = Policy(model=MODEL, lora=LoraConfig(rank=2, alpha=4.0, targets=("layers.*",)))
    rng = np.random.default_rng(3)
    adapters = parameters.map_specs(
        lambda _, spec: 0.3 * rng.standard_normal(spec.shape).astype(np.float32), policy.trained_specs
    )
    prompts, lengths = np.concatenate([PROMPTS, PROMPTS[:1]]), np.concatenate([PROMPT_LENGTH, PROMPT_LENGTH[:1]])
    keys = np.asarray(generate_lib.row_keys(0, 7, np.arange(4 * S, dtype=np.uint32)))
    sampling = sampling_lib.constant(4 * S, temperature=1.0)
    generate = functools.partial(generate_lib.generate, **STATIC, truncating=False)
    sample = functools.partial(policy.for_sampling, weights=weights)
    expected = jit(generate)(jit(sample)(adapters, PARAMS), prompts, lengths, keys, sampling)

    mesh = mesh_lib.make_mesh((2, 2, 2), setting="searchers.mesh")
    on_mesh = functools.partial(mesh_lib.on_mesh, mesh)
    sharded = jax.device_put(adapters, policy.trained_shardings(mesh)), jax.device_put(PARAMS, policy.model_shardings(mesh))
    params = on_mesh(jit(sample))(*sharded)
    assert (params["layers"]["up"]["weight"].dtype == np.int8) == (weights == "int8")
    found = on_mesh(jit(generate, out_shardings=mesh_lib.rows_sharding(mesh)))(
        params, *mesh_lib.put_rows(mesh, (prompts, lengths, keys, sampling))
    )
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    np.testing.assert_allclose(found.policy_logprobs, expected.policy_logprobs, rtol=0, atol=1e-5)
    assert len(set(np.asarray(found.length).tolist())) > 1
