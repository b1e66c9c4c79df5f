"""The study of S > K: what its arms hold equal."""

import pytest

from benchmarks import selection


@pytest.mark.parametrize("arm", list(selection.arms()), ids=str)
def test_an_arm_makes_as_many_rows_or_queries_as_the_one_of_k(arm):
    settings = arm.settings()
    queries = settings["searchers.queries_per_batch"] / settings["schedule.updates_per_search"]
    rows = queries * settings["searchers.samples_per_query"]
    held = {"rows": rows / (selection.QUERIES * selection.COMPLETIONS), "queries": queries / selection.QUERIES}
    assert held[arm.held] == 1
    # The recent pool holds the queries of an update: others would give their newest K rows, always the same ones.
    assert settings["searchers.queries_per_batch"] * settings["replay.recent_window"] >= selection.QUERIES
