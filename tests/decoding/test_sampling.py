"""Drawing tokens against a NumPy distribution in float64: every token's stretch of [0, 1), log-probs, frequencies, edges."""

import functools

import jax
import numpy as np
import pytest
from scipy import stats

from tba_jax.decoding import sampling as sampling_lib
from tests.support.tiny_engine import numpy_distribution

SCORING_TEMPERATURE = 0.7
draw = jax.jit(functools.partial(sampling_lib.draw, scoring_temperature=SCORING_TEMPERATURE), static_argnames="tiled")
OFF = dict(top_k=0, top_p=1.0, min_p=0.0)
SETTINGS = [
    dict(temperature=0.0),
    dict(temperature=SCORING_TEMPERATURE),
    dict(temperature=1.0),
    dict(temperature=1.7),
    dict(temperature=1.0, top_k=1),
    dict(temperature=SCORING_TEMPERATURE, top_k=9),
    dict(temperature=1.0, top_k=1_000_000),
    dict(temperature=1.0, top_p=0.6),
    dict(temperature=SCORING_TEMPERATURE, top_p=0.97),
    dict(temperature=1.0, top_p=1e-6),
    dict(temperature=1.0, min_p=0.15),
    dict(temperature=2.0, top_k=20, top_p=0.8),
    dict(temperature=1.5, top_k=20, top_p=0.9, min_p=0.05),
    dict(temperature=0.0, top_k=3, top_p=0.5, min_p=0.5),
    dict(temperature=1.0, top_k=90, top_p=0.8),
]


def sampling_of(settings: list[dict]) -> sampling_lib.Sampling:
    rows = [OFF | row for row in settings]
    dtypes = dict(temperature=np.float32, top_k=np.int32, top_p=np.float32, min_p=np.float32)
    return sampling_lib.Sampling(**{name: np.array([row[name] for row in rows], dtype) for name, dtype in dtypes.items()})


def policy_logprobs(logits: np.ndarray) -> np.ndarray:
    """float64[V] of log softmax(logits / scoring temperature)."""
    with np.errstate(divide="ignore"):
        return np.log(numpy_distribution(logits, SCORING_TEMPERATURE))


