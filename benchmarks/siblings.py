"""Where the siblings of trajectory balance end up on the enumerated space of benchmarks/posterior.py, by who produced the rows.

    python -m benchmarks.objectives --workdir=DIR --only=siblings

On uniform rows each has an optimum of its own, computed from its equation for groups of K rows (benchmarks/optima.py). On rows of
the policy itself, or of one that follows it, only that of a_star_po is known, p*; how far from p* the others end is printed too.
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
from scipy import special

from benchmarks import optima, posterior, summary

QUERIES = 2
STEPS = 4000
# Settings of the loss, β, and arguments of its optimum. All advantages of AsymRE and TOPR are above 0.
FORMS: dict[str, tuple[tuple[tuple[str, float], ...], float, dict[str, Any]]] = {
    "oapl": ((), posterior.BETA, dict(beta=posterior.BETA, K=posterior.K)),
    "pmd_mean": ((), posterior.BETA, dict(beta=posterior.BETA, K=posterior.K)),
    "a_star_po": ((), posterior.BETA, dict(beta=posterior.BETA, K=posterior.K)),
    "flowrl": ((("clip_low", 1.0), ("clip_high", 9.0)), 2.0, dict(beta=2.0, K=posterior.K)),
    "asymre": ((("asymre_delta", -3.0),), posterior.BETA, dict(delta=-3.0, K=posterior.K)),
    "topr": ((("topr_baseline", -3.0),), posterior.BETA, dict(baseline=-3.0)),
}
ROWS = ("uniform", "on-policy", posterior.STALE)


@functools.cache
def problem(seed: int) -> posterior.Problem:
    return posterior.make_problem(seed, queries=QUERIES)


def rewards(seed: int) -> np.ndarray:
    """float64[Q, N]."""
    return np.asarray(problem(seed).rewards, np.float64)


def log_ref(seed: int) -> np.ndarray:
    """float64[Q, N], nats."""
    return np.asarray(problem(seed).ref_logprobs, np.float64).sum(axis=-1)


def optimum(name: str, seed: int) -> np.ndarray:
    """The objective's own on uniform rows: float64[Q, N]."""
    of_query = getattr(optima, name)
    log_mu = optima.uniform_log_probs()
    return np.stack([of_query(rewards(seed)[q], log_mu, log_ref(seed)[q], **FORMS[name][2]) for q in range(QUERIES)])


def p_star(seed: int) -> np.ndarray:
    return np.asarray(problem(seed).target, np.float64)


def tempered(seed: int) -> np.ndarray:
    """μ·exp(r/β)/Z of uniform μ: float64[Q, N]."""
    return special.softmax(optima.uniform_log_probs() + rewards(seed) / posterior.BETA, axis=-1)


# What an optimum on uniform rows tends to as K grows, where that is simple.
LIMITS: dict[str, Callable[[int], np.ndarray]] = {"oapl": tempered, "a_star_po": p_star}


def distance(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Total variation: float64[Q]."""
    return 0.5 * np.abs(a - b).sum(axis=-1)


@functools.cache
def compiled(name: str, steps: int) -> Any:
    settings, beta, _ = FORMS[name]
    points = max(1, steps // 10)
    return posterior.compile_train(queries=QUERIES, steps=steps, every=points, objective=name, beta=beta, settings=settings)


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
            called, target = "p*" if name == "a_star_po" else "p*, not its own", p_star(seed)
        found, policy = train(name, rows, target, seed=seed, steps=steps)
        reward = float((policy * rewards(seed)).sum(axis=-1).mean())
        return f"{seed}", name, rows, called, f"{found[0]:.3f}", f"{found[-1]:.4f}", f"{reward:.2f}"

    summary.table("seed", "objective", "rows", "optimum", "TV to it, before", "after", "mean reward of the policy")
    # One operation of so small a network does not use several cores: as many runs at a time as there are.
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for cells in pool.map(run, itertools.product(range(seeds), FORMS, ROWS)):
            summary.row(*cells)
