"""Expectations and optima of losses by enumeration, in float64: one query, and responses of one token each."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

from benchmarks import siblings
from tba_jax.objectives import OBJECTIVES
from tba_jax.objectives.objective import ObjectiveInputs, ObjectiveSettings, PolicyOutputs
from tests.support.objective_loops import FORMS, evaluate, random_batch, rows_of

BETA = 0.4
REWARD = np.array([1.0, 0.0, 0.3, -0.5, 2.0])
REF_LOGPROBS = np.log([0.1, 0.3, 0.25, 0.2, 0.15])
OPTIMUM = REF_LOGPROBS + REWARD / BETA
THETA = np.array([0.4, -0.7, 0.1, 0.9, -0.3])
UNIFORM, SKEWED = [0.2] * 5, [0.6, 0.05, 0.05, 0.1, 0.2]
UNCLIPPED = {"clip_low": 1.0, "clip_high": 1e6, "flow_gap_low": 1e3, "flow_gap_high": 1e3}


def group_gradient(theta: jax.Array, log_z: jax.Array, group: jax.Array, behavior: jax.Array, form: str, changes: dict) -> tuple:
    """∇ L of the policy softmax(θ) on one group, int[K], of responses that `behavior` drew: by θ, float64[n], and by log Z."""
    name, settings = FORMS[form]
    K = group.shape[0]
    columns = dict(ref_logprobs=jnp.asarray(REF_LOGPROBS)[group][:, None], behavior_logprobs=jnp.log(behavior)[group][:, None])
    columns |= dict(mask=jnp.ones((K, 1), bool), reward=jnp.asarray(REWARD)[group], prompt_length=jnp.full(K, 3))
    columns |= dict(state_values=jnp.broadcast_to(log_z, (K, 1)))
    coefficients = dict(beta=jnp.asarray(BETA), ref_temperature=jnp.ones(()), reward_temperature=jnp.ones(()))
    changed = ObjectiveSettings(completions=K, **settings | UNCLIPPED | changes)
    inputs = ObjectiveInputs(**columns, **coefficients, settings=changed)

    def loss(theta: jax.Array, log_z: jax.Array) -> jax.Array:
        logprobs = jax.nn.log_softmax(theta)[group][:, None]
        heads = dict(log_z=jnp.broadcast_to(log_z, (K,)), values=jnp.broadcast_to(log_z, (K, 1)))
        return OBJECTIVES[name].loss(PolicyOutputs(logprobs=logprobs, **heads), inputs)

    return jax.grad(loss, argnums=(0, 1))(theta, log_z)


@functools.partial(jax.jit, static_argnames=("K", "form", "changes"))
def expected_gradients(theta, log_z, behavior, *, K: int, form: str = "trajectory_balance", changes: tuple = ()) -> tuple:
    """E[∇ L] over all n^K groups that `behavior`, float64[n] probabilities, can draw. changes: of ObjectiveSettings."""
    groups = jnp.asarray(list(itertools.product(range(theta.shape[0]), repeat=K)))
    by_theta, by_log_z = jax.vmap(lambda group: group_gradient(theta, log_z, group, behavior, form, dict(changes)))(groups)
    weight = jnp.prod(behavior[groups], axis=1)
    return weight @ by_theta, weight @ by_log_z


def expected_gradient(theta, behavior, *, K: int, form: str = "trajectory_balance", log_z: float = 0.7, **changes) -> jax.Array:
    """E[∇_θ L], see expected_gradients."""
    return expected_gradients(theta, jnp.asarray(log_z), behavior, K=K, form=form, changes=tuple(changes.items()))[0]


@pytest.fixture(autouse=True)
def in_float64():
    with jax.enable_x64(True):
        yield


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
    "gflowrl": lambda K: -(2 / BETA) * (1 - 1 / K),
    "frozen_log_z": lambda K: -(2 / BETA),
}


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


@pytest.mark.parametrize("behavior", [UNIFORM, SKEWED], ids=["uniform", "skewed"])
@pytest.mark.parametrize("form", ["optimal_baseline", *(form for form in FORMS if "trajectory_balance" in form)])
def test_whoever_samples_the_optimum_is_the_target(behavior, form):
    """Of full support: no gradient at p*, and some elsewhere."""
    behavior = jnp.asarray(behavior)
    assert np.abs(expected_gradient(jnp.asarray(OPTIMUM), behavior, K=2, form=form)).max() < 1e-12
    assert np.abs(expected_gradient(jnp.asarray(OPTIMUM).at[0].add(0.1), behavior, K=2, form=form)).max() > 1e-4


@pytest.mark.parametrize("alpha", [-1.0, 1e-3, 0.5, 1.0, 2.0])
def test_on_policy_f_trajectory_balance_follows_its_divergence(alpha):
    """A group that has each response as often as the policy draws it: twice the gradient of the α-divergence's Rényi form."""
    often = np.array([2, 5, 3, 9, 1])
    group, probs = np.repeat(np.arange(5), often), often / often.sum()
    found = group_gradient(jnp.log(probs), jnp.zeros(()), group, probs, "f_trajectory_balance", {"divergence_alpha": alpha})[0]

    def divergence(theta: jax.Array) -> jax.Array:
        logprobs, target = jax.nn.log_softmax(theta), jax.nn.log_softmax(OPTIMUM)
        if alpha == 1:
            return jnp.sum(jnp.exp(target) * (target - logprobs))
        return jax.nn.logsumexp(logprobs + alpha * (target - logprobs)) / (alpha * (alpha - 1))

    expected = np.asarray(jax.grad(divergence)(jnp.log(probs)))
    assert np.abs(expected).max() > 0.05
    np.testing.assert_allclose(found, 2 * expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("gap_bound", [1e3, 0.8])
@pytest.mark.parametrize("behavior", [UNIFORM, SKEWED], ids=["uniform", "skewed"])
def test_gflowrl_ends_a_step_from_who_drew_the_rows(behavior, gap_bound):
    """μ·exp(−E[g|y]), g being the flow gap in groups of K: where no bound is met, μ^(1/K) p̃^(1 − 1/K)."""
    mu = np.array(behavior)
    residual = np.log(mu) - OPTIMUM

    def gap(group: list[int], own: int) -> float:
        return float(np.clip(residual[own] - residual[[own, *group]].mean(), -gap_bound, 2 * gap_bound))

    expected = special.softmax(np.log(mu) - expected_estimate(gap, mu, others=K - 1))
    assert_only_optimum("gflowrl", mu, expected, flow_gap_low=gap_bound, flow_gap_high=2 * gap_bound)
    mixed = special.softmax(np.log(mu) / K + (1 - 1 / K) * OPTIMUM)
    assert (np.abs(expected - mixed).max() < 1e-9) == (gap_bound > 1)


@pytest.mark.parametrize("error", [0.0, -0.3])
def test_an_error_of_the_frozen_log_z_moves_its_optimum(error):
    log_z, mu = float(special.logsumexp(OPTIMUM)), np.array(SKEWED)
    expected = siblings.frozen_log_z(REWARD, np.log(mu), REF_LOGPROBS, beta=BETA, error=error)
    p_star, rare = special.softmax(OPTIMUM), int(np.argmin(mu))
    assert (np.abs(expected - p_star).max() < 1e-6) == (error == 0)
    assert error == 0 or expected[rare] / p_star[rare] < (expected / p_star)[mu.argmax()]
    for moved, is_optimum in ((0.0, True), (0.1, False)):
        at = jnp.log(expected).at[0].add(moved), jnp.asarray(log_z + error), jnp.asarray(mu)
        found = expected_gradients(*at, K=K, form="frozen_log_z")
        assert (np.abs(found[0]).max() < 1e-5) == is_optimum
        assert found[1] == 0, "nothing is learned"


def test_no_baseline_has_less_variance_than_the_optimal_one():
    """Of gradients Σ w (R − b) ∇ log π in a group whose rows have gradients of norm √|y|, by moving b."""
    outputs, inputs = random_batch(1, 6, 5, importance_clip=1e6)
    weights = np.exp([row.to_behavior for row in rows_of(outputs, inputs)])
    lengths = np.maximum(inputs.mask.sum(axis=1), 1)
    # The loss is linear in each row's log-prob, so that its gradient is −w (R − b) / K on every token.
    _, gradient = evaluate("optimal_baseline", outputs, inputs)
    real = inputs.mask.any(axis=1)
    advantage = np.zeros(6)
    advantage[real] = [-6 * of[mask][0] for of, mask in zip(gradient.logprobs[real], inputs.mask[real], strict=True)]
    assert np.abs(advantage).max() > 0.01
    rewards = np.array([row.reward - inputs.beta * row.to_ref for row in rows_of(outputs, inputs)])
    of_baseline = rewards - np.divide(advantage, weights)
    baseline = of_baseline[real][0]
    np.testing.assert_allclose(of_baseline[real], baseline, rtol=1e-9)

    def variance(b: float) -> float:
        return float(np.sum(weights**2 * lengths * (rewards - b) ** 2))

    assert variance(baseline) < min(variance(baseline - 0.01), variance(baseline + 0.01), variance(rewards.mean()))


def test_tpo_is_at_rest_where_the_group_has_the_tilted_distribution():
    """p = q in a group of different responses, whatever mass the others have; a step further there is a gradient."""
    group, mu = np.array([0, 2, 4]), np.array(SKEWED)
    reward = REWARD[group]
    tilt = (reward - reward.mean()) / (reward.std() + 1e-6) / BETA
    rest = jnp.asarray(THETA).at[group].set(np.log(mu[group]) + tilt)
    for theta, is_at_rest in ((rest, True), (rest.at[4].add(0.1), False)):
        found = group_gradient(theta, jnp.zeros(()), jnp.asarray(group), jnp.asarray(mu), "tpo", {})[0]
        assert (np.abs(found).max() < 1e-12) == is_at_rest


@pytest.mark.parametrize("K", [1, 2, 4])
def test_on_policy_maxrl_follows_the_likelihood_of_success_up_to_order_k(monkeypatch, K):
    success = np.array([1.0, 0.0, 0.0, 1.0, 0.0])
    monkeypatch.setitem(globals(), "REWARD", success)
    groups = np.array(list(itertools.product(range(5), repeat=K)))
    probs = np.asarray(jax.nn.softmax(THETA))
    arguments = jnp.zeros(()), jnp.asarray(probs), "maxrl", {}
    gradients = jax.vmap(lambda group: group_gradient(jnp.asarray(THETA), arguments[0], group, *arguments[1:])[0])(groups)
    found = probs[groups].prod(axis=1) @ gradients

    def failures(theta: jax.Array) -> jax.Array:
        failure = 1 - jax.nn.softmax(theta) @ success
        return sum((failure**k / k for k in range(1, K)), jnp.zeros(()))

    np.testing.assert_allclose(found, jax.grad(failures)(jnp.asarray(THETA)), rtol=1e-9, atol=1e-12)


def test_a_truncated_sampler_alone_misses_the_target():
    """What is never sampled is never corrected: any policy with p*'s ratios on the rest has no gradient."""
    missed = jnp.asarray(OPTIMUM).at[4].add(1.5)
    assert np.abs(expected_gradient(missed, jnp.asarray([0.4, 0.3, 0.2, 0.1, 0.0]), K=2)).max() < 1e-12
    assert np.abs(expected_gradient(missed, jnp.asarray(UNIFORM), K=2)).max() > 1e-2


# Siblings: optima are computed from the equations, not by descent

K = 3
DELTA, BASELINE = -3.0, -1.0  # every advantage of AsymRE and every R of TOPR is above 0
CHANGES = {"asymre": {"asymre_delta": DELTA}, "topr": {"topr_baseline": BASELINE}}
BEHAVIORS = {"uniform": np.array(UNIFORM), "skewed": np.array(SKEWED)}


def expected_estimate(estimate, mu: np.ndarray, *, others: int) -> np.ndarray:
    """E[ estimate(other responses, own response) ] by own response, over all others that μ can draw."""
    found = np.zeros(len(mu))
    for group in itertools.product(range(len(mu)), repeat=others):
        weight = np.prod(mu[list(group)])
        found += weight * np.array([estimate(list(group), own) for own in range(len(mu))])
    return found


def value_of(rewards: list[float], log_weights: list[float]) -> float:
    return BETA * np.log(np.mean(np.exp(np.array(log_weights) + np.array(rewards) / BETA)))


def optimum(name: str, mu: np.ndarray) -> np.ndarray:
    """What groups of K rows of μ lead to."""
    log_mu = np.log(mu)
    log_weight = REF_LOGPROBS - log_mu
    if name == "oapl":
        values = expected_estimate(lambda group, own: value_of([*REWARD[group], REWARD[own]], [0.0] * K), mu, others=K - 1)
        return siblings.regression(log_mu, (REWARD - values) / BETA)
    if name == "a_star_po":
        values = expected_estimate(lambda group, _: value_of(REWARD[group], log_weight[group]), mu, others=K - 1)
        return siblings.regression(log_mu, log_weight + (REWARD - values) / BETA)
    given = {"pmd_mean": dict(beta=BETA, K=K), "asymre": dict(delta=DELTA, K=K), "topr": dict(baseline=BASELINE)}
    return siblings.FORMS[name].optimum(REWARD, log_mu, REF_LOGPROBS, **given[name])


def assert_only_optimum(name: str, mu: np.ndarray, optimum: np.ndarray, log_z: float = 0.0, **changes: float) -> None:
    """There the expected gradient is 0, by θ and by log Z, and elsewhere it is not."""
    for moved, is_optimum in ((0.0, True), (0.1, False)):
        at = jnp.log(optimum).at[0].add(moved), jnp.asarray(log_z), jnp.asarray(mu)
        found = expected_gradients(*at, K=K, form=name, changes=tuple((CHANGES.get(name, {}) | changes).items()))
        assert (max(np.abs(each).max() for each in found) < 1e-5) == is_optimum


@pytest.mark.parametrize("behavior", BEHAVIORS)
@pytest.mark.parametrize("name", ["oapl", "pmd_mean", "a_star_po", "asymre", "topr"])
def test_on_rows_of_one_policy_the_optimum_is_the_objectives_own(name, behavior):
    mu = BEHAVIORS[behavior]
    expected = optimum(name, mu)
    assert np.abs(expected - mu).sum() / 2 > 0.05, "it is not who drew the rows"
    assert_only_optimum(name, mu, expected)


@pytest.mark.parametrize("behavior", BEHAVIORS)
def test_flowrl_with_a_linear_log_z_ends_where_its_residual_is_zero_on_average(behavior):
    """Responses of one token: π_ref·exp(E[r̂|y]/β) / Z, with r̂ of the group."""
    mu = BEHAVIORS[behavior]

    def standardised(group: list[int], own: int) -> float:
        rewards = np.array([REWARD[own], *REWARD[group]])
        return float((rewards[0] - rewards.mean()) / (rewards.std() + 1e-6))

    log_target = REF_LOGPROBS + expected_estimate(standardised, mu, others=K - 1) / BETA
    assert_only_optimum("flowrl_linear_z", mu, special.softmax(log_target), special.logsumexp(log_target), clip_high=1e6)
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
