"""Off-policy estimates against exact expectations, loops, and the share of intervals that hold the truth."""

import numpy as np
import pytest

from tba_jax.replay import off_policy

REWARD = np.array([1.0, 0.0, 0.3, -0.5])
POLICY = np.array([[0.7, 0.1, 0.1, 0.1], [0.2, 0.5, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4]])  # of three queries
COUNTS = np.array([[1, 4, 3, 2], [2, 2, 2, 4], [5, 2, 2, 1]])


def rows_in_proportion() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """log-weights, rewards and queries of rows of which exactly the share μ has each response."""
    behavior = COUNTS / COUNTS.sum(axis=1, keepdims=True)
    query, response = np.divmod(np.repeat(np.arange(COUNTS.size), COUNTS.reshape(-1)), COUNTS.shape[1])
    return np.log(POLICY / behavior)[query, response], REWARD[response], query


def test_rows_in_proportion_to_their_probability_give_the_exact_expectation():
    found = off_policy.estimate(*rows_in_proportion())
    np.testing.assert_allclose(found.mean, (POLICY @ REWARD).mean(), rtol=1e-12)
    np.testing.assert_allclose(found.plain, (COUNTS @ REWARD).sum() / COUNTS.sum(), rtol=1e-12)
    assert (found.rows, found.queries) == (30, 3) and found.low < found.mean < found.high


def test_effective_rows_and_interval_are_those_of_loops():
    log_weight, reward, query = rows_in_proportion()
    found = off_policy.estimate(log_weight - 800.0, reward, query)  # a common factor of all weights does not count
    w = [float(np.exp(each)) for each in log_weight]
    mean = sum(a * b for a, b in zip(w, reward, strict=True)) / sum(w)
    np.testing.assert_allclose(found.effective, sum(w) ** 2 / sum(each**2 for each in w), rtol=1e-12)
    squares = 0.0
    for each in range(3):
        squares += sum(w[i] * (reward[i] - mean) for i in range(len(w)) if query[i] == each) ** 2
    half = 4.302652729911275 * (3 / 2 * squares) ** 0.5 / sum(w)  # t of two degrees of freedom, from a table
    np.testing.assert_allclose((found.low, found.high), (mean - half, mean + half), rtol=1e-9)
    assert off_policy.estimate(np.log([1.0, 1.0, 2.0]), np.zeros(3), np.arange(3)).effective == pytest.approx(16 / 6)


def test_one_query_has_no_interval_and_rows_that_the_policy_cannot_draw_no_weight():
    found = off_policy.estimate(np.zeros(3), np.array([1.0, 0.0, 2.0]), np.zeros(3))
    assert (found.mean, found.low, found.high) == (1.0, -np.inf, np.inf)
    assert off_policy.estimate(np.array([0.0, -np.inf]), np.array([0.25, 9.0]), np.arange(2)).mean == 0.25
    assert off_policy.estimate(np.full(2, -np.inf), np.ones(2), np.arange(2)).effective == 0
    for log_weight in ([np.nan, 0.0], [np.inf, 0.0], []):
        with pytest.raises(ValueError, match="importance weights"):
            off_policy.estimate(np.array(log_weight), np.ones(len(log_weight)), np.arange(len(log_weight)))


