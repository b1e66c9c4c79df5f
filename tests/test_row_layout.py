"""Where rows lie in sequences, and what is found there."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, strategies

from tba_jax import packing
from tba_jax.packing import Limits


def limits(**changes) -> Limits:
    return Limits(**dict(length=20, sequences=4, ways=2, rows=24, group=3) | changes)


lengths = strategies.lists(strategies.integers(1, 20), min_size=24, max_size=24).map(np.array)


@given(lengths, strategies.sampled_from([2, 4, 8, 24]), strategies.sampled_from([0.0, 0.4, 10.0]))
def test_every_row_lies_in_one_place_within_the_limits(tokens, sequences, second_pass):
    of = limits(sequences=sequences)
    found = row_layout.plan(tokens, of, second_pass=second_pass)
    assert sorted(row for part in found.parts for rows in part for row in rows) == list(range(24))
    assert (
        len(found.parts) <= of.micro_batches(found.sequences) and found.sequences <= sequences and found.sequences % of.ways == 0
    )
    for part in found.parts:
        assert len(part) <= found.sequences
        assert all(sum(tokens[row] for row in rows) <= of.length for rows in part)
        groups = {row // of.group for rows in part for row in rows}
        assert not found.whole_groups or len(groups) * of.group == sum(map(len, part))
    if found.one_row:
        assert found.sequences == sequences and all(len(rows) == 1 for part in found.parts for rows in part)
    computed = len(found.parts) * found.sequences * of.length
    assert found.useful == pytest.approx(tokens.sum() / computed)
    assert row_layout.plan(tokens, of, second_pass=second_pass) == found, "it follows from the lengths alone"


def test_numbers_of_sequences_are_few():
    for sequences, ways in ((1, 1), (6, 2), (8, 8), (40, 4), (4096, 16)):
        of = limits(sequences=sequences, ways=ways)
        found = {of.rounded(count) for count in range(1, sequences + 1)}
        assert len(found) <= 7 and max(found) == sequences and all(count % ways == 0 for count in found)
        assert all(count <= of.rounded(count) for count in range(1, sequences + 1))


def test_groups_are_split_where_they_waste_more_than_a_second_pass():
    tokens = np.array([14, 14, 14, 1, 1, 1] * 4)  # a micro-batch of four sequences holds one group of long rows
    together = row_layout.plan(tokens, limits(), second_pass=0.4)
    assert together.whole_groups and len(together.parts) == 4
    apart = row_layout.plan(tokens, limits(), second_pass=0.2)
    assert not apart.whole_groups and len(apart.parts) == 3


def test_rows_lie_alone_where_packing_saves_nothing():
    """24 long rows; 22 packed sequences, which count as 24; and 16 sequences, which have a shape of their own."""
    for tokens, sequences, one_row in (([11] * 24, 24, True), ([11] * 22 + [5] * 2, 24, True), ([11] * 16 + [5] * 8, 16, False)):
        found = row_layout.plan(np.array(tokens), limits(sequences=24), second_pass=0.0)
        assert (found.sequences, found.one_row) == (sequences, one_row)


def test_a_row_longer_than_a_sequence_is_refused():
    with pytest.raises(ValueError, match="a row of 21 tokens does not fit a sequence of 20"):
        row_layout.plan(np.full(24, 21), limits(), second_pass=0.0)


# Packed sequences, and sequences of one row.
@pytest.mark.parametrize("sequences", [4, 24])
def test_rows_are_found_again_in_their_sequences(sequences):
    rng = np.random.default_rng(0)
    B, P, R = 24, 9, 12
    prompt, response = rng.integers(1, P + 1, B), rng.integers(0, R + 1, B)
    if sequences == B:
        prompt, response = np.full(B, P), rng.integers(R // 2, R + 1, B)
    tokens = rng.integers(1, 1000, (B, P + R)).astype(np.int32)
    of = limits(length=P + R - 1, sequences=sequences, rows=B)
    found = row_layout.plan(packing.row_tokens(prompt, response), of, second_pass=0.0)
    whole = packing.pack(tokens, prompt, response, R=R, plan=found, limits=of)
    packed, S = whole.micro_batches, P + R - 1
    if found.one_row:
        assert packed.segments is None and packed.positions is None and packed.states.shape[2] == R
        row = packed.numbers.max(axis=2, where=packed.numbers < B * R, initial=-1) // R
        size = np.where(row < 0, 0, (prompt + response - 1)[row])
        segments = (np.arange(S) < size[..., None]).astype(np.int32)
        packed = dataclasses.replace(packed, segments=segments, positions=np.arange(S) * segments)
    assert found.one_row == (sequences == B)
    assert packed.tokens.shape == (of.micro_batches(found.sequences), found.sequences, P + R - 1) and whole.count == len(
        found.parts
    )
    seen = np.zeros(B * R, bool)
    for i, j in np.ndindex(*packed.tokens.shape[:2]):
        of_sequence = [x[i, j] for x in (packed.tokens, packed.segments, packed.positions)]
        for state, target, number in zip(packed.states[i, j], packed.targets[i, j], packed.numbers[i, j], strict=True):
            if number == B * R:
                continue
            assert not seen[number]
            seen[number] = True
            row, t = divmod(number, R)
            assert whole.of_row[row] == i
            assert target == tokens[row, prompt[row] + t]
            (its,) = np.nonzero(of_sequence[1] == of_sequence[1][state])
            np.testing.assert_array_equal(of_sequence[0][its], tokens[row, : prompt[row] + response[row] - 1])
            np.testing.assert_array_equal(of_sequence[2][its], np.arange(len(its)))
            assert state == its[0] + prompt[row] + t - 1
    np.testing.assert_array_equal(seen.reshape(B, R), np.arange(R) < response[:, None])


@pytest.mark.parametrize("queries, completions, sequences", [(7, 20, 140), (8, 8, 8), (32, 16, 16), (32, 16, 64)])
def test_short_rows_leave_little_padding(queries, completions, sequences):
    """Rows as long as those of GSM8K: about an eighth of a sequence, some a half of it."""
    rng, rows = np.random.default_rng(0), queries * completions
    of = Limits(length=1023, sequences=sequences, ways=1, rows=rows, group=completions)
    found = [
        row_layout.plan(np.minimum(rng.lognormal(4.9, 0.5, rows).astype(int), 1023), of, second_pass=1 / 3) for _ in range(20)
    ]
    assert sum(plan.useful_tokens for plan in found) > 0.8 * sum(plan.computed_tokens for plan in found)
    assert len({plan.sequences for plan in found}) <= 7
