"""Which queries a searcher takes: Thompson draws against enumeration, and counts that come, stay away or are damaged."""

import dataclasses
import itertools
import math

import numpy as np
import pytest

from tba_jax import trajectory
from tba_jax.replay import success_counts
from tba_jax.replay.success_counts import QueryCounts
from tba_jax.roles.searcher import stream
from tba_jax.roles.searcher.stream import Quota
from tba_jax.run import processes
from tba_jax.storage import published as published_lib
from tba_jax.tasks.interface import Scores
from tests.support import frozen_runs, tiny_snapshots
from tests.support.tiny_searcher import Held, Q, S, committed, publish, weights

POSTERIOR = dict(searchers__prompt_selection="posterior", searchers__prompt_candidates=2)


def beta_cdf(x: np.ndarray, a: int, b: int) -> np.ndarray:
    """P(Beta(a, b) ≤ x) for whole a and b: P(Binomial(a + b − 1, x) ≥ a)."""
    n = a + b - 1
    return sum(math.comb(n, k) * x**k * (1 - x) ** (n - k) for k in range(a, n + 1))


def nearest_probability(posteriors: list[tuple[int, int]], target: float) -> np.ndarray:
    """float64[n]: the probability that the rate of each query is the nearest to the target, by integration on a grid.

    With D the distance to the target, P(i is nearest) = ∫ f_i(d) Π_j P(D_j > d) dd.
    """
    d = np.linspace(0, max(target, 1 - target), 20_001)
    within = [beta_cdf(np.minimum(target + d, 1), a, b) - beta_cdf(np.maximum(target - d, 0), a, b) for a, b in posteriors]
    found = []
    for i, own in enumerate(within):
        others = math.prod(1 - each for j, each in enumerate(within) if j != i) * np.ones_like(d)
        found.append(float(np.sum(np.diff(own) * (others[1:] + others[:-1]) / 2)))
    return np.array(found)


def chosen(successes, trials, **changes):
    settings = dict(size=3, candidates=2, target=0.5, seed=1, writer=2, batch=3) | changes
    return stream.chosen_queries(np.asarray(successes, float), np.asarray(trials, float), **settings)


@pytest.mark.parametrize("target", [0.5, 0.2])
def test_thompson_draws_have_the_probabilities_of_the_posterior(target):
    """One query of a batch of three candidates out of four: over all subsets, the nearest has its probability under the Betas."""
    successes, failures = np.array([0, 3, 1, 8]), np.array([0, 1, 6, 8])
    posteriors = [(1 + s, 1 + f) for s, f in zip(successes.tolist(), failures.tolist(), strict=True)]
    expected = np.zeros(4)
    for among in itertools.combinations(range(4), 3):
        expected[list(among)] += nearest_probability([posteriors[i] for i in among], target) / 4
    assert expected.sum() == pytest.approx(1, abs=1e-6)
    trials = 5_000
    key = dict(size=1, candidates=3, target=target, seed=5, writer=9)
    taken = [chosen(successes, successes + failures, **key, batch=batch)[0] for batch in range(trials)]
    counts = np.bincount(taken, minlength=4)
    assert (np.abs(counts - trials * expected) <= 4.5 * np.sqrt(trials * expected * (1 - expected))).all(), (counts, expected)


def test_a_batch_is_a_function_of_its_key_and_the_counts():
    nothing = np.zeros(40)
    found = chosen(nothing, nothing)
    np.testing.assert_array_equal(found, chosen(nothing, nothing))
    assert len(set(found.tolist())) == 3
    others = [chosen(nothing, nothing, **{name: 7}) for name in ("seed", "writer", "batch")]
    assert all(not np.array_equal(found, other) for other in others)


@pytest.mark.parametrize("writer", [7, 2**31 + 7, 2**32 - 1])
def test_no_two_passes_and_no_two_batches_of_a_searcher_are_alike(writer):
    """Half of all writer numbers are above 2^31, where a key of two numbers is above 2^63."""
    passes = {tuple(stream.query_order(30, seed=1, writer=writer, epoch=epoch).tolist()) for epoch in range(20)}
    batches = {tuple(chosen(np.zeros(30), np.zeros(30), writer=writer, batch=batch).tolist()) for batch in range(20)}
    assert len(passes) == len(batches) == 20


def test_certain_rates_are_taken_by_their_distance_and_few_queries_again_and_again():
    many = np.full(10, 1e9)
    found = chosen(many * np.arange(10) / 10, many, size=4, candidates=10, target=0.31)
    assert found.tolist() == [3, 4, 2, 5]
    assert sorted(chosen([0, 0], [0, 0], size=5).tolist()) in ([0, 0, 0, 1, 1], [0, 0, 1, 1, 1])


