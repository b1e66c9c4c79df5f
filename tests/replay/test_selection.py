"""Selection: frequencies against their probabilities, coverage, replacement, limits."""

import numpy as np
import pytest

from tba_jax.replay.index import ReplayIndex
from tba_jax.replay.selection import (
    STRATEGIES,
    Selection,
    draw_batch,
    draw_within_groups,
    least_drawn,
    newest_rows,
    recent_pool,
    undrawn,
)
from tba_jax.trajectory import RowShape

SHAPE = RowShape(prompt_length=1, response_length=2, reward_parts=())


def index_of(groups: dict[int, int], *, step: int = 1, index: ReplayIndex | None = None, policy_step: int = 0) -> ReplayIndex:
    """Adds, for each query id, that many distinct rows of reward 0, 1, 2, … visible from `step` on."""
    if index is None:
        index = ReplayIndex(shape=SHAPE, capacity=10_000, capacity_per_query=10_000, vocab_size=100_000)
    count, first = sum(groups.values()), index.heads.get("w", 0)
    rows = {name: np.zeros((count, *row), dtype) for name, (dtype, row) in SHAPE.columns().items()}
    rows["row"] = np.arange(first, first + count)
    rows["query_id"] = np.repeat(np.array(list(groups), np.uint64), list(groups.values()))
    rows["response_length"][:] = 2
    rows["tokens"][:, 0] = rows["row"]
    rows["policy_step"][:] = policy_step
    rows["reward"] = np.concatenate([np.arange(size) for size in groups.values()]).astype(np.float32)
    index.add("w", rows, step=step)
    return index


def draw(index: ReplayIndex, rng: np.random.Generator, *, step: int = 1, **changes):
    settings = dict(
        queries=1, completions=1, recent_probability=0.0, recent_window=1, strategy="uniform", inverse_temperature=1.0
    )
    return draw_batch(index, Selection(**settings | changes), rng=rng, step=step)


def queries_of(index: ReplayIndex, slots: np.ndarray, K: int) -> np.ndarray:
    """Query ids of the groups; asserts that a group has one query and that no query appears twice."""
    ids = index.gather(slots)["query_id"].reshape(-1, K)
    assert (ids == ids[:, :1]).all()
    assert len(set(ids[:, 0].tolist())) == len(ids)
    return ids[:, 0]


def assert_frequencies(counts: np.ndarray, probabilities: np.ndarray):
    """Every count within 4.5 standard deviations of its binomial expectation."""
    n = counts.sum()
    deviation = np.sqrt(n * probabilities * (1 - probabilities))
    assert (np.abs(counts - n * probabilities) <= 4.5 * deviation).all(), (counts / n, probabilities)


