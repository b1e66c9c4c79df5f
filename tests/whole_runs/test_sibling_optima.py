"""Training with a sibling of trajectory balance reaches that objective's own optimum on the enumerated space.

The optimum is computed from the objective's equation for groups of K rows (benchmarks/optima.py).
"""

import functools

import numpy as np
import pytest
from scipy import special

from benchmarks import optima, posterior

QUERIES, STEPS, BOUND = 2, 4000, 0.07
K = posterior.K
# Settings of the loss, β, and arguments of its optimum. All advantages of AsymRE and TOPR are above 0.
FORMS = {
    "oapl": ((), posterior.BETA, dict(beta=posterior.BETA, K=K)),
    "pmd_mean": ((), posterior.BETA, dict(beta=posterior.BETA, K=K)),
    "a_star_po": ((), posterior.BETA, dict(beta=posterior.BETA, K=K)),
    "flowrl": ((("clip_low", 1.0), ("clip_high", 9.0)), 2.0, dict(beta=2.0, K=K)),
    "asymre": ((("asymre_delta", -3.0),), posterior.BETA, dict(delta=-3.0, K=K)),
    "topr": ((("topr_baseline", -3.0),), posterior.BETA, dict(baseline=-3.0)),
}


@functools.cache
def problem(seed: int = 0) -> posterior.Problem:
    return posterior.make_problem(seed, queries=QUERIES)


def log_ref() -> np.ndarray:
    return np.asarray(problem().ref_logprobs, np.float64).sum(axis=-1)


def optimum(name: str, log_mu: np.ndarray) -> np.ndarray:
    """float64[Q, N], of rows that are drawn from μ."""
    rewards = np.asarray(problem().rewards, np.float64)
    of_query = getattr(optima, name)
    return np.stack([of_query(rewards[q], log_mu, log_ref()[q], **FORMS[name][2]) for q in range(QUERIES)])


def distance(a: np.ndarray, b: np.ndarray) -> float:
    return float(0.5 * np.abs(a - b).sum(axis=-1).mean())


@functools.cache
def compiled(name: str):
    settings, beta, _ = FORMS[name]
    return posterior.compile_train(queries=QUERIES, steps=STEPS, every=STEPS // 10, objective=name, beta=beta, settings=settings)


def train(name: str, behavior: str, target: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """TV to the target, means over queries, [points]; and the last policy, float64[Q, N]."""
    of = problem().replace(target=target.astype(np.float32))
    state, found, measured = compiled(name)(of, 0, behavior=posterior.BEHAVIORS[behavior])
    assert np.all(np.asarray(measured["finite"]) == 1)
    logprobs = posterior.enumerate_logprobs(state.params["policy"], QUERIES)
    return np.asarray(found).mean(axis=-1), np.exp(np.asarray(logprobs, np.float64).sum(axis=-1))


def test_the_regression_is_the_minimum_of_its_loss():
    rng = np.random.default_rng(0)
    log_mu, aim = special.log_softmax(rng.normal(size=30)), rng.normal(size=30)
    found = optima.regression(log_mu, aim)
    assert found.sum() == pytest.approx(1)

    def loss(z: np.ndarray) -> float:
        return float(np.exp(log_mu) @ (special.log_softmax(z) - log_mu - aim) ** 2)

    best = np.log(found)
    for _ in range(200):
        assert loss(best + 1e-3 * rng.normal(size=30)) > loss(best)
    exact = special.softmax(log_mu + aim)
    shifted = aim - special.logsumexp(log_mu + aim)
    np.testing.assert_allclose(optima.regression(log_mu, shifted), exact, rtol=1e-6)


def test_the_optima_are_different_distributions():
    log_mu = optima.uniform_log_probs()
    assert np.exp(log_mu).sum() == pytest.approx(1)
    found = {name: optimum(name, log_mu) for name in FORMS}
    found["p*"] = np.asarray(problem().target, np.float64)
    found["sampler"] = np.exp(log_mu)
    for name, distribution in found.items():
        np.testing.assert_allclose(distribution.sum(axis=-1), 1, rtol=1e-6)
        others = [distance(distribution, other) for key, other in found.items() if key != name]
        # AsymRE and TOPR differ by the mean reward in the baseline alone.
        assert min(others) > (0.05 if name not in ("asymre", "topr") else 1e-3), (name, others)


def test_a_reward_below_the_baseline_has_no_such_optimum():
    rewards = np.asarray(problem().rewards, np.float64)[0]
    for of_query, arguments in ((optima.asymre, {"delta": -0.1, "K": K}), (optima.topr, {"baseline": 0.0})):
        with pytest.raises(ValueError, match="below 0"):
            of_query(rewards, optima.uniform_log_probs(), log_ref()[0], **arguments)


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMS)
def test_uniform_rows_lead_to_the_objectives_own_optimum(name):
    found, _ = train(name, "uniform", optimum(name, optima.uniform_log_probs()))
    assert found[0] > 0.2, "π_ref is far from it"
    assert found[-1] <= BOUND, found


@pytest.mark.slow
@pytest.mark.parametrize("behavior", ["on-policy", "50 updates old"])
@pytest.mark.parametrize("name", ["oapl", "pmd_mean"])
def test_rows_of_a_sampler_that_follows_lead_away_from_p_star(name, behavior):
    """Nothing holds the policy near π_ref: it ends on few responses, with the rewards of old rows on good ones."""
    p_star = np.asarray(problem().target, np.float64)
    found, policy = train(name, behavior, p_star)
    assert found[0] < 0.6 and found[-1] > 0.8, found
    if behavior != "on-policy":
        rewards = np.asarray(problem().rewards, np.float64)
        best = rewards == rewards.max(axis=-1, keepdims=True)
        reached, at_p_star, largest = ((p * rewards).sum(axis=-1).mean() for p in (policy, p_star, best))
        assert reached > at_p_star + 0.5 * (largest - at_p_star), (reached, at_p_star, largest)


@pytest.mark.slow
@pytest.mark.parametrize("behavior, bound", [("on-policy", 0.07), ("50 updates old", 0.1)])
def test_rows_of_the_policy_lead_a_star_po_to_p_star(behavior, bound):
    found, _ = train("a_star_po", behavior, np.asarray(problem().target, np.float64))
    assert found[0] > 0.3 and found[-1] <= bound, found