def published(s, step: int, counts: QueryCounts | None) -> None:
    """A snapshot with counts beside it."""
    beside = {} if counts is None else {success_counts.FILE: counts.to_bytes()}
    tiny_snapshots.publish(s.run.policies, step, weights(s, step), beside=beside)


def counts_of(s, easy: int) -> QueryCounts:
    """The first `easy` queries always succeed, all others half of the time, both for certain."""
    ids = np.array([trajectory.query_id(query.prompt) for query in s.experiment.queries["train"]], np.uint64)
    rates, order = np.where(np.arange(len(ids)) < easy, 1.0, 0.5), np.argsort(ids)
    return QueryCounts(ids[order], 1e6 * rates[order], np.full(len(ids), 1e6))


def asked(s, made) -> list[int]:
    """The numbers of the queries in the log, in order."""
    ids = [trajectory.query_id(query.prompt) for query in s.experiment.queries["train"]]
    return [ids.index(int(each)) for each in frozen_runs.rows(s)[made.writer]["query_id"][::S]]


def test_a_searcher_that_joins_late_chooses_by_the_newest_counts(quick):
    """Seven of ten queries are easy: with all of them among the candidates, a batch is the three others."""
    s, made = quick(searchers__prompt_selection="posterior")
    published(s, 4, counts_of(s, 7))
    assert made.refresh()
    for _ in range(3):
        made.search()
    assert [sorted(asked(s, made)[i : i + Q]) for i in (0, 3, 6)] == [[7, 8, 9]] * 3
    # Snapshots that retention removes take their counts with them, and the last ones stay in use.
    tiny_snapshots.withdraw(s.run.policies, 4)
    published(s, 6, None)
    assert made.refresh()
    made.search()
    assert sorted(asked(s, made)[-Q:]) == [7, 8, 9]
    published(s, 8, counts_of(s, 0))
    assert made.refresh()
    made.search()
    assert committed(s) == 5 * Q * S


def test_with_damaged_counts_every_query_is_as_likely(quick, caplog):
    s, made = quick(**POSTERIOR)
    published(s, 1, counts_of(s, 4))
    (published_lib.kept(s.run.policies)[1] / success_counts.FILE).write_bytes(b"PK\x03\x04 and no more")
    for step in (1, 2):
        made.refresh()
        made.search()
        publish(s, 2) if step == 1 else None
    number, nothing = stream.writer_number(made.writer), np.zeros(10)
    expected = [chosen(nothing, nothing, size=Q, seed=s.config.seed, writer=number, batch=batch).tolist() for batch in range(2)]
    assert asked(s, made) == [*itertools.chain.from_iterable(expected)]
    assert caplog.text.count("goes on with the counts that it has") == 1 and "is damaged" in caplog.text


def test_a_reward_that_is_no_success_rate_is_refused_and_not_written(quick):
    def scaled(scores: Scores) -> Scores:
        return dataclasses.replace(scores, reward=np.where(np.arange(len(scores.reward)) == 5, np.float32(2.5), scores.reward))

    s, made = quick(task=lambda task: Held(task, lambda scores: scores, scaled), **POSTERIOR)
    made.refresh()
    made.search()
    with pytest.raises(processes.BadInput, match=rf"within \[0, 1\], and row {made.writer}:{Q * S + 5} has the reward 2.5"):
        made.search()
    assert committed(s) == Q * S
    s, made = quick("uniform", task=lambda task: Held(task, scaled))
    made.refresh()
    made.search()
    assert committed(s) == Q * S and frozen_runs.rows(s)[made.writer]["reward"].max() == 2.5


def taken_by(quota: Quota) -> int:
    count = 0
    while quota.is_left and count < 100:
        quota.ask()
        count += 1
    return count


def test_a_quota_is_of_whole_batches_and_a_snapshot_or_a_later_grant_renews_it():
    for rows, queries in ((1, 2), (8, 2), (9, 4), (0, 100)):
        assert taken_by(Quota(max_rows=rows, queries_per_batch=2, samples_per_query=4)) == queries
    quota = Quota(max_rows=8, queries_per_batch=2, samples_per_query=4)
    assert taken_by(quota) == 2
    assert not quota.wait(5) and not quota.wait(5), "grants that came before it waited are not its own"
    assert quota.wait(6) and taken_by(quota) == 2 and not quota.wait(6)
    quota.renew()
    assert taken_by(quota) == 2 and not quota.wait(9) and quota.wait(10)
