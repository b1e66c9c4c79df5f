"""Signal and noise of gradients, from streamed sums, against the gradients of all groups at once."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from tba_jax.learner import gradient_noise, update
from tba_jax.models import scoring
from tests.support import tiny_updates
from tests.support.tiny_updates import BETA, POLICY, SPACE, K, Q, R


def group(batch: update.Batch, q: int) -> update.Batch:
    return jax.tree.map(lambda x: x[q * K : (q + 1) * K], batch)


def direct_gradients(params, batch: update.Batch) -> np.ndarray:
    """float64[Q, parameters]: −mean_j A_j ∇ log π(y_j), A = r − β (log π − log π_ref) less its mean: VarGrad's, in rewards."""

    def logprob_sums(params, rows: update.Batch) -> jax.Array:
        columns = rows.tokens, rows.prompt_length, rows.response_length
        limits = dict(R=R, space=SPACE, logit_bytes=1 << 20, remat="none")
        return scoring.response_logprobs(POLICY.for_training(params, {}), *columns, **limits)[0].sum(axis=1)

    found = []
    with_jacobian = jax.jit(lambda params, rows: (jax.jacobian(logprob_sums)(params, rows), logprob_sums(params, rows)))
    for q in range(Q):
        rows = group(batch, q)
        jacobian, logprobs = with_jacobian(params, rows)
        score = np.concatenate([np.asarray(each, np.float64).reshape(K, -1) for each in jax.tree.leaves(jacobian)], axis=1)
        kl = np.asarray(logprobs, np.float64) - rows.ref_logprobs.sum(axis=1)
        advantage = rows.reward - BETA * kl
        found.append(-((advantage - advantage.mean()) @ score) / K)
    return np.array(found)


def test_streamed_sums_are_those_of_all_gradients():
    params, batch = tiny_updates.random_params(), tiny_updates.random_batch()
    config = tiny_updates.settings()
    inputs_of = functools.partial(update.objective_inputs, step=jnp.asarray(3), schedules=tiny_updates.schedules(), config=config)
    add = jax.jit(functools.partial(gradient_noise.add_group, inputs_of=inputs_of, config=config), donate_argnums=0)
    sums = gradient_noise.no_sums(params)
    for q in range(Q):
        sums = add(sums, params, {}, group(batch, q))
    found, g = gradient_noise.noise(sums, Q), direct_gradients(params, batch)
    products = g @ g.T
    signal = (products.sum() - np.trace(products)) / (Q * (Q - 1))
    variance = np.cov(g.T).trace()
    np.testing.assert_allclose((found.signal, found.variance), (signal, variance), rtol=1e-4)
    np.testing.assert_allclose(found.ratio, signal / variance, rtol=1e-4)
    np.testing.assert_allclose(found.stderr, np.std((g**2).sum(axis=1), ddof=1) / Q**0.5, rtol=1e-3)
    assert found.groups == Q


def test_the_signal_is_without_bias():
    """Its mean over all pairs of groups is that of all groups, and gradients of noise alone have none on average."""
    rng = np.random.default_rng(0)

    def noise(g: np.ndarray) -> gradient_noise.Noise:
        square = (g**2).sum(axis=1)
        total = {"weight": jnp.asarray(g.sum(axis=0))}
        return gradient_noise.noise(gradient_noise.Sums(total=total, squares=square.sum(), fourths=(square**2).sum()), len(g))

    mean = np.array([0.5, -0.25, 0.0])
    many = [noise(mean + rng.normal(size=(4, 3))) for _ in range(4000)]
    np.testing.assert_allclose(np.mean([each.signal for each in many]), (mean**2).sum(), atol=0.04)
    np.testing.assert_allclose(np.mean([each.variance for each in many]), 3.0, atol=0.1)
    assert min(each.signal for each in many) < 0
    same = noise(np.tile(mean, (5, 1)).astype(np.float32))
    np.testing.assert_allclose((same.signal, same.variance), ((mean**2).sum(), 0.0), atol=1e-6)


def test_a_group_of_another_size_is_its_own_mean():
    """A gradient is a mean over the rows of its group, so a group twice over has the same."""
    params, batch = tiny_updates.random_params(), group(tiny_updates.random_batch(), 0)
    twice = jax.tree.map(lambda x: np.concatenate([x, x]), batch)
    found = []
    for rows in (batch, twice):
        config = tiny_updates.settings()
        settings = dataclasses.replace(config.settings, completions=len(rows.reward))
        config = dataclasses.replace(config, settings=settings)
        of_step = dict(step=jnp.asarray(0), schedules=tiny_updates.schedules())
        inputs_of = functools.partial(update.objective_inputs, **of_step, config=config)
        add = jax.jit(functools.partial(gradient_noise.add_group, inputs_of=inputs_of, config=config))
        sums = add(gradient_noise.no_sums(params), params, {}, rows)
        found.append(float(sums.squares))
    np.testing.assert_allclose(found[0], found[1], rtol=1e-4)
    assert found[0] > 0


def test_groups_are_disjoint_and_of_one_query():
    query = np.random.default_rng(0).integers(0, 5, 60)
    for size in (2, 4, 8):
        found = gradient_noise.groups_of(query, size, most=1000, seed=1)
        assert len(np.unique(found)) == found.size and len(found) == sum(n // size for n in np.bincount(query))
        assert (query[found] == query[found][:, :1]).all()
    assert gradient_noise.groups_of(query, 2, most=3, seed=1).shape == (3, 2)
    assert gradient_noise.groups_of(query, 64, most=3, seed=1).shape == (0, 64)
