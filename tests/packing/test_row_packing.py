"""Rows as sequences of segments: what is found in their arrays."""

import dataclasses

import numpy as np
import pytest

from tba_jax.packing import row_packing
from tba_jax.packing.row_layout import Limits

B, K, P, R = 24, 3, 9, 12


def rows(group: int):
    """tokens, prompt_length and response_length of rows of which `group` consecutive ones have one prompt."""
    rng = np.random.default_rng(0)
    prompt, response = np.repeat(rng.integers(1, P + 1, B // group), group), rng.integers(0, R + 1, B)
    tokens = rng.integers(1, 1000, (B, P + R)).astype(np.int32)
    of_prompt = np.arange(P + R) < prompt[:, None]
    return np.where(of_prompt, np.repeat(tokens[::group], group, axis=0), tokens), prompt, response


def read_by(packed: row_packing.Sequences, way: int, place: int, S: int) -> list[tuple[int, int]]:
    """(token, position) of what the token at a place of its way attends to, in order."""
    sequence, at = divmod(place, S)
    segment = packed.segments[way, sequence]
    own = [(sequence, i) for i in range(at + 1) if segment[i] == segment[at]]
    before = []
    if packed.prefix is not None and packed.parents[way, sequence, at]:
        prefix = packed.prefix[way, sequence]
        before = [(prefix, i) for i in range(S) if packed.segments[way, prefix, i] == packed.parents[way, sequence, at]]
    return [(packed.tokens[(way, *at)], packed.positions[(way, *at)]) for at in before + own]


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("group, ways, tokens", [(K, 1, 0), (1, 1, 0), (K, 2, 0), (K, 1, 4 * (P + R)), (K, 4, P + R), (6, 2, 60)])
def test_each_response_token_is_predicted_from_its_row_alone(shares, group, ways, tokens):
    columns = rows(group)
    row_tokens, prompt, response = columns
    limits = Limits(rows=B, group=K, prompt=P, response=R, shares=shares, ways=ways, tokens=tokens)
    whole, plan = row_packing.of_rows(*columns, limits=limits, second_pass=0.3)
    n, S = limits.micro_batches(plan.sequences), limits.length
    assert whole.micro_batches.tokens.shape == (n, ways, plan.sequences // ways, S) and whole.count == len(plan.parts)
    seen = np.zeros(B * R, bool)
    for number in range(n):
        packed = row_packing.Sequences(
            **{
                field.name: None if (leaf := getattr(whole.micro_batches, field.name)) is None else leaf[number]
                for field in dataclasses.fields(row_packing.Sequences)
            }
        )
        for way, sequence, i in np.argwhere(packed.numbers < B * R):
            token = packed.numbers[way, sequence, i]
            assert number < whole.count and not seen[token]
            seen[token] = True
            row, t = divmod(token, R)
            assert whole.of_row[row] == number
            assert packed.targets[way, sequence, i] == row_tokens[row, prompt[row] + t]
            expected = [(row_tokens[row, i], i) for i in range(prompt[row] + t)]
            assert read_by(packed, way, packed.states[way, sequence, i], S) == expected
        listed = (packed.numbers < B * R).sum(axis=2)
        assert (listed.max(axis=1) <= -(-listed.sum(axis=1) // listed.shape[1])).all(), "evenly over the sequences of a way"
    np.testing.assert_array_equal(seen.reshape(B, R), np.arange(R) < response[:, None])


def test_rows_alone_are_predicted_alike():
    tokens, prompt, response = rows(K)
    packed = row_packing.alone(tokens, prompt, response, R=R).micro_batches
    for _, _, row, t in np.argwhere(np.asarray(packed.numbers) < B * R):
        assert packed.numbers[0, 0, row, t] == row * R + t and t < response[row]
        assert packed.targets[0, 0, row, t] == tokens[row, prompt[row] + t]
        assert packed.states[0, 0, row, t] == row * (P + R - 1) + prompt[row] + t - 1
    assert (np.asarray(packed.numbers) < B * R).sum() == response.sum()
