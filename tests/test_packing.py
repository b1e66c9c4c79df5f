"""Where rows lie in sequences."""

import numpy as np
import pytest
from hypothesis import given, strategies
from hypothesis import settings as hypothesis_settings

from tba_jax import packing
from tba_jax.packing import Lengths, Limits

B, P, R = 24, 8, 12


def limits(full_rows: int = 0, **changes) -> Limits:
    """24 rows of 8 queries. Args: full_rows: that a micro-batch of two ways holds; 0: all."""
    sizes = dict(rows=B, group=3, prompt=P, response=R, shares=True, ways=2)
    return Limits(**sizes | dict(tokens=full_rows * (P + R) // 2) | changes)


def lengths_of(prompt, response, *, group: int = 3) -> Lengths:
    """Rows of which `group` consecutive ones have the prompt of the first."""
    return Lengths(np.repeat(prompt[::group], group), np.array(response), np.repeat(np.arange(len(prompt) // group), group))


@strategies.composite
def settings(draw):
    """Limits, and lengths of rows whose groups have one prompt; prompts of several queries may be equal."""
    P, R = draw(strategies.integers(1, 9)), draw(strategies.integers(1, 9))
    Q, K, ways = (draw(strategies.integers(1, most)) for most in (8, 5, 8))
    rows, tokens = Q * K, draw(strategies.sampled_from([0, 1, 2, 4])) * (P + R)
    of = Limits(rows=rows, group=K, prompt=P, response=R, shares=draw(strategies.booleans()), tokens=tokens, ways=ways)
    full = draw(strategies.booleans())
    prompt = np.array(draw(strategies.lists(strategies.integers(P if full else 1, P), min_size=Q, max_size=Q)))
    response = np.array(draw(strategies.lists(strategies.integers(R if full else 0, R), min_size=rows, max_size=rows)))
    same = np.array(draw(strategies.lists(strategies.integers(0, Q - 1), min_size=Q, max_size=Q)))
    return of, Lengths(prompt[same].repeat(K), response, same.repeat(K))


@hypothesis_settings(max_examples=120, deadline=None, derandomize=True)
@given(settings(), strategies.sampled_from([0.0, 0.4, 10.0]))
def test_every_token_lies_in_one_place_within_the_limits(settings, second_pass):
    of, lengths = settings
    if of.rows % of.ways:
        return  # refused where a run begins
    found = packing.plan(lengths, of, second_pass=second_pass)
    assert len(found.parts) <= of.micro_batches(found.sequences)
    assert found.sequences in of.shapes and found.sequences % of.ways == 0 and len(of.shapes) <= 8
    lain = np.zeros((of.rows, of.prompt + of.response), int)
    for part in found.parts:
        assert len(part) == of.ways and max(map(len, part)) <= found.sequences // of.ways
        rows = [piece.row for way in part for laid in way for piece in laid.pieces if not of.shares or piece.first]
        groups = {row // of.group for row in rows}
        assert not found.whole_groups or len(groups) * of.group == len(rows)
        for way in part:
            check_way(way, lengths, of, lain)
            listed = lengths.response[list({piece.row for laid in way for piece in laid.pieces})].sum()
            assert listed <= of.places(found.sequences) * found.sequences // of.ways
    for row in range(of.rows):
        prompt, response = lengths.prompt[row], lengths.response[row]
        taken = range(prompt, prompt + response) if of.shares else range(max(1, prompt + response - 1))
        assert (lain[row, taken] == 1).all() and lain[row, prompt + response :].sum() == 0
    computed = len(found.parts) * found.sequences * of.length
    assert found.computed_tokens == computed and found.useful_tokens == lain.sum() <= computed
    assert packing.plan(lengths, of, second_pass=second_pass) == found, "it follows from the lengths alone"


def test_rows_that_do_not_fit_are_refused():
    for prompt, response, sentence in ((9, 1, "a prompt of 9 tokens is longer than the 8"), (1, 13, "a response of 13 .* 12")):
        with pytest.raises(ValueError, match=sentence):
            packing.plan(lengths_of(np.full(B, prompt), np.full(B, response)), limits(), second_pass=0.0)
    lengths = Lengths(np.full(8, 512), np.full(8, 64), np.arange(8))
    with pytest.raises(ValueError, match="some of 8 consecutive rows have other prompts: 8 rows do not fit"):
        packing.plan(lengths, Limits(rows=8, group=8, prompt=512, response=64, shares=True), second_pass=0.0)


def check_way(way, lengths, of, lain):
    """Counts the tokens of a way's sequences, and checks that each response continues its own prompt."""
    for laid in way:
        assert sum(piece.size for piece in laid.pieces) <= of.length
        for row, first, size in laid.pieces:
            lain[row, first : first + size] += 1
            if of.shares and first:
                prompts = [piece.row for piece in way[laid.prefix].pieces if not piece.first]
                assert lengths.query[row] in lengths.query[prompts] and first == lengths.prompt[row]


def test_short_queries_share_sequences():
    """A query takes 8 tokens, a prompt and three responses of 2 each: three queries fill two sequences."""
    found = packing.plan(lengths_of(np.full(B, 2), np.full(B, 2)), limits(ways=1), second_pass=0.0)
    sequences = [laid for part in found.parts for way in part for laid in way]
    assert found.useful_tokens == 8 * 8 and len(sequences) == 6
    assert max(len({piece.row // 3 for piece in laid.pieces}) for laid in sequences) > 1


def test_limits_of_full_rows():
    for changes, sequences, count in (
        (dict(), 2 * (4 * 4), 1),  # on each way 4 queries, a prompt and three responses each
        (dict(prompt=24), 2 * (4 * 3), 1),  # two responses in a sequence, none beside a prompt
        (dict(full_rows=18), 2 * (2 * 4), 2),  # not 3 queries and 1
        (dict(full_rows=18, shares=False), 12, 2),
        (dict(full_rows=2), 2 * 2, 12),  # a prompt and a response
        (dict(full_rows=2, shares=False), 2, 12),
    ):
        of = limits(**changes)
        full = lengths_of(np.full(B, of.prompt), np.full(B, of.response))
        found = packing.plan(full, of, second_pass=0.0)
        assert (of.sequences, found.sequences, len(found.parts)) == (sequences, sequences, count), changes
    assert [limits(rows).full_rows for rows in (0, 2, 7, 8, 100)] == [24, 2, 6, 8, 24]
    assert limits(tokens=1, ways=3).full_rows == 3
    assert [limits(prompt=prompt, response=7).length for prompt in (3, 8, 9)] == [8, 8, 10], "even, for cuDNN"
    assert limits(prompt=9, response=7, shares=False).length == 15


@pytest.mark.parametrize("queries, completions, rows, shares", [(7, 20, 140, False), (32, 16, 16, True)])
def test_short_rows_leave_little_padding(queries, completions, rows, shares):
    """Rows as long as those of GSM8K: about an eighth of the longest, some a half of it."""
    rng, count = np.random.default_rng(0), queries * completions
    sizes = dict(rows=count, group=completions, prompt=512, response=512, shares=shares, tokens=rows * 1024)
    found = []
    for _ in range(3):
        prompt, response = np.minimum(rng.lognormal([[4.2], [4.5]], 0.5, (2, count)).astype(int), 512)
        lengths = lengths_of(prompt, response, group=completions)
        found.append(packing.plan(lengths, Limits(**sizes), second_pass=1 / 3))
    assert sum(plan.useful_tokens for plan in found) > 0.8 * sum(plan.computed_tokens for plan in found)
