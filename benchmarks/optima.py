"""Where each objective ends up on the enumerated space of benchmarks/posterior.py, computed from its equation, without training.

An objective of groups compares a row with an estimate from K rows, so it regresses on the mean of that estimate given the
row. `expected_by_response` draws the rest of the group many times, and `regression` solves the population's problem exactly.
"""

from collections.abc import Callable

import numpy as np
from scipy import optimize, special

from benchmarks import posterior

# float64[N], the rewards or the log-probs of a query's N responses.
Array = np.ndarray


def uniform_log_probs() -> Array:
    """float64[N], nats: of rows that are uniform over symbols and end."""
    return -posterior.LENGTHS * np.log(posterior.SYMBOLS + 1.0)


def expected_by_response(
    estimate: Callable[[Array, Array, float], Array],
    rewards: Array,
    log_mu: Array,
    log_ref: Array,
    *,
    others: int,
    groups: int = 4000,
) -> Array:
    """E[ estimate | y ] over so many other rows of the group, drawn from μ: float64[N].

    Args: estimate: (rewards of the other rows, their log π_ref/μ, both [groups, others]; reward of the row itself) -> [groups].
    """
    drawn = np.random.default_rng(0).choice(len(rewards), size=(groups, others), p=np.exp(log_mu) / np.exp(log_mu).sum())
    return np.array([estimate(rewards[drawn], (log_ref - log_mu)[drawn], float(own)).mean() for own in rewards])


def regression(log_mu: Array, aim: Array) -> Array:
    """The distribution π that minimises E_μ ( log π/μ − aim )²: float64[N].

    π = μ exp(u) with u = aim − W(c exp(aim)), W being Lambert's, and the c at which π is a distribution.
    """

    def excess(c: float) -> float:
        return float(np.exp(log_mu + aim - special.lambertw(c * np.exp(aim)).real).sum()) - 1

    least = -np.exp(-1 - aim.max()) * (1 - 1e-9)
    c = optimize.brentq(excess, least, 1e3, xtol=1e-14)
    found = np.exp(log_mu + aim - special.lambertw(c * np.exp(aim)).real)
    return found / found.sum()


def _log_mean_exp(terms: Array) -> Array:
    return special.logsumexp(terms, axis=1) - np.log(terms.shape[1])


def oapl(rewards: Array, log_mu: Array, log_ref: Array, *, beta: float, K: int) -> Array:
    def value(others: Array, _: Array, own: float) -> Array:
        return beta * _log_mean_exp(np.column_stack([others, np.full(len(others), own)]) / beta)

    values = expected_by_response(value, rewards, log_mu, log_ref, others=K - 1)
    return regression(log_mu, (rewards - values) / beta)


def pmd_mean(rewards: Array, log_mu: Array, log_ref: Array, *, beta: float, K: int) -> Array:
    del log_ref
    return regression(log_mu, (1 - 1 / K) * (rewards - np.exp(log_mu) @ rewards) / beta)


def a_star_po(rewards: Array, log_mu: Array, log_ref: Array, *, beta: float, K: int) -> Array:
    def value(others: Array, log_weight: Array, _: float) -> Array:
        return beta * _log_mean_exp(log_weight + others / beta)

    values = expected_by_response(value, rewards, log_mu, log_ref, others=K - 1)
    return regression(log_mu, log_ref - log_mu + (rewards - values) / beta)


def flowrl(rewards: Array, log_mu: Array, log_ref: Array, *, beta: float, K: int) -> Array:
    def standardised(others: Array, _: Array, own: float) -> Array:
        group = np.column_stack([others, np.full(len(others), own)])
        return (own - group.mean(axis=1)) / group.std(axis=1)

    scaled = expected_by_response(standardised, rewards, log_mu, log_ref, others=K - 1) / beta

    def unnormalised(log_z: float) -> Array:
        return np.exp(log_ref + posterior.LENGTHS * (scaled - log_z))

    log_z = optimize.brentq(lambda z: float(unnormalised(z).sum()) - 1, -50, 50, xtol=1e-12)
    return unnormalised(log_z)


def asymre(rewards: Array, log_mu: Array, log_ref: Array, *, delta: float, K: int) -> Array:
    """Raises ValueError where a reward is below the baseline."""
    del log_ref
    advantage = (1 - 1 / K) * (rewards - np.exp(log_mu) @ rewards) - delta
    return _weighted(log_mu, advantage)


def topr(rewards: Array, log_mu: Array, log_ref: Array, *, baseline: float) -> Array:
    """Raises ValueError where a reward is below the baseline."""
    del log_ref
    return _weighted(log_mu, rewards - baseline)


def _weighted(log_mu: Array, weight: Array) -> Array:
    if weight.min() < 0:
        raise ValueError(f"the weight {weight.min():g} of a response is below 0: the loss has no such optimum")
    return np.exp(log_mu) * weight / (np.exp(log_mu) @ weight)
