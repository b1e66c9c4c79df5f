"""Counts of successes against the recursion of MoPPS, whatever the rows are split into, and as they are published."""

import json

import numpy as np
import pytest

from tba_jax.replay import success_counts
from tba_jax.replay.success_counts import SuccessCounts

K = 4


def visits(seed: int, count: int, *, queries: int = 5, fractions: bool = False) -> list[tuple[str, int, np.ndarray]]:
    """(writer, query, K rewards) of visits of two writers, an append each."""
    rng, found = np.random.default_rng(seed), list[tuple[str, int, np.ndarray]]()
    for _ in range(count):
        rewards = rng.random(K) if fractions else rng.integers(0, 2, K).astype(float)
        found.append(("ab"[rng.integers(2)], int(rng.integers(queries)), rewards.astype(np.float32)))
    return found


def counted(given: list[tuple[str, int, np.ndarray]], *, decay: float, parts: int = 1, **settings) -> SuccessCounts:
    """Args: parts: calls for the rows of a visit."""
    counts, heads = SuccessCounts(decay=decay, **settings), dict[str, int]()
    for writer, query, rewards in given:
        for part in np.array_split(rewards, parts):
            head = heads.get(writer, 0)
            counts.add(writer, range(head, head + len(part)), [query] * len(part), part.tolist(), append=head // K * K)
            heads[writer] = head + len(part)
    return counts


@pytest.mark.parametrize(("decay", "fractions"), [(1.0, False), (0.5, True), (0.0, True)])
def test_the_posterior_is_that_of_mopps(decay, fractions):
    """α ← λ α + (1 − λ) α⁰ + s, β ← λ β + (1 − λ) β⁰ + k − s, from α⁰ = β⁰ = 1, with s = Σ r."""
    given = visits(0, 60, fractions=fractions)
    alpha, beta = np.ones(5), np.ones(5)
    for _, query, rewards in given:
        s = rewards.astype(np.float64).sum()
        alpha[query] = decay * alpha[query] + (1 - decay) + s
        beta[query] = decay * beta[query] + (1 - decay) + K - s
    successes, trials = counted(given, decay=decay).published().of(np.arange(5, dtype=np.uint64))
    np.testing.assert_allclose([1 + successes, 1 + trials - successes], [alpha, beta], rtol=1e-12)


def test_splits_and_restores_change_nothing():
    given = visits(1, 50, fractions=True)
    whole = counted(given, decay=0.7)
    assert counted(given, decay=0.7, parts=3).state() == whole.state()
    half = SuccessCounts.restore(json.loads(json.dumps(counted(given[:23], decay=0.7).state())))
    heads = {writer: K * sum(each == writer for each, *_ in given[:23]) for writer in "ab"}
    for writer, query, rewards in given[23:]:
        half.add(writer, range(heads[writer], heads[writer] + K), [query] * K, rewards.tolist(), append=heads[writer])
        heads[writer] += K
    assert half.state() == whole.state()


def test_shares_are_of_each_query_s_last_visit():
    """Query 1 fails now, query 2 is solved now, query 3 had one success of four, query 4 half a success."""
    counts = SuccessCounts(decay=0.5)
    for query, rewards in [(1, (1, 1)), (2, (0, 0)), (3, (0, 0, 1, 0)), (1, (0, 0)), (2, (1, 1)), (4, (0.5,))]:
        counts.add("w", range(len(rewards)), [query] * len(rewards), rewards, append=0)
    rates = [1 / 3, 2 / 3, 1 / 4, 1 / 2]
    scalars, of_queries = counts.measure()
    assert sorted(of_queries) == pytest.approx(sorted(rates))
    shares = {"queries_failed": 0.25, "queries_solved": 0.25, "queries_mixed": 0.5}
    assert scalars == pytest.approx({"success_rate": np.mean(rates), **shares})
    assert SuccessCounts(decay=0.5).measure()[0] == {}


def test_a_reward_that_is_no_success_rate_is_not_counted():
    reward, counts = 1.5, SuccessCounts(decay=1.0)
    counts.add("w", [0, 1, 2], [7, 7, 7], [1.0, reward, 1.0], append=0)
    counts.add("w", [3], [8], [1.0], append=0)
    assert counts.outside == ("w:1", reward) and counts.published().trials.tolist() == [2.0, 1.0]
    scalars, of_queries = counts.measure()
    assert scalars == {} and not of_queries.size
    assert SuccessCounts.restore(json.loads(json.dumps(counts.state()))).outside == ("w:1", reward)
    for given, expected in (([np.nan, 1.0, reward, 2.0], 2), ([np.nan, 0.0, 1.0, -0.25], 3), ([np.nan, 0.0, 1.0], None)):
        assert success_counts.first_outside(np.array(given, np.float32)) == expected


def test_what_is_published_is_read_back_and_damage_is_seen():
    counts = counted(visits(2, 30), decay=0.9).published()
    content = counts.to_bytes()
    read = success_counts.from_bytes(content)
    for name, column in vars(counts).items():
        np.testing.assert_array_equal(getattr(read, name), column)
    asked = np.array([3, 99, 0], np.uint64)
    assert (read.of(asked)[1] > 0).tolist() == [True, False, True]
    empty = success_counts.from_bytes(SuccessCounts(decay=1.0).published().to_bytes())
    assert empty.of(asked)[1].tolist() == [0, 0, 0]
    middle = content.index(counts.trials.tobytes())
    method = content.index(b"PK\x01\x02") + 10  # of the compression, in the directory of the archive
    for damaged in (content[:-30], b"", *(content[:at] + b"\xff" + content[at + 1 :] for at in (middle, method))):
        with pytest.raises(ValueError, match="is damaged"):
            success_counts.from_bytes(damaged)
