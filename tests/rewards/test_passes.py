"""Texts of any length through a scorer of few shapes."""

import numpy as np

from tba_jax.rewards import passes


def test_lengths_are_padded_by_less_than_a_quarter_to_few_shapes():
    lengths = [passes.padded_length(longest, 2048) for longest in range(2049)]
    assert all(longest <= padded <= 2048 for longest, padded in enumerate(lengths))
    assert all(padded < 1.25 * longest for longest, padded in enumerate(lengths) if longest > 64)
    assert len(set(lengths)) == 8 + 4 * 4, "multiples of 16 up to 128, and four for each doubling from there"
    assert passes.padded_length(600, 610) == 610 and passes.padded_length(0, 2048) == 16


def test_results_come_in_the_order_of_the_texts():
    rng = np.random.default_rng(0)
    texts = [rng.integers(1, 99, length).tolist() for length in rng.integers(0, 70, 23)]
    shapes = set()

    def score(tokens, length):
        shapes.add(tokens.shape)
        assert tokens.dtype == length.dtype == np.int32
        beyond = np.arange(tokens.shape[1]) >= length[:, None]
        assert (tokens[beyond] == 7).all()
        return np.stack([np.where(beyond, 0, tokens).sum(axis=1), length], axis=1).astype(np.float32)

    found = passes.in_passes(texts, score, rows=4, limit=70, pad_id=7)
    np.testing.assert_array_equal(found, [[sum(text), len(text)] for text in texts])
    assert {rows for rows, _ in shapes} == {4} and len(shapes) > 2
