"""Which rows a trainer step trains on (PAPER.md, "Sampling", without the barrier).

With probability m a position of the batch takes a query of the recent pool and responses among its newest; otherwise it
takes any query and weighs its responses by a strategy. Queries are drawn without replacement: the least drawn first.
"""

from collections.abc import Callable

import numpy as np

from tba_jax.replay.index import ReplayIndex


def _softmax(rewards: np.ndarray, inverse_temperature: float) -> np.ndarray:
    """p(y) ∝ exp(r · inverse_temperature)."""
    return rewards * inverse_temperature


def _uniform(rewards: np.ndarray, inverse_temperature: float) -> np.ndarray:
    """p(y) ∝ 1."""
    return np.zeros_like(rewards)


# (rewards float64[n], inverse temperature) -> log-weights float64[n] of the responses of a query.
STRATEGIES: dict[str, Callable[[np.ndarray, float], np.ndarray]] = {"softmax": _softmax, "uniform": _uniform}


def draw_batch(
    index: ReplayIndex,
    *,
    rng: np.random.Generator,
    step: int,
    queries: int,
    completions: int,
    recent_probability: float,
    recent_window: int,
    strategy: str,
    inverse_temperature: float,
    max_draws_per_row: int = 0,
    max_staleness: int = 0,
) -> np.ndarray | None:
    """Draws Q distinct queries with K responses each. Changes nothing but `rng`: see `ReplayIndex.mark_drawn`.

    Args:
      step: the trainer step that will train on the batch.
      queries, completions: Q, K.
      recent_probability: m, the probability that a position draws from the recent pool.
      recent_window: trainer steps for which a row counts as recent after it became visible.
      strategy: a key of STRATEGIES, for the responses of positions outside the recent pool.
      inverse_temperature: of the softmax strategy.
      max_draws_per_row: a row drawn as often is not eligible (0 = off).
      max_staleness: a row whose oldest weights are more trainer steps old is not eligible (0 = off).

    Returns:
      int64[Q·K] slots, the K of a query consecutive, or None while fewer than Q queries have an eligible row (K of
      them under max_draws_per_row). A query with fewer than K eligible rows repeats them evenly; no row repeats otherwise.

    Raises:
      ValueError: a setting outside its range, by name.
    """
    Q, K = queries, completions
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy={strategy!r} is not one of {sorted(STRATEGIES)}")
    if not 0 <= recent_probability <= 1 or min(Q, K) < 1 or min(recent_window, max_draws_per_row, max_staleness) < 0:
        raise ValueError(
            f"queries={Q} and completions={K} must be at least 1, recent_probability={recent_probability} within [0, 1], "
            f"recent_window={recent_window}, max_draws_per_row={max_draws_per_row}, max_staleness={max_staleness} at least 0"
        )
    eligible = index.slot_query >= 0
    if max_draws_per_row:
        eligible &= index.row_draws < max_draws_per_row
    if max_staleness:
        eligible &= step - index.row_step <= max_staleness
    limited = bool(max_draws_per_row or max_staleness)
    rows_of = np.bincount(index.slot_query[eligible], minlength=len(index.query_rows)) if limited else index.query_rows
    # Repeating a query's few rows would draw them past their limit: such a query waits for fresh ones.
    live = np.flatnonzero(rows_of >= (K if max_draws_per_row else 1))
    if len(live) < Q:
        return None

    from_recent = rng.random(Q) < recent_probability
    oldest_visible = step - recent_window + 1
    pool = recent_pool(
        index.newest_visible_step[live], index.newest_row_step[live], index.newest_arrival[live], oldest=oldest_visible, minimum=Q
    )
    chosen = np.empty(Q, np.int64)
    recents = live[pool]
    recents = recents[least_drawn(index.recent_draws[recents], int(from_recent.sum()), rng)]
    rest = live[~np.isin(live, recents)]
    chosen[from_recent] = recents
    chosen[~from_recent] = rest[least_drawn(index.query_draws[rest], Q - len(recents), rng)]

    # Position of each query in the batch; one place more, −1, for the slots without a query.
    position = np.full(len(rows_of) + 1, -1, np.int64)
    position[chosen] = np.arange(Q)
    slots = np.flatnonzero(eligible & (position[index.slot_query] >= 0))
    group = position[index.slot_query[slots]]
    log_weights = STRATEGIES[strategy](index.reward[slots].astype(np.float64), inverse_temperature)
    recent = from_recent[group]
    inside = index.visible_step[slots[recent]] >= oldest_visible
    newest = newest_rows(group[recent], index.arrival[slots[recent]], inside, Q=Q, minimum=K)
    log_weights[recent] = np.where(newest, 0.0, -np.inf)
    return slots[draw_within_groups(group, log_weights, rng, Q=Q, K=K)].reshape(-1)


