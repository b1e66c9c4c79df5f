"""The siblings of trajectory balance: the optimum of each, on which rows, and what tells them from each other.

Expectations are exact sums over all groups of responses. Optima are computed from the equations, not by descent.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import optimize, special

from tests.support.expected_gradients import (
    BETA,
    OPTIMUM,
    REF_LOGPROBS,
    REWARD,
    SKEWED,
    THETA,
    UNIFORM,
    expected_gradient,
    expected_gradients,
)

K = 3
DELTA, BASELINE = -3.0, -1.0  # every advantage of AsymRE and every R of TOPR is above 0
CHANGES = {"asymre": {"asymre_delta": DELTA}, "topr": {"topr_baseline": BASELINE}}
BEHAVIORS = {"uniform": np.array(UNIFORM), "skewed": np.array(SKEWED)}


@pytest.fixture(autouse=True)
def in_float64():
    with jax.enable_x64(True):
        yield


def expected_estimate(estimate, mu: np.ndarray, *, others: int) -> np.ndarray:
    """E[ estimate(other responses, own response) ] by own response, over all others that μ can draw."""
    found = np.zeros(len(mu))
    for group in itertools.product(range(len(mu)), repeat=others):
        weight = np.prod(mu[list(group)])
        found += weight * np.array([estimate(list(group), own) for own in range(len(mu))])
    return found


def regression(mu: np.ndarray, aim: np.ndarray) -> np.ndarray:
    """The distribution that minimises E_μ ( log π/μ − aim )², by constrained minimisation."""
    start = np.log(mu)
    found = optimize.minimize(
        lambda z: float(mu @ (special.log_softmax(z) - np.log(mu) - aim) ** 2), start, method="BFGS", options={"gtol": 1e-12}
    )
    return special.softmax(found.x)


def value_of(rewards: list[float], log_weights: list[float]) -> float:
    return BETA * np.log(np.mean(np.exp(np.array(log_weights) + np.array(rewards) / BETA)))


def optimum(name: str, mu: np.ndarray) -> np.ndarray:
    """What groups of K rows of μ lead to."""
    if name == "oapl":
        values = expected_estimate(lambda group, own: value_of([*REWARD[group], REWARD[own]], [0.0] * K), mu, others=K - 1)
        return regression(mu, (REWARD - values) / BETA)
    if name == "pmd_mean":
        return regression(mu, (1 - 1 / K) * (REWARD - mu @ REWARD) / BETA)
    if name == "a_star_po":
        log_weight = REF_LOGPROBS - np.log(mu)
        values = expected_estimate(lambda group, _: value_of(REWARD[group], log_weight[group]), mu, others=K - 1)
        return regression(mu, log_weight + (REWARD - values) / BETA)
    if name == "asymre":
        weight = mu * ((1 - 1 / K) * (REWARD - mu @ REWARD) - DELTA)
    else:
        assert name == "topr"
        weight = mu * (REWARD - BASELINE)
    return weight / weight.sum()


@functools.partial(jax.jit, static_argnames=("name", "steps"))
def descend(theta: jax.Array, behavior: jax.Array, *, name: str, steps: int = 6000) -> jax.Array:
    def step(_: int, theta: jax.Array) -> jax.Array:
        return theta - 0.5 * expected_gradient(theta, behavior, K=K, form=name, **CHANGES.get(name, {}))

    return jax.nn.softmax(jax.lax.fori_loop(0, steps, step, theta))


@pytest.mark.parametrize("behavior", BEHAVIORS)
@pytest.mark.parametrize("name", ["oapl", "pmd_mean", "a_star_po", "asymre", "topr"])
def test_descent_on_rows_of_one_policy_ends_at_the_objectives_own_optimum(name, behavior):
    mu = BEHAVIORS[behavior]
    expected = optimum(name, mu)
    assert np.abs(expected - mu).sum() / 2 > 0.05, "it is not who drew the rows"
    for start in (THETA, -THETA):
        np.testing.assert_allclose(descend(jnp.asarray(start), jnp.asarray(mu), name=name), expected, atol=1e-5)


@pytest.mark.parametrize("behavior", BEHAVIORS)
def test_flowrl_ends_where_its_residual_is_zero_on_average(behavior):
    """Responses of one token: π_ref·exp(E[r̂|y]/β) / Z, with r̂ of the group."""
    mu = BEHAVIORS[behavior]

    def standardised(group: list[int], own: int) -> float:
        rewards = np.array([REWARD[own], *REWARD[group]])
        return float((rewards[0] - rewards.mean()) / (rewards.std() + 1e-6))

    scaled = expected_estimate(standardised, mu, others=K - 1) / BETA
    log_target = REF_LOGPROBS + scaled

    @jax.jit
    def descend(theta: jax.Array) -> tuple[jax.Array, jax.Array]:
        def step(_: int, at: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            by_theta, by_log_z = expected_gradients(*at, jnp.asarray(mu), K=K, form="flowrl", changes=(("clip_high", 1e6),))
            return at[0] - 0.3 * by_theta, at[1] - 0.3 * by_log_z

        return jax.lax.fori_loop(0, 6000, step, (theta, jnp.zeros(())))

    theta, log_z = descend(jnp.asarray(THETA))
    np.testing.assert_allclose(jax.nn.softmax(theta), special.softmax(log_target), atol=1e-5)
    np.testing.assert_allclose(log_z, special.logsumexp(log_target), atol=1e-4)
    assert np.abs(special.softmax(log_target) - special.softmax(OPTIMUM)).sum() / 2 > 0.02, "it is not p*"


@pytest.mark.parametrize("behavior", [UNIFORM, SKEWED, None], ids=["uniform", "skewed", "on-policy"])
def test_only_rows_of_the_policy_itself_make_p_star_the_optimum_of_a_star_po(behavior):
    mu = jax.nn.softmax(jnp.asarray(OPTIMUM)) if behavior is None else jnp.asarray(behavior)
    at_optimum = np.abs(expected_gradient(jnp.asarray(OPTIMUM), mu, K=K, form="a_star_po")).max()
    assert at_optimum < 1e-12 if behavior is None else at_optimum > 1e-3


@pytest.mark.parametrize("name, scale", [("pmd_mean", 2 * BETA * (1 - 1 / K)), ("asymre", 1 - 1 / K), ("topr", 1.0)])
def test_on_policy_they_follow_the_reward_alone(name, scale):
    """There is no optimum but the largest reward: at p*, too, descent goes the way of ∇E[r]."""
    for theta in (OPTIMUM, THETA):
        ascent = np.asarray(jax.grad(lambda theta: jax.nn.softmax(theta) @ REWARD)(jnp.asarray(theta)))
        found = expected_gradient(jnp.asarray(theta), jax.nn.softmax(theta), K=K, form=name, **CHANGES.get(name, {}))
        np.testing.assert_allclose(found, -scale * ascent, rtol=1e-9, atol=1e-12)
