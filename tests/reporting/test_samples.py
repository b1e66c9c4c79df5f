"""Which rows are chosen, against a sort of all rows."""

import numpy as np
import pytest

from tba_jax.reporting import samples
from tba_jax.reporting.rows import Columns


def columns(reward, query, step):
    n = len(reward)
    return Columns(
        writer=np.zeros(n, np.int32),
        row=np.arange(n),
        query_id=np.asarray(query, np.uint64),
        reward=np.asarray(reward, np.float32),
        reward_parts=np.zeros((n, 1), np.float32),
        newest_step=np.asarray(step, np.int32),
        oldest_step=np.asarray(step, np.int32),
        response_length=np.ones(n, np.int32),
        finished=np.ones(n, bool),
        policy_logprob_sum=np.zeros(n, np.float32),
        ref_logprob_sum=np.zeros(n, np.float32),
    )


@pytest.mark.parametrize("seed", range(5))
def test_the_first_rows_are_those_of_a_sort_of_all(seed):
    rng = np.random.default_rng(seed)
    n = 20_000
    table = columns(rng.integers(0, 3, n), np.arange(n), rng.integers(0, 50, n))
    counts = rng.integers(0, 2, n)
    found = samples.chosen(table, counts)
    worst = sorted(range(n), key=lambda i: (table.reward[i], counts[i] == 0, -table.newest_step[i], -i))
    best = sorted(range(n), key=lambda i: (-table.reward[i], counts[i] == 0, -table.newest_step[i], -i))
    newest = sorted(range(n), key=lambda i: (-table.newest_step[i], -i))
    if seed == 0:
        assert len(set(found["worst"])) == samples.ROWS_EACH
    for name, wanted in (("worst", worst), ("best", best), ("newest", newest)):
        key = [(table.reward[i], counts[i] == 0, table.newest_step[i]) for i in wanted[: samples.ROWS_EACH]]
        assert [(table.reward[i], counts[i] == 0, table.newest_step[i]) for i in found[name]] == key


def test_a_group_shows_different_queries_first():
    found = samples.chosen(columns([0, 0, 0, 0, 1], [7, 7, 7, 8, 9], [5, 5, 5, 1, 9]), np.zeros(5, int))
    assert found["worst"][:3] == [2, 3, 4] and sorted(found["worst"]) == [0, 1, 2, 3, 4]


def test_disagreeing_queries_come_with_their_best_and_worst_row():
    table = columns([0, 1, 0.5, 0.6, 5, -5, 2], [1, 1, 2, 2, 3, 3, 4], [0] * 7)
    found = samples.chosen(table, np.zeros(7, int))["disagreeing"]
    assert found == [4, 5, 1, 0, 3, 2]


def test_equal_rewards_do_not_disagree():
    table = columns([1, 1, 1, 1], [1, 1, 2, 3], [0] * 4)
    assert samples.chosen(table, np.zeros(4, int))["disagreeing"] == []


def test_an_empty_table_has_no_samples():
    assert samples.chosen(columns([], [], []), np.zeros(0, int)) == {}