def random_logits(rng: np.random.Generator, V: int) -> np.ndarray:
    """float32[V] with a tenth of the tokens banned, a whole block of 128 among them where there are three."""
    logits = (2 * rng.standard_normal(V)).astype(np.float32)
    logits[rng.permutation(V)[: V // 10]] = -np.inf
    logits[128 : 256 if V > 384 else 128] = -np.inf
    return logits


def stretches(probs: np.ndarray, points: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """`points` tokens, all that are likely where those are fewer, and a uniform float32 from the middle of each one's stretch."""
    tokens = np.resize(rng.permutation(np.flatnonzero(probs > 1e-4))[:points], points)
    return tokens, (np.cumsum(probs) - probs / 2)[tokens].astype(np.float32)


@pytest.mark.parametrize("V", [1, 300])
def test_every_token_owns_its_stretch_and_has_its_logprobs(V):
    rng = np.random.default_rng(V)
    rows = [random_logits(rng, V) for _ in SETTINGS]
    probs = [numpy_distribution(logits, **settings) for logits, settings in zip(rows, SETTINGS, strict=True)]
    points = 60
    tokens, uniform = (np.concatenate(x) for x in zip(*(stretches(p, points, rng) for p in probs), strict=True))
    which = np.repeat(np.arange(len(SETTINGS)), points)
    found = jax.device_get(draw(np.stack(rows)[which], uniform, sampling_of([SETTINGS[i] for i in which])))
    np.testing.assert_array_equal(found.token, tokens)
    behavior = np.log([probs[i][token] for i, token in zip(which, tokens, strict=True)])
    policy = [policy_logprobs(rows[i])[token] for i, token in zip(which, tokens, strict=True)]
    np.testing.assert_allclose(found.behavior_logprob, behavior, rtol=0, atol=1e-5)
    np.testing.assert_allclose(found.policy_logprob, policy, rtol=0, atol=1e-5)
    assert {x.dtype.name for x in jax.tree.leaves(found)} == {"int32", "float32"}


def test_a_forced_token_has_its_logprobs_under_what_was_sampled_before_truncation():
    """Also where top-k leaves it out, and without a change of what is drawn or of the rows beside it."""
    rng, V = np.random.default_rng(4), 59
    logits = np.stack([random_logits(rng, V) for _ in SETTINGS])
    token = int(np.flatnonzero(np.isfinite(logits).all(axis=0))[0])
    uniform, sampling, forced = rng.random(len(SETTINGS), np.float32), sampling_of(SETTINGS), np.arange(len(SETTINGS)) % 4 != 3
    free = draw(logits, uniform, sampling)
    found = draw(logits, uniform, sampling, forced=(token, forced))
    np.testing.assert_array_equal(found.drawn, free.token)
    np.testing.assert_array_equal(found.token, np.where(forced, token, free.token))
    np.testing.assert_array_equal(found.policy_logprob[~forced], free.policy_logprob[~forced])
    np.testing.assert_array_equal(found.behavior_logprob[~forced], free.behavior_logprob[~forced])
    left_out = 0
    for row in np.flatnonzero(forced):
        temperature = SETTINGS[row]["temperature"]
        left_out += numpy_distribution(logits[row], **SETTINGS[row])[token] == 0
        behavior = np.log(numpy_distribution(logits[row], temperature)[token]) if temperature else 0.0
        np.testing.assert_allclose(found.behavior_logprob[row], behavior, rtol=0, atol=1e-5)
        np.testing.assert_allclose(found.policy_logprob[row], policy_logprobs(logits[row])[token], rtol=0, atol=1e-5)
    assert left_out >= 2


def test_the_support_is_exact_and_ties_at_a_threshold_all_stay(V=300):
    """Few distinct logits, zeros of both signs among them, so that every rule cuts through ties: all tokens that stay appear."""
    rng = np.random.default_rng(1)
    for logits in (rng.integers(-2, 3, V).astype(np.float32), np.zeros(V, np.float32)):
        logits[logits == 0] *= rng.choice([-1.0, 1.0], (logits == 0).sum())
        for settings in SETTINGS:
            probs = numpy_distribution(logits, **settings)
            uniform = np.linspace(0, 1, 800, endpoint=False, dtype=np.float32)
            found = draw(np.tile(logits, (800, 1)), uniform, sampling_of([settings] * 800))
            likely = np.flatnonzero(probs > 1 / 400)
            assert set(likely.tolist()) <= set(np.asarray(found.token).tolist()) <= set(np.flatnonzero(probs).tolist()), settings
            np.testing.assert_allclose(found.behavior_logprob, np.log(probs[found.token]), rtol=0, atol=1e-5)


@pytest.mark.parametrize("settings", SETTINGS[1::4], ids=str)
def test_frequencies_are_those_of_the_distribution(settings, V=300, draws=10_000):
    """Blocks of 128, the last one ragged; banned tokens lie in all of them. Tokens too rare for the statistic count as one."""
    rng = np.random.default_rng(3)
    logits = (1.5 * rng.standard_normal(V)).astype(np.float32)
    logits[[0, 1, *range(120, 200), 299]] = -np.inf
    uniform = rng.random(draws, np.float32)
    counts = np.bincount(draw(np.tile(logits, (draws, 1)), uniform, sampling_of([settings] * draws)).token, minlength=V)
    expected = numpy_distribution(logits, **settings)
    assert not counts[expected == 0].any(), np.flatnonzero((expected == 0) & (counts > 0))
    rare = draws * expected < 10
    counts, expected = (np.append(x[~rare], x[rare].sum()) for x in (counts, expected))
    counts, expected = counts[expected > 0], expected[expected > 0]
    statistic = np.sum((counts - draws * expected) ** 2 / (draws * expected))
    assert statistic < stats.chi2.ppf(0.9999, max(len(expected) - 1, 1))


def test_the_edges_of_the_inverse_cdf_draw_no_impossible_token(V=300):
    """Uniforms at and around every step of the distribution, at 0 and at the largest float32 below 1."""
    rng = np.random.default_rng(5)
    for where in (rng.permutation(V)[: max(1, V // 8)], np.arange(0, V, max(1, min(128, V // 4)))):
        probs = np.zeros(V)
        probs[where] = np.exp(2 * rng.standard_normal(len(where))) * (rng.random(len(where)) < 0.5)
        probs[where[0]] += 0.01
        probs /= probs.sum()
        with np.errstate(divide="ignore"):
            log_probs = np.log(probs).astype(np.float32)
        steps = np.cumsum(probs)[probs > 0]
        near = np.concatenate([steps + k * 2.0**-25 for k in range(-2, 3)] + [[0.0, 1 - 2.0**-24]]).astype(np.float32)
        near = np.unique(near[(near >= 0) & (near < 1)])
        assert len(near) <= 256
        uniform = np.resize(near, 256)
        tokens = np.asarray(draw(np.tile(log_probs, (256, 1)), uniform, sampling_lib.constant(256, temperature=1.0)).token)
        assert (probs[tokens] > 0).all()
        # Each token owns its stretch of [0, 1), up to rounding.
        upper = np.cumsum(probs)[tokens]
        assert (uniform < upper + 1e-5).all() and (uniform > upper - probs[tokens] - 1e-5).all()


def test_rounded_cumulative_masses_draw_no_impossible_token():
    """XLA sums a few hundred numbers as a tree, so cumulative masses may rise without mass, fall, or miss the target."""
    mass = np.array([[0.5, 0.0, 0.5], [0.0, 0.5, 0.0], [0.25, 0.75, 0.0]], np.float32)
    cumulative = np.array([[0.5, 0.6, 1.0], [0.1, 0.5, 0.4], [0.25, 0.9, 0.9]], np.float32)
    target = np.array([0.55, 0.05, 0.95], np.float32)
    assert jax.jit(sampling_lib.first_above)(mass, cumulative, target).tolist() == [2, 1, 1]


def test_plain_rows_are_the_policy_whatever_is_beside_them(V=4096):
    """40 rows, more than are truncated at a time; in one batch every other row is plain, in the other batch every row."""
    rng = np.random.default_rng(7)
    logits = np.stack([random_logits(rng, V) for _ in range(40)])
    uniform = rng.random(40, np.float32)
    plain = dict(temperature=SCORING_TEMPERATURE)
    mixed = sampling_of([SETTINGS[i // 2 % len(SETTINGS)] if i % 2 else plain for i in range(40)])
    among_others, alike = draw(logits, uniform, mixed), draw(logits, uniform, sampling_of([plain] * 40))
    for found, rows in ((among_others, slice(0, None, 2)), (alike, slice(None))):
        np.testing.assert_array_equal(found.policy_logprob[rows], found.behavior_logprob[rows])
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x[::2], y[::2]), among_others, alike)
    # The same rows backwards: others are worked on together.
    backwards = draw(logits[::-1], uniform[::-1], jax.tree.map(lambda x: x[::-1], mixed))
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x[::-1], y), backwards, among_others)


@pytest.mark.parametrize("V, rows", [(300, 5), (5_001, 40)])
def test_sums_over_tiles_draw_the_same_tokens(V, rows):
    rng = np.random.default_rng(11)
    logits = np.stack([random_logits(rng, V) for _ in range(rows)])
    inputs = logits, rng.random(rows, np.float32), sampling_of([SETTINGS[i % len(SETTINGS)] for i in range(rows)])
    expected, found = draw(*inputs), jax.jit(functools.partial(draw, tiled=True))(*inputs)
    np.testing.assert_array_equal(found.token, expected.token)
    for field in ("policy_logprob", "behavior_logprob"):
        np.testing.assert_allclose(getattr(found, field), getattr(expected, field), rtol=0, atol=1e-5)


@pytest.mark.parametrize("where, value", [(298, np.nan), (3, np.inf), (slice(None), -np.inf)])
def test_bad_logits_surface_in_the_policys_logprob(where, value):
    V, n, rng = 300, len(SETTINGS), np.random.default_rng(9)
    good = np.tile(np.stack([random_logits(rng, V) for _ in SETTINGS]), (2, 1))
    logits, uniform = good.copy(), np.tile(rng.random(n, np.float32), 2)
    logits[n:, where] = value
    found, expected = (draw(each, uniform, sampling_of(SETTINGS * 2)) for each in (logits, good))
    assert np.isnan(found.policy_logprob[n:]).all() and (found.token >= 0).all() and (found.token < V).all()
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x[:n], y[:n]), found, expected)


def test_exploration_has_the_asked_shares():
    rows = 20_000
    plain = sampling_lib.constant(rows, temperature=0.7)
    shares = dict(temperature_probability=0.3, temperature_low_factor=1.0, temperature_factor=1.1 / 0.7)
    shares |= dict(top_p_probability=0.2, top_p_low=0.6)
    found = sampling_lib.explore(plain, np.random.default_rng(0), **shares)
    hotter, truncated = found.temperature != np.float32(0.7), found.top_p < 1
    assert [x.mean() for x in (hotter, truncated, hotter & truncated)] == pytest.approx([0.3, 0.2, 0.06], abs=0.015)
    for drawn, low, high in ((found.temperature[hotter], 0.7, 1.1), (found.top_p[truncated], 0.6, 1.0)):
        assert low <= drawn.min() < low + 0.01 and high - 0.01 < drawn.max() <= np.float32(high)
        assert drawn.mean() == pytest.approx((low + high) / 2, abs=0.01)
    off = shares | dict(temperature_probability=0.0, top_p_probability=0.0)
    jax.tree.map(np.testing.assert_array_equal, sampling_lib.explore(plain, np.random.default_rng(0), **off), plain)
