"""Figures of metrics.jsonl by bucket: against a plain computation, in bounded memory, around damaged lines."""

import json

import numpy as np
import pytest

from tba_jax.reporting import series
from tba_jax.reporting.series import BUCKETS, AgeMap, Series


def lines(steps, **columns):
    names = {name: np.broadcast_to(column, len(steps)).tolist() for name, column in columns.items()}
    return [{"step": step, "time": 10.0 + step, **{n: c[i] for n, c in names.items()}} for i, step in enumerate(steps)]


def fed(consumer, given, block=100):
    for begin in range(0, len(given), block):
        consumer.add(given[begin : begin + block])
    return consumer


@pytest.mark.parametrize("count", [1, 7, BUCKETS, BUCKETS + 1, 5 * BUCKETS + 3])
def test_buckets_hold_mean_least_and_greatest_of_their_lines(count):
    values = np.random.default_rng(0).normal(size=count)
    found = fed(Series("step"), lines(range(1, count + 1), reward=values))
    column, steps = found.column("reward"), found.column("step")
    assert len(column.mean) == len(steps.mean) <= BUCKETS
    begin = 0
    for i in range(len(steps.mean)):
        mine = values[int(steps.least[i]) - 1 : int(steps.greatest[i])]
        assert steps.least[i] == begin + 1
        begin += len(mine)
        np.testing.assert_allclose([column.mean[i], column.least[i], column.greatest[i]], [mine.mean(), mine.min(), mine.max()])
    assert begin == count


def test_a_figure_that_comes_late_has_no_values_before():
    given = lines([1, 2]) + lines([3, 4], loss=[5.0, 7.0])
    found = fed(Series("step"), given)
    np.testing.assert_array_equal(found.column("loss").mean, [np.nan, np.nan, 5, 7])
    assert np.isnan(found.column("unknown").mean).all() and "unknown" not in found


def test_steps_that_a_restart_did_again_share_a_bucket():
    given = lines([1, 2, 3], reward=[1.0, 2.0, 3.0]) + lines([2, 3], reward=[4.0, 5.0])
    np.testing.assert_array_equal(fed(Series("step"), given, block=2).column("reward").mean, [1, 3, 4])


def test_a_clock_that_was_set_back_loses_no_line():
    given = [{"step": i, "time": t, "reward": 1.0 * i} for i, t in enumerate([100.0, 101.0, 40.0, 102.0])]
    found = fed(Series("time"), given, block=1)
    assert found.column("reward").greatest.max() == 3 and found.column("step").greatest.tolist() == [2, 1, 3]


def test_the_memory_does_not_grow_with_the_names():
    found = fed(Series("step"), [{"step": 1, "time": 1.0, **{f"name{i}": 1.0 for i in range(5000)}}])
    assert len(found.names) <= series.MOST_NAMES


def test_ages_are_shares_of_the_rows_of_a_step():
    given = [
        {"step": 1, "time": 0.0, "staleness_histogram": {"counts": [3, 1], "edges": [-0.5, 0.5, 1.5]}},
        {"step": 2, "time": 0.0, "staleness_histogram": {"counts": [4], "edges": [1.5, 3.5]}},
        {"step": 3, "time": 0.0},
        {"step": 4, "time": 0.0, "staleness_histogram": {"counts": [1], "edges": "damaged"}},
    ]
    steps, ages, shares = fed(AgeMap(), given).shares()
    assert steps.tolist() == [1, 2] and ages.tolist() == [0, 1, 2, 3]
    np.testing.assert_allclose(shares.T, [[0.75, 0.25, 0, 0], [0, 0, 0.5, 0.5]])


def test_ages_fold_and_stay_shares():
    given = [
        {"step": step, "time": 0.0, "staleness_histogram": {"counts": [7], "edges": [step / 10, step / 10 + 2]}}
        for step in range(1, 3001)
    ]
    steps, ages, shares = fed(AgeMap(), given).shares()
    assert len(steps) <= BUCKETS // 2 and len(ages) <= series.MOST_AGES
    np.testing.assert_allclose(shares.sum(axis=0), 1.0)
    assert ages[shares[:, -1].argmax()] == pytest.approx(300, abs=8)


def test_damaged_lines_are_counted_and_left_out(tmp_path):
    whole = [json.dumps(line) for line in lines([1, 2, 3], reward=1.0)]
    odd = ["[1]", '{"step": "a", "time": 1}', '{"step": 1', "\x00\x00", '{"time": 3.0}', '{"step": NaN, "time": 1}']
    (tmp_path / "metrics.jsonl").write_text("\n".join([whole[0], *odd, *whole[1:], '{"step": 4, "ti']))
    found = Series("step")
    read = series.read(tmp_path, [found])
    assert (read.count, read.damaged) == (3, len(odd)) and found.column("step").mean.tolist() == [1, 2, 3]
    assert (read.first["step"], read.last["step"]) == (1, 3)


def test_a_role_without_metrics_has_no_lines(tmp_path):
    assert series.read(tmp_path, [Series("step")]).count == 0
