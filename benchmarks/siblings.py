"""Where the siblings of trajectory balance end up on the enumerated space of benchmarks/posterior.py, by who produced the rows.

    python -m benchmarks.objectives --workdir=DIR --only=siblings

On uniform rows each has an optimum of its own, computed from its equation without training: an objective of groups compares a row
with an estimate from K rows, so it regresses on the mean of that estimate given the row, which `expected_by_response` draws, and
`regression` solves the population's problem exactly. On rows of the policy itself, or of one that follows it, the optimum of some
is known, p*; how far from p* the others end is printed too.
"""

import concurrent.futures
import dataclasses
import functools
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from scipy import optimize, special

from benchmarks import posterior, summary

QUERIES = 2
STEPS = 4000
ROWS = ("uniform", "on-policy", posterior.STALE)

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


def flowrl_linear_z(rewards: Array, log_mu: Array, log_ref: Array, *, beta: float, K: int) -> Array:
    def standardised(others: Array, _: Array, own: float) -> Array:
        group = np.column_stack([others, np.full(len(others), own)])
        return (own - group.mean(axis=1)) / group.std(axis=1)

    scaled = expected_by_response(standardised, rewards, log_mu, log_ref, others=K - 1) / beta

    def unnormalised(log_z: float) -> Array:
        return np.exp(log_ref + posterior.LENGTHS * (scaled - log_z))

    log_z = optimize.brentq(lambda z: float(unnormalised(z).sum()) - 1, -50, 50, xtol=1e-12)
    return unnormalised(log_z)


def tpo(rewards: Array, log_mu: Array, log_ref: Array, *, beta: float, K: int) -> Array:
    """As K grows."""
    del log_ref

    def standardised(others: Array, _: Array, own: float) -> Array:
        group = np.column_stack([others, np.full(len(others), own)])
        return (own - group.mean(axis=1)) / group.std(axis=1)

    scaled = expected_by_response(standardised, rewards, log_mu, log_mu, others=K - 1) / beta
    return special.softmax(log_mu + scaled)


def gflowrl(rewards: Array, log_mu: Array, log_ref: Array, *, beta: float, K: int) -> Array:
    """Where no bound is met."""
    return special.softmax(log_mu / K + (1 - 1 / K) * (log_ref + rewards / beta))


def frozen_log_z(rewards: Array, log_mu: Array, log_ref: Array, *, beta: float, error: float) -> Array:
    """Args: error: of log Z, nats."""
    aim = log_ref + rewards / beta
    return regression(log_mu, aim - special.logsumexp(aim) - error - log_mu)


def p_star_of(rewards: Array, log_mu: Array, log_ref: Array, *, beta: float) -> Array:
    del log_mu
    return special.softmax(log_ref + rewards / beta)


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


@dataclasses.dataclass(frozen=True)
class Form:
    """An objective. optimum: on rows of one query: (rewards, log μ, log π_ref), float64[N] each, and `given` -> float64[N];
    beta: β of the loss; settings: of the loss; follows: whether p* is its optimum on rows of the policy, or of one that
    follows it."""

    optimum: Callable[..., Array]
    given: dict[str, float]
    beta: float = posterior.BETA
    settings: tuple[tuple[str, float], ...] = ()
    follows: bool = False


_UNBOUNDED = (("clip_high", 1e6), ("flow_gap_low", 1e3), ("flow_gap_high", 1e3))
_BETA_K = dict(beta=posterior.BETA, K=posterior.K)
FORMS: dict[str, Form] = {
    "oapl": Form(oapl, _BETA_K),
    "pmd_mean": Form(pmd_mean, _BETA_K),
    "a_star_po": Form(a_star_po, _BETA_K, follows=True),
    "tpo": Form(tpo, dict(beta=2.0, K=posterior.K), beta=2.0),
    "f_trajectory_balance": Form(p_star_of, dict(beta=posterior.BETA), follows=True),
    "frozen_log_z": Form(p_star_of, dict(beta=posterior.BETA), follows=True),
    "gflowrl": Form(gflowrl, _BETA_K, settings=_UNBOUNDED, follows=True),
    "optimal_baseline": Form(p_star_of, dict(beta=posterior.BETA), follows=True),
    "flowrl_linear_z": Form(
        flowrl_linear_z, dict(beta=2.0, K=posterior.K), beta=2.0, settings=(("clip_low", 1.0), ("clip_high", 9.0))
    ),
    # All advantages of AsymRE and TOPR are above 0.
    "asymre": Form(asymre, dict(delta=-3.0, K=posterior.K), settings=(("asymre_delta", -3.0),)),
    "topr": Form(topr, dict(baseline=-3.0), settings=(("topr_baseline", -3.0),)),
}


