"""What pages tell of the rows of a query, against a loop over its policies."""

from types import SimpleNamespace

import numpy as np
import pytest

from tba_jax.reporting import stories
from tests.reporting.test_samples import columns


def test_a_query_groups_its_rows_by_policy_and_lists_some_of_very_many():
    steps = np.random.default_rng(0).permutation(np.repeat(np.arange(0, 3000, 3), 2))
    run = SimpleNamespace(columns=columns(np.arange(2000), np.tile([7, 8], 1000), steps))
    summary, groups = stories.of_query(run, "7")
    mine = np.flatnonzero(run.columns.query_id == 7)
    assert [step for step, _, _ in summary] == sorted(set(steps[mine].tolist())) == [*groups]
    for step, count, mean in summary:
        there = mine[steps[mine] == step]
        assert groups[step].tolist() == there.tolist() and count == len(there) and mean == pytest.approx(there.mean())
    chosen = [summary[1][0], summary[-2][0]]
    some = stories.listed(summary, chosen)
    assert {summary[0], summary[1], summary[-2], summary[-1]} <= set(some) and len(some) <= stories.MOST_POLICIES + 2
    assert stories.listed(summary[:3], []) == summary[:3]
