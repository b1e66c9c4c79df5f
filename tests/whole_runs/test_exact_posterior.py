"""Training reaches p* ∝ π_ref·exp(r/β) on a space that is enumerated, whoever produced the rows with full support."""

import concurrent.futures
import itertools

import jax
import numpy as np
import pytest

from benchmarks import posterior
from configs import base
from tba_jax.experiment import checks

# The default run: fewer queries and updates of the same experiment, and of the behaviours that which asynchrony makes.
SMALL_QUERIES, SMALL_STEPS, STALE = 2, 1000, "50 updates old"
UNTRUNCATED = ("uniform", STALE, "half temperature 2, half top-p 0.8")
TRUNCATED = "top-p 0.8 alone"


def in_parallel(function, cells):
    """function(*cell) by cell, two at a time: XLA lets go of Python's lock."""
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        return dict(zip(cells, pool.map(lambda cell: function(*cell), cells), strict=True))


def train_all(seeds, names, *, queries: int, steps: int):
    """(seed, behaviour) -> TV [points, Q] and the measurements of updates."""
    compiled = posterior.compile_train(queries=queries, steps=steps, every=steps // 10)

    def run(seed: int, name: str):
        problem = posterior.make_problem(seed, queries=queries)
        _, distance, measured = compiled(problem, seed, behavior=posterior.BEHAVIORS[name])
        return np.asarray(distance), jax.tree.map(np.asarray, measured)

    return in_parallel(run, list(itertools.product(seeds, names)))


@pytest.fixture(scope="module")
def problem():
    return jax.tree.map(np.asarray, posterior.make_problem(0))


def test_every_response_is_counted_once():
    assert posterior.N == sum(4**n for n in range(4)) + 4**4 == 341
    rows = {tuple(row[:length]) for row, length in zip(posterior.RESPONSES.tolist(), posterior.LENGTHS, strict=True)}
    assert len(rows) == 341
    for row in rows:
        assert all(token < posterior.EOS for token in row[:-1])
        assert row[-1] == posterior.EOS or len(row) == 4
    np.testing.assert_array_equal(posterior.NUMBER_OF_CODE[posterior.code(posterior.RESPONSES)], np.arange(341))


def test_the_target_is_far_from_where_training_starts(problem):
    ref = np.exp(problem.ref_logprobs.astype(np.float64).sum(-1))
    np.testing.assert_allclose(ref.sum(axis=1), 1, rtol=1e-5)
    unnormalised = ref * np.exp(problem.rewards / posterior.BETA)
    z = unnormalised.sum(axis=1)
    np.testing.assert_allclose(problem.log_z, np.log(z), atol=1e-5)
    np.testing.assert_allclose(problem.target, unnormalised / z[:, None], rtol=1e-4)
    start = np.abs(ref - problem.target).sum(axis=1) / 2
    np.testing.assert_allclose(posterior.total_variation(problem.ref_params, problem), start, atol=1e-5)
    assert start.mean() > 0.35
    uniform = 0.2**posterior.LENGTHS
    assert np.all(np.abs(ref - uniform).sum(axis=1) / 2 > 0.25)


@pytest.mark.parametrize("name", posterior.BEHAVIORS)
def test_rows_carry_what_the_tables_say(problem, name):
    sample = jax.jit(posterior.sample, static_argnames="queries")
    rows = sample(problem.ref_params, jax.random.key(1), posterior.BEHAVIORS[name], queries=posterior.QUERIES)
    batch, policy_logprobs = jax.tree.map(np.asarray, (posterior.as_batch(rows, problem), rows.policy_logprobs))
    mask = np.arange(posterior.R) < batch.response_length[:, None]
    np.testing.assert_allclose(policy_logprobs, batch.ref_logprobs, atol=1e-5)
    responses = batch.tokens[:, 1:]
    for row, (tokens, length, reward) in enumerate(zip(responses, batch.response_length, batch.reward, strict=True)):
        number = posterior.RESPONSES.tolist().index(tokens.tolist())
        assert posterior.LENGTHS[number] == length
        assert problem.rewards[row // posterior.K, number] == reward
    if name == "uniform":
        np.testing.assert_allclose(batch.behavior_logprobs[mask], np.log(0.2), atol=1e-6)
    elif name in ("on-policy", "50 updates old"):
        np.testing.assert_allclose(batch.behavior_logprobs, policy_logprobs, atol=1e-5)
    else:
        truncated = batch.behavior_logprobs.sum(axis=1) > policy_logprobs.sum(axis=1) + 1e-3
        assert truncated[1::2].mean() > 0.5
        assert name == TRUNCATED or not np.allclose(batch.behavior_logprobs[::2], policy_logprobs[::2], atol=0.1)


def test_rows_of_old_policies_lead_to_the_posterior():
    ((distance, measured),) = train_all([1], [STALE], queries=SMALL_QUERIES, steps=SMALL_STEPS).values()
    assert np.all(measured["finite"] == 1)
    assert distance[0].mean() > 0.35
    assert distance[-1].mean() <= 0.1, "truncated rows stay beyond 0.2; the bound is for the slow tests, which train on"
    ratio = measured["ratio_max"].reshape(-1)
    assert ratio[0] == pytest.approx(1, abs=1e-4)  # π_ref's rows, at π_ref
    assert ratio[1:100].max() > 1.5, "rows are as old as the behaviour says"


def test_without_a_reference_the_posterior_is_the_softmax_of_rewards():
    """log π_ref = 0 in rows; training begins from the same network."""
    problem = posterior.make_problem(1, queries=SMALL_QUERIES)
    target = jax.nn.softmax(problem.rewards / posterior.BETA, axis=1)
    assert 0.5 * np.abs(target - problem.target).sum(axis=1).mean() > 0.25, "the other optimum is another distribution"
    without = problem.replace(ref_logprobs=np.zeros_like(problem.ref_logprobs), target=target)
    compiled = posterior.compile_train(queries=SMALL_QUERIES, steps=SMALL_STEPS, every=SMALL_STEPS // 10)
    _, distance, measured = compiled(without, 1, behavior=posterior.BEHAVIORS["on-policy"])
    assert np.all(np.asarray(measured["finite"]) == 1)
    assert distance[0].mean() > 0.35 and distance[-1].mean() <= 0.1


def test_a_config_may_truncate_a_share_of_rows_but_not_all():
    config = base.get_config()
    config.sampling.explore_top_p_probability = 0.5
    checks.check(config)
    config.sampling.top_p = 0.8
    with pytest.raises(ValueError, match=r"sampling\.top_p=0\.8 .*sampling\.explore_top_p_probability"):
        checks.check(config)


@pytest.mark.slow
def test_three_seeds_of_every_behaviour_in_full():
    runs = train_all(range(3), posterior.BEHAVIORS, queries=posterior.QUERIES, steps=4000)
    distances = {name: [float(runs[seed, name][0][-1].mean()) for seed in range(3)] for name in posterior.BEHAVIORS}
    assert all(np.all(measured["finite"] == 1) for _, measured in runs.values())
    for name in UNTRUNCATED:
        assert max(distances[name]) <= posterior.BOUND, distances
    assert np.median(distances["on-policy"]) <= 0.05, distances
    assert min(distances[TRUNCATED]) >= 0.2, distances


@pytest.mark.slow
@pytest.mark.parametrize("completions", [posterior.K, 1])
def test_learned_log_z_becomes_the_exact_one(completions):
    problem = posterior.make_problem(0, queries=SMALL_QUERIES)
    state, distance, _ = posterior.train(
        problem,
        0,
        behavior=posterior.BEHAVIORS["uniform"],
        steps=4000,
        every=400,
        objective="learned_log_z",
        completions=completions,
    )
    assert distance[-1].mean() <= posterior.BOUND
    np.testing.assert_allclose(posterior.predicted_log_z(state, queries=SMALL_QUERIES), problem.log_z, atol=0.05)
