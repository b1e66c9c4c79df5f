"""Which rows a trainer step trains on (TBA paper, sampling, without the barrier).

With probability m a position of the batch takes a query of the recent pool and responses among its newest; otherwise it
takes any query and weighs its responses by a strategy and by their age. Queries are drawn without replacement: the least drawn
first.
"""

import dataclasses
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

# In a group of more rows the largest keys are selected before they are sorted.
LARGE_GROUP = 2048


@dataclasses.dataclass(frozen=True, kw_only=True)
class Selection:
    """How a batch is drawn: settings that experiment/schema.py checks.

    queries, completions: Q, K.
    recent_probability: m, the probability that a position draws from the recent pool.
    recent_window: a row is recent if it became visible in the last so many trainer steps at which rows did (Window.recent_since).
    recent_fill: the rows of a recent query with fewer than K recent ones. repeat: these alone, repeated; older: its newest K;
      wait: its newest K, and no query with fewer than K eligible rows is drawn, so that no batch has a row twice.
      Under max_draws_per_row it is always the newest K: repeats would draw rows past the limit.
    strategy: a key of STRATEGIES, for the responses of positions outside the recent pool.
    inverse_temperature: of the softmax strategy.
    max_draws_per_row: a row drawn as often is not eligible (0 = off). A query then waits until K of its rows are, or until new
      ones have come since it was drawn.
    max_staleness: a row whose oldest weights are more trainer steps old is not eligible (0 = off).
    """

    queries: int
    completions: int
    recent_probability: float
    recent_window: int
    strategy: str
    inverse_temperature: float
    recent_fill: str = "repeat"
    max_draws_per_row: int = 0
    max_staleness: int = 0


def draw_batch(index: ReplayIndex, selection: Selection, *, rng: np.random.Generator, step: int) -> np.ndarray | None:
    """Draws Q distinct queries with K responses each. Changes nothing but `rng`: see `ReplayIndex.mark_drawn`.

    Args: step: updates done before the batch is trained on.

    Returns:
      int64[Q·K] slots, the K of a query consecutive, or None while fewer than Q queries may be drawn (see `drawable`). A query
      with fewer than K eligible rows repeats them evenly; no row repeats otherwise.
    """
    Q, K = selection.queries, selection.completions
    spent = _spent(index, step, selection.max_draws_per_row, selection.max_staleness)
    live = _live(index, selection, spent)
    if len(live) < Q:
        return None
    from_recent, oldest = rng.random(Q) < selection.recent_probability, index.recent_since(selection.recent_window)
    slots, group = index.rows_of(_choose_queries(index, live, from_recent, rng, oldest=oldest))
    if spent is not None:
        fresh = ~spent[slots]
        slots, group = slots[fresh], group[fresh]
    recent = np.flatnonzero(from_recent[group])
    inside = index.visible_step[slots[recent]] >= oldest
    repeats = selection.recent_fill == "repeat" and not selection.max_draws_per_row
    newest = newest_rows(group[recent], index.arrival[slots[recent]], inside, Q=Q, K=K, minimum=1 if repeats else K)
    older = recent[~newest]
    slots, group = np.delete(slots, older), np.delete(group, older)
    log_weights = STRATEGIES[selection.strategy](index.reward[slots].astype(np.float64), selection.inverse_temperature)
    log_weights[from_recent[group]] = 0.0
    return slots[draw_within_groups(group, log_weights, rng, Q=Q, K=K)].reshape(-1)


def drawable(index: ReplayIndex, selection: Selection, *, step: int) -> int:
    """How many queries the batch of step + 1 may be drawn from. A batch needs Q."""
    return len(_live(index, selection, _spent(index, step, selection.max_draws_per_row, selection.max_staleness)))


def undrawn(index: ReplayIndex, selection: Selection, *, step: int, of_writers: np.ndarray) -> int:
    """How many rows of some writers wait to be drawn for the first time in the batch of step + 1 or a later one.

    Rows that no batch will want do not count: those that are too stale, those that are left over of a query that was drawn since
    they came (fewer than K), and without max_draws_per_row those that are recent no more.

    Args: of_writers: bool, for each of `index.writers`.
    """
    spent = _spent(index, step, selection.max_draws_per_row, selection.max_staleness)
    waits = (index.slot_query >= 0) & (index.row_draws == 0) & of_writers[index.slot_writer]
    if spent is not None:
        waits &= ~spent
    if not selection.max_draws_per_row:
        waits &= index.visible_step >= index.recent_since(selection.recent_window)
    rows = np.bincount(index.slot_query[waits], minlength=len(index.query_rows))
    rows -= rows % selection.completions * (index.recent_draws > 0)
    return int(rows[_live(index, selection, spent)].sum())


def _live(index: ReplayIndex, selection: Selection, spent: np.ndarray | None) -> np.ndarray:
    """int64[·]: the queries that may be drawn. Args: spent: see `_spent`."""
    eligible = index.query_rows
    if spent is not None:
        eligible = eligible - np.bincount(index.slot_query[np.flatnonzero(spent)], minlength=len(eligible))
    enough = eligible >= (selection.completions if selection.recent_fill == "wait" else 1)
    if selection.max_draws_per_row:
        # To repeat the few rows that are left of a group would draw them past their limit.
        enough &= (eligible >= selection.completions) | (index.recent_draws == 0)
    return np.flatnonzero(enough)


