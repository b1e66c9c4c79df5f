"""Figures of curves, worked out by hand."""

import math

import pytest

from benchmarks import summary


def test_a_value_is_on_the_line_between_its_neighbours_and_none_is_guessed_beyond():
    points = [(6.0, 0.9), (0.0, 0.5), (2.0, 0.7)]
    assert summary.on_line(1.0, points) == pytest.approx(0.6)
    assert summary.on_line(5.0, points) == pytest.approx(0.85)
    assert math.isnan(summary.on_line(10.0, points)) and math.isnan(summary.on_line(-1.0, points))


def test_a_crossing_is_the_first_and_lies_between_two_points():
    curve = {30: 0.8, 0: 0.2, 10: 0.4, 20: 0.3}
    assert summary.crossing(curve, 0.3) == pytest.approx(5)
    assert summary.crossing(curve, 0.6) == pytest.approx(26)
    assert summary.crossing(curve, 0.2) == 0
    assert summary.crossing(curve, 0.81) == math.inf
