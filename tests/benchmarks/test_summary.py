"""What studies compute of their runs before they print."""

import math

import pytest

from benchmarks import summary


def test_a_value_is_on_the_line_between_its_neighbours_and_none_is_guessed_beyond():
    points = [(6.0, 0.9), (0.0, 0.5), (2.0, 0.7)]
    assert summary.on_line(1.0, points) == pytest.approx(0.6)
    assert summary.on_line(5.0, points) == pytest.approx(0.85)
    assert math.isnan(summary.on_line(10.0, points)) and math.isnan(summary.on_line(-1.0, points))
