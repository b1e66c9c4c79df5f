"""Charts as paths: inside their frame, and none where there is nothing to draw."""

import re

import numpy as np

from tba_jax.reporting import sparklines


def points(path: str) -> np.ndarray:
    return np.array([[float(each) for each in pair.split()] for pair in re.split("[ML]", path)[1:]])


def test_curves_share_their_axes():
    x = np.array([0.0, 5.0, 10.0])
    made = sparklines.chart("t", {"a": (x, np.array([0.0, 1.0, 2.0])), "b": (x + 10, np.array([4.0, 4.0, 4.0]))})
    assert made is not None and (made.first, made.last, made.low, made.high) == (0, 20, 0, 4)
    (_, a, newest), (_, b, _) = made.lines
    assert newest == 2.0 and points(a)[:, 0].tolist() == [0, 75, 150] and points(b)[:, 0].tolist() == [150, 225, 300]
    assert (np.diff(points(a)[:, 1]) < 0).all() and len(set(points(b)[:, 1])) == 1
    assert points(b)[0, 1] < points(a)[:, 1].min()


def test_a_level_curve_has_a_path_and_one_point_has_none():
    made = sparklines.chart("t", {"a": (np.array([1.0, 2.0]), np.array([3.0, 3.0]))})
    assert made is not None and points(made.lines[0][1]).tolist() == [[0, 36], [300, 36]]
    assert sparklines.chart("t", {"a": (np.array([1.0]), np.array([3.0])), "b": (np.zeros(0), np.zeros(0))}) is None