def _choose_queries(
    index: ReplayIndex, live: np.ndarray, from_recent: np.ndarray, rng: np.random.Generator, *, oldest: int
) -> np.ndarray:
    """int64[Q]: distinct queries among `live`, the least drawn first; of the recent pool where `from_recent` (bool[Q]) says so.

    Args: oldest: the trainer step from which on a row that became visible counts as recent.
    """
    Q, chosen, others = len(from_recent), np.empty(len(from_recent), np.int64), np.ones(len(live), bool)
    if from_recent.any():
        newest = index.newest_visible_step[live], index.newest_row_step[live], index.newest_arrival[live]
        pool = recent_pool(*newest, oldest=oldest, minimum=Q)
        recents = pool[least_drawn(index.recent_draws[live[pool]], int(from_recent.sum()), rng)]
        chosen[from_recent] = live[recents]
        others[recents] = False
    rest = live[others]
    chosen[~from_recent] = rest[least_drawn(index.query_draws[rest], Q - int(from_recent.sum()), rng)]
    return chosen


def _spent(index: ReplayIndex, step: int, max_draws_per_row: int, max_staleness: int) -> np.ndarray | None:
    """bool over slots, the resident rows that are not eligible; None where there are no limits. Costs a pass over the window."""
    if not (max_draws_per_row or max_staleness):
        return None
    spent = np.zeros(len(index.slot_query), bool)
    if max_draws_per_row:
        spent |= index.row_draws >= max_draws_per_row
    if max_staleness:
        spent |= index.row_step < step - max_staleness
    return spent & (index.slot_query >= 0)


def recent_pool(visible_step: np.ndarray, row_step: np.ndarray, arrival: np.ndarray, *, oldest: int, minimum: int) -> np.ndarray:
    """int[·], indices of the queries whose newest row became visible at step `oldest` or later.

    Fewer than `minimum` are extended to the newest `minimum` by (row_step, arrival). All arrays are int64[n], of each
    query's newest row.
    """
    inside = visible_step >= oldest
    missing = minimum - int(inside.sum())
    if missing <= 0:
        return np.flatnonzero(inside)
    # The window comes first, then the newest. Only the newest few of the others are sorted.
    others = np.flatnonzero(~inside)
    if missing < len(others):
        limit = np.partition(row_step[others], -missing)[-missing]
        above, ties = others[row_step[others] > limit], others[row_step[others] == limit]
        missing -= len(above)
        others = np.concatenate([above, ties[np.argpartition(arrival[ties], -missing)[-missing:]]])
    return np.concatenate([np.flatnonzero(inside), others[np.lexsort((-arrival[others], -row_step[others]))]])


def least_drawn(draws: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """int64[count], indices of the `count` smallest of `draws` (int64[n], n >= count) in random order; ties at random."""
    if count == 0:
        return np.zeros(0, np.int64)
    limit = np.partition(draws, count - 1)[count - 1]
    below = np.flatnonzero(draws < limit)
    ties = rng.choice(np.flatnonzero(draws == limit), size=count - len(below), replace=False)
    return rng.permutation(np.concatenate([below, ties]))


def newest_rows(group: np.ndarray, arrival: np.ndarray, inside: np.ndarray, *, Q: int, K: int, minimum: int) -> np.ndarray:
    """bool[n], the rows `inside` the window, and in a group with fewer than `minimum` of them its newest K.

    group: int64[n] in [0, Q); arrival: int64[n]; inside: bool[n], true for the newest rows of a group.
    """
    short = np.bincount(group[inside], minlength=Q) < minimum
    rows = np.flatnonzero(short[group])
    order, _ = _largest(group[rows], arrival[rows], Q=Q, count=K)
    result = inside & ~short[group]
    result[rows[order]] = True
    return result


def draw_within_groups(group: np.ndarray, log_weights: np.ndarray, rng: np.random.Generator, *, Q: int, K: int) -> np.ndarray:
    """int64[Q, K], indices drawn from each group without replacement, p ∝ exp(log_weights) at every draw.

    A group with fewer than K rows of finite weight gives each of them K // n or K // n + 1 times.

    Args: group: int64[n] in [0, Q), every group with a row of finite weight. log_weights: float64[n], −inf for a row that must
    not be drawn.
    """
    # Gumbel top-k: argtop_k(log w + G), G = −log E with E exponential, is a draw without replacement.
    keys = log_weights - np.log(rng.standard_exponential(len(group)))
    order, starts = _largest(group, keys, Q=Q, count=K)
    available = np.bincount(group[np.isfinite(log_weights)], minlength=Q)
    return order[starts[:, None] + np.arange(K) % available[:, None]]


def _largest(group: np.ndarray, keys: np.ndarray, *, Q: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Indices of the `count` largest keys of every group, by group and descending; and the start of each group there."""
    candidates = np.arange(len(group))
    sizes = np.bincount(group, minlength=Q)
    # Sorting a large group to keep a few of its rows would cost more than all the rest.
    for large in np.flatnonzero(sizes > LARGE_GROUP + count).tolist():
        own = np.flatnonzero(group[candidates] == large)
        smaller = own[np.argpartition(keys[candidates[own]], -count)[:-count]]
        candidates = np.delete(candidates, smaller)
    order = candidates[np.lexsort((-keys[candidates], group[candidates]))]
    kept = np.bincount(group[order], minlength=Q)
    rank = np.arange(len(order)) - np.repeat(np.cumsum(kept) - kept, kept)
    numbers = np.minimum(kept, count)
    return order[rank < count], np.cumsum(numbers) - numbers