def synthetic_log(rng: np.random.Generator, *, queries: int, rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:
    """log-weights, rewards and queries of a log, and the true mean over all queries that there might be.

    A query's chance θ of a right answer is uniform in [0.1, 0.9] under π; μ of each row has it between its half and itself.
    """
    theta, half = rng.uniform(0.1, 0.9, queries), rng.uniform(0.5, 1.0, (queries, rows))
    right = rng.random((queries, rows)) < theta[:, None] * half
    weight = np.where(right, 1 / half, (1 - theta[:, None]) / (1 - theta[:, None] * half))
    return np.log(weight).reshape(-1), right.reshape(-1).astype(float), np.repeat(np.arange(queries), rows), 0.5


@pytest.mark.parametrize("queries", [8, 60])
def test_intervals_hold_the_truth_as_often_as_they_say(queries):
    """1,500 logs: a share of 0.95 has a standard error of 0.006."""
    rng, logs = np.random.default_rng(0), 1500
    covered, means = 0, []
    for _ in range(logs):
        *log, truth = synthetic_log(rng, queries=queries, rows=12)
        found = off_policy.estimate(*log)
        covered += found.low <= truth <= found.high
        means.append(found.mean)
    assert 0.93 < covered / logs < 0.97
    assert abs(np.mean(means) - 0.5) < 0.01


def test_rows_of_a_query_taken_for_independent_ones_would_cover_less():
    rng, covered = np.random.default_rng(1), 0
    for _ in range(400):
        log_weight, reward, query, truth = synthetic_log(rng, queries=60, rows=12)
        found = off_policy.estimate(log_weight, reward, np.arange(len(query)))
        covered += found.low <= truth <= found.high
    assert covered / 400 < 0.9


def test_queries_are_told_as_by_loops():
    rng = np.random.default_rng(2)
    query, reward = rng.choice(np.array([7, 2**63 + 1, 40], np.uint64), 25), rng.normal(size=25)
    log_ratio = np.where(query == 40, np.nan, rng.normal(size=25))
    found = off_policy.by_query(query, reward, log_ratio)
    assert found.query.tolist() == [7, 40, 2**63 + 1]
    for g, each in enumerate(found.query):
        mine = query == each
        assert found.rows[g] == mine.sum() and query[found.first[g]] == each
        np.testing.assert_allclose((found.mean[g], found.spread[g]), (reward[mine].mean(), reward[mine].std()))
        np.testing.assert_allclose(found.log_weight_std[g], log_ratio[mine].std())


def outcomes(policy: np.ndarray) -> np.ndarray:
    """P of each of `forced_rows` under first-token and second-token probabilities of end, a and b: float64[5]."""
    first, second = policy
    return np.concatenate([first[:1], *(first[i] * np.array([second[0], 1 - second[0]]) for i in (1, 2))])


def forced_rows(behavior: np.ndarray) -> dict[str, np.ndarray]:
    """What may come of two tokens of which the last is forced to be the end: the end; a or b, with the end drawn or not."""
    first, second = np.log(behavior)
    logprobs = [(first[0], 0.0), *((first[i], second[0]) for i in (1, 1, 2, 2))]
    length, finished = np.array([1, 2, 2, 2, 2]), np.array([True, True, False, True, False])
    return {
        "response_length": length,
        "policy_step": np.zeros((5, 2), np.int32),
        "behavior_logprobs": np.array(logprobs, np.float32),
        "finished": finished,
    }


MU, PI = np.array([[[0.2, 0.5, 0.3], [0.4, 0.5, 0.1]], [[0.1, 0.3, 0.6], [0.9, 0.05, 0.05]]])


def test_a_forced_end_is_weighed_as_what_was_drawn():
    """Every outcome in proportion to its probability gives the exact mean, of a reward that reads `finished` too."""
    rows, reward = forced_rows(MU), np.array([0.3, 1.0, -1.0, 0.5, 2.0])
    weight = np.exp(off_policy.log_weight(rows, forced_rows(PI)["behavior_logprobs"], force_eos=True))
    np.testing.assert_allclose(weight, outcomes(PI) / outcomes(MU), rtol=1e-6)
    np.testing.assert_allclose((outcomes(MU) * weight) @ reward, outcomes(PI) @ reward, rtol=1e-6)
    as_drawn = off_policy.log_weight(rows, forced_rows(PI)["behavior_logprobs"], force_eos=False)
    assert np.isclose(as_drawn, np.log(weight)).tolist() == [True, True, False, True, False]


def test_a_response_with_a_forced_end_counts_once_in_the_sum_over_responses():
    """E[p̃(y) / μ(y)] is Σ p̃(y) over all responses, whether their end was drawn or forced."""
    rows = forced_rows(MU)
    target = np.exp(forced_rows(PI)["behavior_logprobs"].sum(axis=1))  # p̃ of a row, its end included, at rewards of 0
    drawn = np.where(off_policy.by_chance(rows, force_eos=True), rows["behavior_logprobs"], 0.0).sum(axis=1)
    found = (outcomes(MU) * target / np.exp(drawn)).sum()
    np.testing.assert_allclose(found, target[[0, 1, 3]].sum(), rtol=1e-6)
