"""Charts of the rows: their age, how often they were drawn, their rewards by policy step, and the difficulty of the queries."""

from collections.abc import Sequence

import numpy as np

from tba_jax.reporting import figures
from tba_jax.reporting.figures import Figure
from tba_jax.reporting.rows import Columns

STEP_BUCKETS, REWARD_BUCKETS = 120, 40
_MOST_DRAWS = 12  # that have a bar of their own


def by_age(columns: Columns, newest_step: int) -> Figure | None:
    """How old the weights are that sampled the rows in the log, in steps of the trainer. Rows without a step are left out."""
    age = np.maximum(0, newest_step - columns.newest_step[columns.newest_step >= 0])
    if not len(age):
        return None
    width = -(-(int(age.max(initial=0)) + 1) // 60)
    counts, edges = np.histogram(age, bins=np.arange(0, int(age.max(initial=0)) + width + 1, width))
    return figures.bars(
        figures.rounded((edges[:-1] + edges[1:] - 1) / 2),
        counts,
        x_title="age of the weights that sampled the row (steps)",
        y_title="rows",
    )


def by_draws(counts: np.ndarray) -> Figure:
    """How many rows were drawn how often. Args: counts: int[n]."""
    drawn = np.bincount(np.minimum(counts, _MOST_DRAWS), minlength=2)
    names = [str(n) if n < _MOST_DRAWS else f"≥ {n}" for n in range(len(drawn))]
    figure = figures.bars(names, drawn, x_title="steps that drew the row", y_title="rows", colour=figures.COLOURS[2])
    figure["layout"]["xaxis"]["type"] = "category"
    return figure


def rewards_by_step(columns: Columns) -> Figure | None:
    """Returns the share of each reward among the rows that a policy step sampled."""
    there = np.isfinite(columns.reward) & (columns.newest_step >= 0)
    reward, step = columns.reward[there].astype(np.float64), columns.newest_step[there]
    if not len(reward):
        return None
    low, high = float(reward.min()), float(reward.max())
    values = np.unique(reward[:: max(1, len(reward) // 10_000)])
    if few := len(values) <= 12:  # a few rewards, such as 0 and 1: each has a row of its own
        edges = np.concatenate([[low - 1.0], (values[:-1] + values[1:]) / 2, [high + 1.0]])
    else:
        edges = np.linspace(low, high, REWARD_BUCKETS + 1)
        values = (edges[:-1] + edges[1:]) / 2
    steps = np.linspace(step.min(), step.max() + 1, min(STEP_BUCKETS, int(np.ptp(step)) + 1) + 1)
    counts = np.histogram2d(reward, step, bins=(edges, steps))[0]
    total = counts.sum(axis=0)
    shares = np.where(counts > 0, counts / np.maximum(total, 1), np.nan)
    return figures.heat_map(
        np.floor(steps[:-1]), values, shares, x_title="step of the policy that sampled the rows", y_title="reward",
        told="the rows of these steps", ticks=few,
    )  # fmt: skip


def difficulty(columns: Columns) -> tuple[Figure | None, str]:
    """How many queries have which mean reward; and a sentence about the queries that teach nothing."""
    there = np.isfinite(columns.reward)
    if not there.any():
        return None, ""
    _, of_query = np.unique(columns.query_id[there], return_inverse=True)
    count = np.bincount(of_query)
    reward = columns.reward[there].astype(np.float64)
    mean = np.bincount(of_query, weights=reward) / count
    variance = np.bincount(of_query, weights=reward**2) / count - mean**2
    low, high = float(mean.min()), float(mean.max())
    counts, edges = np.histogram(mean, bins=30, range=(low, high) if high > low else (low - 0.5, low + 0.5))
    figure = figures.bars(
        figures.rounded((edges[:-1] + edges[1:]) / 2),
        counts,
        x_title="mean reward of the query over all of its rows: hard on the left, easy on the right",
        y_title="queries",
        colour=figures.COLOURS[3],
    )
    same = int(((variance <= 1e-9) & (count > 1)).sum())
    told = f"{len(count):,} queries with {len(reward) / len(count):.1f} rows each on average; "
    told += f"{same:,} of them have the same reward on all of their rows, and teach nothing as yet."
    return figure, told


def summary(columns: Columns, counts: np.ndarray, writers: Sequence[str]) -> list[dict[str, object]]:
    """A line for each writer: rows, drawn rows, mean reward, steps of its policies. The writers with most rows come first."""
    found: list[dict[str, object]] = []
    finite = np.isfinite(columns.reward)
    for number, name in enumerate(writers):
        mine = columns.writer == number
        if not mine.any():
            continue
        found.append(
            {
                "name": name,
                "rows": int(mine.sum()),
                "drawn": int((counts[mine] > 0).sum()),
                "reward": float(columns.reward[mine & finite].mean()) if (mine & finite).any() else np.nan,
                "finished": float(columns.finished[mine].mean()),
                "steps": f"{int(columns.oldest_step[mine].min())} to {int(columns.newest_step[mine].max())}",
            }
        )
    return sorted(found, key=lambda each: -int(str(each["rows"])))[:100]
