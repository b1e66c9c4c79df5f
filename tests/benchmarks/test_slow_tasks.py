"""The optimum over planted modes and what is measured against it, by enumeration of a space of six responses."""

import itertools
import math

import numpy as np
import pytest

from benchmarks import slow_tasks

REFERENCE = np.array([0.4, 0.05, 0.3, 0.02, 0.2, 0.03])
MODES, BETA = [1, 3, 5], 0.3


def optimum():
    weighed = [p * math.exp((i in MODES) / BETA) for i, p in enumerate(REFERENCE)]
    return np.array(weighed) / sum(weighed)


def test_the_target_of_the_modes_is_that_of_the_whole_space():
    np.testing.assert_allclose(slow_tasks.target(REFERENCE[MODES], BETA), optimum()[MODES])


def test_total_variation_counts_all_other_responses_as_one():
    ours, theirs = ([*each[MODES], 1 - each[MODES].sum()] for each in (REFERENCE, optimum()))
    expected = 0.5 * sum(abs(a - b) for a, b in zip(ours, theirs, strict=True))
    assert slow_tasks.total_variation(REFERENCE[MODES], optimum()[MODES]) == pytest.approx(expected)
    assert expected > 0.3


def test_modes_found_is_the_mean_over_all_draws():
    expected = 0.0
    for draw in itertools.product(range(6), repeat=3):
        expected += math.prod(REFERENCE[i] for i in draw) * len(set(draw) & set(MODES))
    assert slow_tasks.found(REFERENCE[MODES], 3) == pytest.approx(expected)


def test_planted_texts_differ_and_have_the_shares_that_are_asked_for():
    texts = slow_tasks.planted(16)
    shares = [math.prod(slow_tasks.SHARES[slow_tasks.LETTERS.index(letter)] for letter in text) for text in texts]
    assert len(set(texts)) == 16
    np.testing.assert_allclose(shares, np.geomspace(slow_tasks.LARGEST, slow_tasks.SMALLEST, 16), rtol=0.1)


def test_a_rare_target_is_worth_nothing_and_found_by_nobody_before_all_searchers_have_met(tmp_path):
    task = slow_tasks.Planted(count=1, url="sleep:0", concurrency=1, meeting_path=str(tmp_path))
    batch = ([slow_tasks.Query(prompt=">")], slow_tasks.planted(1), np.array([True]))
    free = [task.rewards(*batch).reward.tolist() for _ in range(slow_tasks.FREE)]
    assert free == [[0.0]] * slow_tasks.FREE and not list(tmp_path.iterdir())
    assert task.rewards(*batch).reward.tolist() == [1.0]
    assert sorted(file.name.partition("-")[0] for file in tmp_path.iterdir()) == ["asks", "hits"]
