"""The figures of an evaluation: means over held-out queries with their standard errors, pass@k, majorities and perplexities."""

import collections
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

# The standard error of a figure has the figure's name and this ending.
STDERR = "_stderr"
_MOST_NATS = 700.0  # exp of more is no float


def mean(name: str, values: np.ndarray) -> dict[str, float]:
    """The mean of values under `name`, and its standard error under `name` + STDERR. NaN is no value, and is left out.

        m = Σ_q Σ_k x_qk / n
        stderr² = Q/(Q − 1) · Σ_q (Σ_k (x_qk − m))² / n²

    The Q queries with a value are the independent units (clusters), since samples of one query are alike. Where there is one
    query only, its samples are the units: the figure is then about that query. A mean over fewer than two units has no standard
    error, and the mean of no values is NaN.

    Args: values: float[K, Q], of K responses to each of the queries.
    """
    of_units = values if values.shape[1] > 1 else values.T
    there = ~np.isnan(of_units)
    n, units = there.sum(), there.any(axis=0).sum()
    if not n:
        return {name: math.nan}
    m = of_units[there].mean()
    if units < 2:
        return {name: float(m)}
    sums = np.where(there, of_units - m, 0.0).sum(axis=0)
    return {name: float(m), name + STDERR: float(np.sqrt(units / (units - 1) * np.square(sums).sum()) / n)}


def with_stderr(figures: Mapping[str, Any], name: str) -> str:
    """A figure with its standard error, "0.500 ± 0.031"; without one, "0.500"; "–" where there is no such figure."""
    value, error = figures.get(name), figures.get(name + STDERR)
    if value is None or not math.isfinite(value):
        return "–"
    shown = f"{round(value, 3) + 0.0:.3f}"  # -0.000 is 0
    return shown if error is None or not math.isfinite(error) else f"{shown} ± {error:.3f}"


def pass_at(right: np.ndarray, samples: int, k: int) -> np.ndarray:
    """float64[n]: the chance that k samples of a query, drawn without replacement, hold a right one (Chen et al. 2021, eq. 1).

    Args: right: int[n], how many of the `samples` of each query are right.
    """
    # 1 − C(n − c, k) / C(n, k), as a product that does not overflow.
    factors = 1 - k / np.arange(1, samples + 1)[None]
    return 1 - np.where(np.arange(samples)[None] >= samples - right[:, None], factors, 1.0).prod(axis=1)


def majority(answers: Sequence[str], right: Sequence[bool]) -> float:
    """The share of right samples among those that give the most frequent final answer; the mean over equally frequent answers.

    Args: answers: final answers of the samples in a canonical form; "" means no answer, and does not vote. right: of each sample.
    """
    counts = collections.Counter(answer for answer in answers if answer)
    if not counts:
        return 0.0
    shares = [
        np.mean([correct for given, correct in zip(answers, right, strict=True) if given == answer])
        for answer, count in counts.items()
        if count == max(counts.values())
    ]
    return float(np.mean(shares))


def perplexity(logprob_sum: float, tokens: float) -> float:
    """exp(−Σ log π / tokens), nats in the sum."""
    return math.exp(min(-logprob_sum / tokens, _MOST_NATS))
