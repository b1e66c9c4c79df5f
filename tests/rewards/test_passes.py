"""Texts of any length through a scorer of few shapes."""

from tba_jax.rewards import passes


def test_lengths_are_padded_by_less_than_a_quarter_to_few_shapes():
    lengths = [passes.padded_length(longest, 2048) for longest in range(2049)]
    assert all(longest <= padded <= 2048 for longest, padded in enumerate(lengths))
    assert all(padded < 1.25 * longest for longest, padded in enumerate(lengths) if longest > 64)
    assert len(set(lengths)) == 8 + 4 * 4, "multiples of 16 up to 128, and four for each doubling from there"
    assert passes.padded_length(600, 610) == 610 and passes.padded_length(0, 2048) == 16
