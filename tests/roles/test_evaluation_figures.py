"""The figures of an evaluation against loops, subsets and formulas by hand."""

import itertools
import math

import numpy as np
import pytest

from tba_jax.roles.evaluation_figures import majority, mean, pass_at, with_stderr


def by_hand(values: np.ndarray) -> tuple[float, float]:
    """The mean of float[K, Q], and its standard error with the queries as clusters, by loops."""
    known = [(query, float(x)) for row in values for query, x in enumerate(row) if not math.isnan(x)]
    m = sum(x for _, x in known) / len(known)
    queries = {query for query, _ in known}
    squares = sum(sum(x - m for of, x in known if of == query) ** 2 for query in queries)
    return m, math.sqrt(len(queries) / (len(queries) - 1) * squares) / len(known)


@pytest.mark.parametrize("samples", [1, 4])
@pytest.mark.parametrize("missing", [0.0, 0.3], ids=["all", "some are missing"])
def test_the_standard_error_has_queries_as_clusters(samples, missing):
    rng = np.random.default_rng(samples)
    values = rng.normal(size=(samples, 50)) + 3 * rng.normal(size=50)
    values[rng.random(values.shape) < missing] = np.nan
    found = mean("score", values)
    assert (found["score"], found["score_stderr"]) == pytest.approx(by_hand(values))
    if not missing:
        assert found["score_stderr"] == pytest.approx(values.mean(axis=0).std(ddof=1) / math.sqrt(50))


def test_of_fewer_than_two_units_there_is_no_error():
    assert mean("rate", np.array([[1.0]])) == {"rate": 1.0} and mean("rate", np.ones((3, 8))) == {"rate": 1.0, "rate_stderr": 0.0}
    assert mean("rate", np.array([[1.0, np.nan], [0.0, np.nan]])) == {"rate": 0.5}, "one query of two has a value"
    for nothing in (np.full((2, 3), np.nan), np.zeros((1, 0))):
        (value,) = mean("rate", nothing).values()
        assert math.isnan(value)


def test_the_samples_of_a_single_query_are_the_units():
    values = np.array([[0.0], [1.0], [1.0], [1.0]])
    assert mean("rate", values) == pytest.approx({"rate": 0.75, "rate_stderr": math.sqrt(0.75 * 0.25 / 3)})


def test_the_error_stands_beside_its_figure():
    figures = {"a": 0.5, "a_stderr": 0.0312, "b": -0.0001, "c": None, "d": math.nan, "d_stderr": None}
    assert [with_stderr(figures, name) for name in "abcde"] == ["0.500 ± 0.031", "0.000", "–", "–", "–"]


@pytest.mark.parametrize("samples, right", [(1, 1), (4, 0), (4, 1), (4, 3), (4, 4), (7, 2), (16, 5)])
def test_pass_at_k_is_the_share_of_subsets_that_hold_a_right_one(samples, right):
    given = [True] * right + [False] * (samples - right)
    for k in range(1, samples + 1):
        subsets = [any(subset) for subset in itertools.combinations(given, k)]
        found = pass_at(np.array([right, samples]), samples, k)
        np.testing.assert_allclose(found, [np.mean(subsets), 1], rtol=1e-12)


@pytest.mark.parametrize(
    "answers, right, share",
    [
        (["3", "4", "3"], [True, False, True], 1),
        (["3", "4", "4"], [True, False, False], 0),
        (["3", "4"], [True, False], 0.5),
        (["", "", "3"], [False, False, True], 1),  # nothing is no answer
        (["", ""], [False, False], 0),
        (["3", "3"], [True, False], 0.5),  # one was cut at the limit, say
    ],
)
def test_the_majority_is_right_as_its_most_frequent_answers(answers, right, share):
    assert majority(answers, right) == share
