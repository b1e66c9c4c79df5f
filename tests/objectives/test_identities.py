"""What the TBA paper says of trajectory balance, TBA′ and policy gradients: expectations by enumeration, optima. In float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.expected_gradients import BETA, OPTIMUM, REF_LOGPROBS, REWARD, SKEWED, THETA, UNIFORM, expected_gradient
from tests.support.objective_loops import FORMS, evaluate, random_batch

# By form, the gradient expected over on-policy groups of K divided by ∇(E[r] − β KL).
EXPECTED_SCALE = {
    "trajectory_balance": lambda K: -(2 / BETA) * (1 - 1 / K),
    "learned_log_z": lambda K: -(2 / BETA),
    "tba_prime": lambda K: -(1 - 1 / K),
    "tba_prime, unweighted": lambda K: -(1 - 1 / K),
    "tba_prime, by row": lambda K: -(1 - 1 / K) / 4,  # a prompt of 3 tokens, and a response of one
    "reinforce": lambda K: -(1 - 1 / K),
    "rloo": lambda K: -1.0,
    "proximal_rloo": lambda K: -1.0,
    "ppo": lambda K: -1.0,
    "a_star_po": lambda K: -2 * BETA,
}


@pytest.fixture(autouse=True)
def in_float64():
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize("sizes, beta, dtype", [((1, 2, 3), 1.0, np.float64), ((2, 16, 12), 0.004, np.float32)], ids=str)
def test_the_gradient_is_reinforce_with_a_mean_baseline(sizes, beta, dtype):
    """∇L = −(2/β) · mean_ij A_ij ∇ log π_θ(y_ij|x_i), A_ij = (r_ij − r̄_i) − β (k_ij − k̄_i), on any batch."""
    outputs, inputs = random_batch(*sizes, beta=beta, dtype=dtype)
    kl = np.where(inputs.mask, outputs.logprobs - inputs.ref_logprobs, 0).sum(1, dtype=np.float64)
    regularised = (inputs.reward - float(inputs.beta) * kl).reshape(sizes[0], -1)
    advantage = (regularised - regularised.mean(1, keepdims=True)).reshape(-1, 1)
    expected = np.where(inputs.mask, -(2 / float(inputs.beta)) * advantage / len(kl), 0.0)
    found = evaluate("trajectory_balance", outputs, inputs)[1].logprobs
    tolerance = 1e-5 if dtype == np.float32 else 1e-12
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * np.abs(expected).max())


def regularised_reward(theta: jax.Array) -> jax.Array:
    """E[r] − β KL(π_θ‖π_ref), exactly."""
    logprobs = jax.nn.log_softmax(theta)
    return jnp.sum(jnp.exp(logprobs) * (REWARD - BETA * (logprobs - REF_LOGPROBS)))


@pytest.mark.parametrize("form", EXPECTED_SCALE)
def test_on_policy_gradients_are_of_the_regularised_reward(form, K=3):
    found = np.asarray(expected_gradient(jnp.asarray(THETA), jax.nn.softmax(THETA), K=K, form=form))
    ascent = np.asarray(jax.grad(regularised_reward)(jnp.asarray(THETA)))
    assert np.abs(ascent).max() > 0.05
    np.testing.assert_allclose(found, EXPECTED_SCALE[form](K) * ascent, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("form", sorted(set(FORMS) - set(EXPECTED_SCALE)))
def test_from_the_reference_the_others_raise_the_reward(form):
    """On-policy, in expectation, where the KL is at its least: descent goes about the way of ∇E[r]."""
    found = np.asarray(expected_gradient(jnp.asarray(REF_LOGPROBS), jnp.exp(REF_LOGPROBS), K=3, form=form))
    ascent = np.asarray(jax.grad(lambda theta: jax.nn.softmax(theta) @ REWARD)(jnp.asarray(REF_LOGPROBS)))
    cosine = -found @ ascent / np.linalg.norm(found) / np.linalg.norm(ascent)
    assert cosine > (1 - 1e-9 if form in ("vine_ppo", "dr_grpo") else 0.8)


@pytest.mark.parametrize("form", EXPECTED_SCALE)
def test_off_policy_only_importance_weights_keep_it(form):
    """Of responses of one token, where no weight is clipped."""
    found = np.asarray(expected_gradient(jnp.asarray(THETA), jnp.asarray(SKEWED), K=3, form=form))
    expected = EXPECTED_SCALE[form](3) * np.asarray(jax.grad(regularised_reward)(jnp.asarray(THETA)))
    if form in ("tba_prime", "tba_prime, by row", "proximal_rloo", "ppo"):
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)
    else:
        assert np.abs(found - expected).max() > 0.1 * np.abs(expected).max()


@pytest.mark.parametrize("behavior", [UNIFORM, SKEWED], ids=["uniform", "skewed"])
def test_whoever_samples_the_optimum_is_the_target(behavior):
    """Of full support: no gradient at p*, some elsewhere, and its descent from anywhere ends at p*."""
    behavior = jnp.asarray(behavior)
    assert np.abs(expected_gradient(jnp.asarray(OPTIMUM), behavior, K=2)).max() < 1e-12
    assert np.abs(expected_gradient(jnp.asarray(OPTIMUM).at[0].add(0.1), behavior, K=2)).max() > 1e-3

    @jax.jit
    def descend(theta: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 2000, lambda _, theta: theta - 0.5 * expected_gradient(theta, behavior, K=2), theta)

    for start in (THETA, -THETA):
        reached = jax.nn.softmax(descend(jnp.asarray(start)))
        np.testing.assert_allclose(reached, jax.nn.softmax(OPTIMUM), atol=1e-6)


def test_a_truncated_sampler_alone_misses_the_target():
    """What is never sampled is never corrected: any policy with p*'s ratios on the rest has no gradient."""
    missed = jnp.asarray(OPTIMUM).at[4].add(1.5)
    assert np.abs(expected_gradient(missed, jnp.asarray([0.4, 0.3, 0.2, 0.1, 0.0]), K=2)).max() < 1e-12
    assert np.abs(expected_gradient(missed, jnp.asarray(UNIFORM), K=2)).max() > 1e-2


def test_tba_prime_without_weights_is_trajectory_balance(temperatures=(1.7, 0.6)):
    """Its gradient is β/(2R) of trajectory balance's where no log-ratio is clipped, and another where one is."""
    R, (gamma, tau) = 7, temperatures
    settings = dict(ref_temperature=gamma, reward_temperature=tau, importance_clip=0.0)
    for outliers, same in ((0.0, True), (0.1, False)):
        outputs, inputs = random_batch(3, 4, R, outliers=outliers, **settings)
        clipped = np.abs(outputs.logprobs - inputs.ref_logprobs / (gamma * tau)) > inputs.settings.log_ratio_clip
        assert clipped[inputs.mask].any() != same
        found = evaluate("tba_prime", outputs, inputs)[1].logprobs
        expected = evaluate("trajectory_balance", outputs, inputs)[1].logprobs * 0.3 / (2 * R)
        assert np.allclose(found, expected, rtol=1e-10, atol=1e-14) == same