def recent_pool(visible_step: np.ndarray, row_step: np.ndarray, arrival: np.ndarray, *, oldest: int, minimum: int) -> np.ndarray:
    """int[·], indices of the queries whose newest row became visible at step `oldest` or later.

    Fewer than `minimum` are extended to the newest `minimum` by (row_step, arrival). All arrays are int64[n], of each
    query's newest row.
    """
    inside = visible_step >= oldest
    missing = minimum - int(inside.sum())
    if missing <= 0:
        return np.flatnonzero(inside)
    # The window comes first, then the newest.
    return np.lexsort((-arrival, -row_step, ~inside))[:minimum]


def least_drawn(draws: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """int64[count], indices of the `count` smallest of `draws` (int64[n], n >= count) in random order; ties at random."""
    if count == 0:
        return np.zeros(0, np.int64)
    limit = np.partition(draws, count - 1)[count - 1]
    below = np.flatnonzero(draws < limit)
    ties = rng.choice(np.flatnonzero(draws == limit), size=count - len(below), replace=False)
    return rng.permutation(np.concatenate([below, ties]))


def newest_rows(group: np.ndarray, arrival: np.ndarray, inside: np.ndarray, *, Q: int, minimum: int) -> np.ndarray:
    """bool[n], the rows `inside` the window, and in a group with fewer than `minimum` of them its newest `minimum`.

    group: int64[n] in [0, Q); arrival: int64[n]; inside: bool[n], true for the newest rows of a group.
    """
    short = np.bincount(group[inside], minlength=Q) < minimum
    rows = np.flatnonzero(short[group])
    by_age = rows[np.argsort(-arrival[rows], kind="stable")]
    order, starts, counts = _by_group(group[by_age], Q)
    rank = np.arange(len(order)) - np.repeat(starts, counts)
    result = inside & ~short[group]
    result[by_age[order[rank < minimum]]] = True
    return result


def draw_within_groups(group: np.ndarray, log_weights: np.ndarray, rng: np.random.Generator, *, Q: int, K: int) -> np.ndarray:
    """int64[Q, K], indices drawn from each group without replacement, p ∝ exp(log_weights) at every draw.

    A group with fewer than K rows of finite weight gives each of them K // n or K // n + 1 times.

    Args:
      group: int64[n] in [0, Q), every group with a row of finite weight.
      log_weights: float64[n], −inf for a row that must not be drawn.
    """
    # Gumbel top-k: argtop_k(log w + G), G = −log E with E exponential, is a draw without replacement.
    keys = log_weights - np.log(rng.standard_exponential(len(group)))
    by_key = np.argsort(-keys)
    order, starts, _ = _by_group(group[by_key], Q)
    available = np.bincount(group[np.isfinite(log_weights)], minlength=Q)
    places = starts[:, None] + np.arange(K) % available[:, None]
    return by_key[order[places]]


def _by_group(group: np.ndarray, Q: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Stable order by group, start of each group within it, rows of each group."""
    # NumPy sorts 16-bit integers stably in linear time.
    narrow = group.astype(np.uint16) if Q <= 1 << 16 else group
    counts = np.bincount(group, minlength=Q)
    return np.argsort(narrow, kind="stable"), np.cumsum(counts) - counts, counts
