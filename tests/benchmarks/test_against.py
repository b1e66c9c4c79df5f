"""Ratios of two checkouts, and the verdict on them, from numbers worked out by hand."""

from benchmarks import against
from benchmarks.against import Ratios


def test_quartiles_are_of_the_ratios_of_pairs():
    # Ratios 2, 1, 3, 5, 4: the medians of both alone would say 8 / 2 = 4.
    assert against.ratios([20, 1, 9, 5, 8], [10, 1, 3, 1, 2]) == Ratios(2, 3, 4)
    # Ratios 1, 2, 3, 4: the quartiles lie three quarters and one quarter of the way between two of them.
    assert against.ratios([4, 3, 2, 1], [1, 1, 1, 1]) == Ratios(1.75, 2.5, 3.25)


def test_the_lower_quartile_decides():
    noisy, slow, equal = Ratios(0.9, 1.2, 1.5), Ratios(1.04, 1.05, 1.06), Ratios(1.03, 1.03, 1.03)
    found = {"update": {"seconds": noisy, "memory": equal}, "decode": {"seconds": slow}}
    (sentence,) = against.worse(found, 1.03)
    assert "decode: seconds" in sentence and "1.040" in sentence
    assert against.worse(found, 1.05) == []
