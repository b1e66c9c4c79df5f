"""Off-policy evaluation: the mean reward of a policy π from rows that other policies μ drew.

The estimate is that of self-normalised importance sampling (Owen 2013, Monte Carlo theory, methods and examples, chapter 9).
"""

import dataclasses

import numpy as np
from scipy import special

from tba_jax import trajectory
from tba_jax.replay.log import GIVEN
from tba_jax.replay.window import validate_rows
from tba_jax.trajectory import Rows

CONFIDENCE = 0.95
# Why nobody can weigh a row by its behaviour, or it counts for nothing, in this order.
UNWEIGHED = ("are responses of files", "are not valid or have no reward", "are truncated or greedy")


def unweighed(rows: Rows, writer: str, *, vocab_size: int) -> np.ndarray:
    """bool[3, B]: the reasons of UNWEIGHED that hold of the rows of a writer."""
    truncated = (rows["top_k"] > 0) | (rows["top_p"] < 1) | (rows["min_p"] > 0) | ~(rows["temperature"] > 0)
    given, odd = np.full(len(truncated), writer.startswith(GIVEN)), validate_rows(rows, vocab_size=vocab_size) > 0
    return np.stack([given, odd, truncated])


def by_chance(rows: Rows, *, force_eos: bool) -> np.ndarray:
    """bool[B, R]: the tokens that a response owes to chance. With force_eos, of the run's contract, the last of R tokens is the
    end whatever was drawn."""
    drawn = trajectory.trained(rows)
    if force_eos:
        drawn[:, -1] = False
    return drawn


def log_weight(rows: Rows, logprobs: np.ndarray, *, force_eos: bool) -> np.ndarray:
    """float64[B]: log w = log π − log μ of what was drawn, nats. A response whose end was forced drew anything but the end there,
    with probability 1 − π(end): this, and not the response alone, decides `finished`, which rewards may read.

    Args: logprobs: float32[B, R], log π of the tokens. force_eos: of the run's contract.
    """
    drawn, behavior = trajectory.trained(rows), rows["behavior_logprobs"]
    change = np.where(drawn, logprobs - behavior, 0.0).astype(np.float64)
    if force_eos:
        others = (np.log(np.maximum(-np.expm1(end[:, -1]), np.finfo(np.float32).tiny)) for end in (logprobs, behavior))
        change[:, -1] = np.where(drawn[:, -1] & ~rows["finished"], np.subtract(*others), change[:, -1])
    return change.sum(axis=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """rows, queries: how many there are; effective: the effective number of rows, 1 to `rows`, 0 where π can draw none of them;
    mean: of the policy's reward, and low, high: the interval of CONFIDENCE for it, infinite where all rows are of one query, in
    units of the reward; plain: the mean reward of the rows as they are."""

    rows: int
    queries: int
    effective: float
    mean: float
    low: float
    high: float
    plain: float


def estimate(log_weight: np.ndarray, reward: np.ndarray, query: np.ndarray) -> Estimate:
    """The estimate from n ≥ 1 rows.

    Rows of one query are not independent of each other: the variance is that of the linearised ratio, with queries as clusters.

    Args: log_weight: float[n], nats, log w = log π(y|x) − log μ(y|x), −inf where π cannot draw the row; reward: float[n], finite;
    query: [n], rows of equal values are of one query.

    Raises ValueError where a log-weight is NaN or +inf, or there is no row.
    """
    log_weight = np.asarray(log_weight, np.float64)
    if not len(log_weight) or np.isnan(log_weight).any() or (largest := log_weight.max()) == np.inf:
        raise ValueError(f"importance weights of {len(log_weight)} rows are not numbers, or there is no row")
    reward, (_, cluster) = np.asarray(reward, np.float64), np.unique(query, return_inverse=True)
    G, plain = int(cluster.max()) + 1, float(reward.mean())
    if largest == -np.inf:
        return Estimate(rows=len(reward), queries=G, effective=0.0, mean=np.nan, low=-np.inf, high=np.inf, plain=plain)
    w = np.exp(log_weight - largest)
    total = w.sum()
    # ESS = (Σ w)² / Σ w²
    effective = total**2 / (w**2).sum()
    # θ̂ = Σ w r / Σ w
    mean = (w * reward).sum() / total
    # Var θ̂ = G/(G − 1) Σ_q ( Σ_{i∈q} w_i (r_i − θ̂) )² / (Σ w)²
    of_query = np.bincount(cluster, w * (reward - mean), minlength=G)
    half = np.inf
    if G > 1:
        half = special.stdtrit(G - 1, (1 + CONFIDENCE) / 2) * np.sqrt(G / (G - 1) * (of_query**2).sum()) / total
    interval = dict(mean=float(mean), low=float(mean - half), high=float(mean + half))
    return Estimate(rows=len(reward), queries=G, effective=float(effective), plain=plain, **interval)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Queries:
    """What the rows of each of G queries tell, the query with the least value first.

    query: [G], their values; first: int64[G], the place of a row of each; rows: int64[G]; mean, spread: float64[G], of the
    rewards; log_weight_std: float64[G], nats, NaN where a row has no target: the spread of log p̃ − log π, 0 at the optimum.
    Spreads are standard deviations over the rows of a query.
    """

    query: np.ndarray
    first: np.ndarray
    rows: np.ndarray
    mean: np.ndarray
    spread: np.ndarray
    log_weight_std: np.ndarray


def by_query(query: np.ndarray, reward: np.ndarray, log_ratio: np.ndarray) -> Queries:
    """Args: query: [n]; reward: float[n]; log_ratio: float[n], nats, log p̃ − log π of each row, NaN where it has no target."""
    values, first, cluster, rows = np.unique(query, return_index=True, return_inverse=True, return_counts=True)

    def moments(of_row: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        mean = np.bincount(cluster, of_row) / rows
        return mean, np.sqrt(np.bincount(cluster, (of_row - mean[cluster]) ** 2) / rows)

    mean, spread = moments(np.asarray(reward, np.float64))
    log_weight_std = moments(np.asarray(log_ratio, np.float64))[1]
    return Queries(query=values, first=first, rows=rows, mean=mean, spread=spread, log_weight_std=log_weight_std)