@functools.cache
def problem(seed: int) -> posterior.Problem:
    return posterior.make_problem(seed, queries=QUERIES)


def rewards(seed: int) -> np.ndarray:
    """float64[Q, N]."""
    return np.asarray(problem(seed).rewards, np.float64)


def log_ref(seed: int) -> np.ndarray:
    """float64[Q, N], nats."""
    return np.asarray(problem(seed).ref_logprobs, np.float64).sum(axis=-1)


@functools.cache
def optimum_of(name: str, seed: int, query: int) -> np.ndarray:
    """The objective's own on uniform rows of a query: float64[N]."""
    return FORMS[name].optimum(rewards(seed)[query], uniform_log_probs(), log_ref(seed)[query], **FORMS[name].given)


def optimum(name: str, seed: int) -> np.ndarray:
    """The objective's own optimum for all queries: float64[Q, N]."""
    return np.stack([optimum_of(name, seed, query) for query in range(QUERIES)])


def p_star(seed: int) -> np.ndarray:
    return np.asarray(problem(seed).target, np.float64)


def distance(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Total variation: float64[Q]."""
    return 0.5 * np.abs(a - b).sum(axis=-1)


@functools.cache
def compiled(name: str, steps: int) -> Any:
    static: dict[str, Any] = dict(objective=name, beta=FORMS[name].beta, settings=FORMS[name].settings)
    return posterior.compile_train(queries=QUERIES, steps=steps, every=max(1, steps // 10), **static)


def train(name: str, behavior: str, target: np.ndarray, *, seed: int = 0, steps: int = STEPS) -> tuple[np.ndarray, np.ndarray]:
    """TV to the target, means over queries, [points]; and the last policy, float64[Q, N].

    Raises:
      FloatingPointError: an update met numbers that are not finite.
    """
    of = dataclasses.replace(problem(seed), target=target.astype(np.float32))
    state, found, measured = compiled(name, steps)(of, seed, behavior=posterior.BEHAVIORS[behavior])
    if not np.all(np.asarray(measured["finite"]) == 1):
        raise FloatingPointError(f"{name} on rows {behavior}: an update met numbers that are not finite")
    logprobs = posterior.enumerate_logprobs(state.params["policy"], QUERIES)
    return np.asarray(found).mean(axis=-1), np.exp(np.asarray(logprobs, np.float64).sum(axis=-1))


def compare(root: Path, *, steps: int = STEPS, seeds: int = 2) -> None:
    """Prints a table of every objective, kind of rows and seed."""
    del root  # the numbers are all there is
    for name in FORMS:
        compiled(name, steps)

    def run(cell: tuple[int, str, str]) -> tuple[str, ...]:
        seed, name, rows = cell
        if rows == "uniform":
            called, target = "its own", optimum(name, seed)
        else:
            called, target = "p*" if FORMS[name].follows else "p*, not its own", p_star(seed)
        found, policy = train(name, rows, target, seed=seed, steps=steps)
        reward = float((policy * rewards(seed)).sum(axis=-1).mean())
        return f"{seed}", name, rows, called, f"{found[0]:.3f}", f"{found[-1]:.4f}", f"{reward:.2f}"

    summary.table("seed", "objective", "rows", "optimum", "TV to it, before", "after", "mean reward of the policy")
    # One operation of so small a network does not use several cores: as many runs at a time as there are.
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for cells in pool.map(run, itertools.product(range(seeds), FORMS, ROWS)):
            summary.row(*cells)