@pytest.mark.parametrize(("strategy", "inverse_temperature"), [("softmax", 0.0), ("softmax", 0.7), ("uniform", 5.0)])
def test_first_and_second_draws_follow_the_strategy(strategy, inverse_temperature):
    rewards, n, trials = np.arange(4.0), 4, 20_000
    weights = np.exp(rewards * inverse_temperature) if strategy == "softmax" else np.ones(n)
    p = weights / weights.sum()
    # Without replacement: P(a, then b) = p_a · p_b / (1 − p_a).
    pairs = np.array([[0 if a == b else p[a] * p[b] / (1 - p[a]) for b in range(n)] for a in range(n)])
    group = np.repeat(np.arange(trials), n)
    log_weights = STRATEGIES[strategy](np.tile(rewards, trials), inverse_temperature)
    drawn = draw_within_groups(group, log_weights, np.random.default_rng(0), Q=trials, K=2)
    np.testing.assert_array_equal(drawn // n, np.arange(trials)[:, None] * np.ones((1, 2), int))
    counts = np.bincount((drawn[:, 0] % n) * n + drawn[:, 1] % n, minlength=n * n)
    assert_frequencies(counts, pairs.ravel())
    assert_frequencies(np.bincount(drawn[:, 0] % n, minlength=n), p)


@pytest.mark.parametrize(("recent_probability", "inverse_temperature"), [(0.0, 1.5), (1.0, 0.0)])
def test_a_whole_draw_follows_the_softmax_and_of_recent_rows_all_alike(recent_probability, inverse_temperature):
    index, rng = index_of({5: 3}), np.random.default_rng(1)
    settings = dict(strategy="softmax", inverse_temperature=1.5, recent_probability=recent_probability)
    rewards = [index.reward[draw(index, rng, **settings)[0]] for _ in range(4000)]
    weights = np.exp(inverse_temperature * np.arange(3))
    assert_frequencies(np.bincount(np.array(rewards, int), minlength=3), weights / weights.sum())


def test_the_share_of_the_recent_pool_is_m():
    index = index_of(dict.fromkeys(range(200), 2), step=1)
    index_of(dict.fromkeys(range(200, 240), 2), step=50, index=index)
    rng, m, recent, trials = np.random.default_rng(2), 0.3, 0, 300
    for _ in range(trials):
        slots = draw(index, rng, step=50, queries=10, completions=2, recent_probability=m, recent_window=1)
        recent += int((queries_of(index, slots, 2) >= 200).sum())
    # The general pool is all 240 queries, of which at most 40 are recent and not drawn yet in this batch.
    n = 10 * trials
    expected = np.array([m + (1 - m) * (40 - 10 * m) / (240 - 10 * m)])
    assert abs(recent / n - expected) < 4.5 * np.sqrt(expected * (1 - expected) / n)
    only = draw(index, rng, step=50, queries=40, completions=2, recent_probability=1.0, recent_window=1)
    assert set(queries_of(index, only, 2).tolist()) == set(range(200, 240))


@pytest.mark.parametrize("recent_probability", [0.0, 1.0])
def test_every_query_is_drawn_once_before_any_twice(recent_probability):
    index, rng = index_of(dict.fromkeys(range(24), 3)), np.random.default_rng(3)
    draws = np.zeros(24, int)
    orders = set()
    for batch in range(12):
        slots = draw(index, rng, queries=5, completions=2, recent_probability=recent_probability)
        index.mark_drawn(slots)
        drawn = queries_of(index, slots, 2).astype(int)
        draws[drawn] += 1
        orders.add(tuple(drawn))
        assert draws.max() - draws.min() <= 1, (batch, draws)
    assert len(orders) == 12
    # A query that comes late joins the running round; it does not repeat the rounds it missed.
    index_of({24: 3}, index=index)
    late = [24 in queries_of(index, draw(index, rng, queries=5, completions=2), 2) for _ in range(50)]
    assert index.query_draws.min() == index.query_draws[-1] == 2
    assert sum(late) > 0


def test_a_query_repeats_responses_only_if_it_has_too_few():
    index, rng = index_of({1: 3, 2: 7, 3: 9}), np.random.default_rng(4)
    for recent_probability in (0.0, 1.0):
        slots = draw(index, rng, queries=3, completions=7, recent_probability=recent_probability).reshape(3, 7)
        for query, group in zip(queries_of(index, slots.ravel(), 7).tolist(), slots, strict=True):
            assert sorted(np.unique(group, return_counts=True)[1].tolist()) == {1: [2, 2, 3], 2: [1] * 7, 3: [1] * 7}[query]


@pytest.mark.parametrize(
    ("settings", "rows"),
    [
        ({}, {1: {12, 13, 14, 15, 16}, 2: {17, 18}}),  # the two recent rows of query 2 are repeated
        ({"recent_fill": "older"}, {1: {12, 13, 14, 15, 16}, 2: {10, 11, 17, 18}}),
        ({"max_draws_per_row": 1}, {1: {12, 13, 14, 15, 16}, 2: {10, 11, 17, 18}}),
    ],
)
def test_a_recent_query_gives_its_recent_rows(settings, rows):
    index = index_of({1: 6, 2: 6}, step=1)
    index_of({1: 5, 2: 2}, step=10, index=index)
    rng, seen = np.random.default_rng(5), {1: set(), 2: set()}
    fixed = dict(queries=2, completions=4, recent_probability=1.0, recent_window=1, **settings)
    for step in range(10, 70):  # nothing newer comes: what is recent stays
        groups = draw(index, rng, step=step, **fixed).reshape(2, 4)
        for query, group in zip(queries_of(index, groups.ravel(), 4).tolist(), groups, strict=True):
            counts = np.unique(group, return_counts=True)[1]
            assert counts.max() - counts.min() <= 1
            seen[query] |= set(index.slot_row[group].tolist())
    assert seen == rows


def test_a_query_without_k_rows_waits_for_them():
    index, rng = index_of({1: 3, 2: 4, 3: 6}, step=1), np.random.default_rng(4)
    for m in (0.0, 1.0):
        slots = draw(index, rng, queries=2, completions=4, recent_probability=m, recent_window=1, recent_fill="wait")
        assert sorted(queries_of(index, slots, 4).tolist()) == [2, 3] and len(set(slots.tolist())) == 8
    assert draw(ReplayIndex(shape=SHAPE, capacity=3, capacity_per_query=3, vocab_size=3), rng) is None
    assert draw(index, rng, queries=4, completions=1) is None
    three = dict(queries=3, completions=4, recent_probability=0.5, recent_window=1)
    assert draw(index, rng, **three, recent_fill="wait") is None and draw(index, rng, **three) is not None


def test_ties_among_the_least_drawn_are_fair():
    rng, counts = np.random.default_rng(6), np.zeros(5, int)
    for _ in range(4000):
        drawn = least_drawn(np.array([1, 0, 1, 5, 1]), 2, rng)
        assert 1 in drawn
        counts[drawn] += 1
    assert counts[1] == 4000 and counts[3] == 0
    assert_frequencies(counts[[0, 2, 4]], np.full(3, 1 / 3))


def test_a_row_that_reached_its_draws_is_not_drawn_again():
    index, rng = index_of({1: 4, 2: 4}), np.random.default_rng(8)
    limited = dict(queries=2, completions=2, max_draws_per_row=2, recent_probability=0.5)
    while (slots := draw(index, rng, **limited)) is not None:
        assert len(set(slots.tolist())) == 4, "a row is not repeated to fill a batch where its draws are limited"
        index.mark_drawn(slots)
    # Each query goes on until fewer than K of its rows may be drawn.
    assert index.row_draws.max() == 2 and index.row_draws.sum() >= 2 * (4 * 2 - 2)
    assert draw(index, rng, **limited | {"max_draws_per_row": 3}) is not None
    # A new query with fewer rows is drawn once.
    index, limited = index_of({1: 2}), dict(completions=3, max_draws_per_row=9)
    slots = draw(index, rng, **limited)
    assert len(slots) == 3
    index.mark_drawn(slots)
    assert draw(index, rng, **limited) is None


def test_a_stale_row_is_not_drawn():
    index = index_of({1: 4, 2: 4}, policy_step=3)
    index_of({1: 1, 3: 2}, index=index, policy_step=8)
    rng = np.random.default_rng(9)
    assert draw(index, rng, step=13, queries=3, max_staleness=9) is None
    slots = draw(index, rng, step=13, queries=2, completions=3, max_staleness=9, recent_probability=0.5)
    assert set(index.slot_row[slots].tolist()) == {8, 9, 10}
    assert draw(index, rng, step=13, queries=3, max_staleness=10) is not None


def test_the_recent_pool_of_many_queries_is_the_sorted_one():
    rng = np.random.default_rng(10)
    for _ in range(200):
        n = int(rng.integers(1, 40))
        visible, row_step, arrival = rng.integers(0, 4, n), rng.integers(0, 4, n), rng.permutation(n)
        minimum, inside = int(rng.integers(1, n + 1)), visible >= 3
        expected = np.lexsort((-arrival, -row_step, ~inside))[: max(minimum, inside.sum())]
        pool = recent_pool(visible, row_step, arrival, oldest=3, minimum=minimum)
        assert sorted(pool.tolist()) == sorted(expected.tolist())
        assert pool[inside.sum() :].tolist() == expected[inside.sum() :].tolist()


@pytest.mark.parametrize("large", [0, 10_000])
def test_large_groups_give_what_sorting_gives(monkeypatch, large):
    monkeypatch.setattr("tba_jax.replay.selection.LARGE_GROUP", large)
    rng = np.random.default_rng(11)
    for Q, K in [(1, 5), (4, 3), (7, 20)]:
        group, arrival = rng.integers(0, Q, 300), rng.permutation(300)
        inside = arrival > 250
        newest = newest_rows(group, arrival, inside, Q=Q, K=K, minimum=K)
        log_weights = np.where(rng.random(300) < 0.3, -np.inf, rng.normal(size=300))
        seed = int(rng.integers(1000))
        drawn = draw_within_groups(group, log_weights, np.random.default_rng(seed), Q=Q, K=K)
        keys = log_weights - np.log(np.random.default_rng(seed).standard_exponential(300))
        for q in range(Q):
            own = np.flatnonzero(group == q)
            by_age = own[np.argsort(-arrival[own])]
            expected = own[inside[own]] if inside[own].sum() >= K else by_age[:K]
            assert np.flatnonzero(newest & (group == q)).tolist() == sorted(expected.tolist())
            finite = own[np.isfinite(log_weights[own])]
            by_key = finite[np.argsort(-keys[finite])]
            assert drawn[q].tolist() == [by_key[i % len(by_key)] for i in range(K)]


def test_undrawn_rows_are_those_that_a_batch_will_want():
    settings = dict(
        queries=1, completions=2, recent_probability=1.0, recent_window=1, strategy="uniform", inverse_temperature=1.0
    )
    index, yes, no = index_of({1: 5, 2: 3, 3: 1}, policy_step=3), np.array([True]), np.array([False])

    def count(of_writers=yes, step=3, **changes) -> int:
        return undrawn(index, Selection(**settings | changes), step=step, of_writers=of_writers)

    assert (count(), count(no), count(recent_fill="wait")) == (9, 0, 8)  # query 3 may not be drawn before it has two rows
    index.mark_drawn(index.slots_of([("w", 0), ("w", 1)]))
    assert count() == 6, "of query 1 one group of two is left"
    index.mark_drawn(index.slots_of([("w", 2), ("w", 3), ("w", 5), ("w", 6)]))
    assert count() == 1, "what is left over of queries 1 and 2 waits for nothing"
    assert (count(step=5, max_staleness=2), count(step=6, max_staleness=2)) == (1, 0)
    index_of({4: 2}, step=2, index=index, policy_step=3)
    assert (count(), count(max_draws_per_row=1)) == (2, 3), "that of query 3 is recent no more, and wanted where no row repeats"
