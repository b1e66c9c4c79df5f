"""Where steps end, against a loop over the text."""

import itertools

import numpy as np
import pytest

from tba_jax.decoding import state_values
from tba_jax.text import stop_strings

TEXTS = ["", "a", "b", "ab", "ba", "c", "xcdy", "é", "é".encode()[:1], "é".encode()[1:], "cdcd"]
BYTES = [text if isinstance(text, bytes) else text.encode() for text in TEXTS]
V, R = len(TEXTS) + 2, 9


@pytest.mark.parametrize("ends", [("b", "cc"), ("ab", "cd"), ("aba", "dcd"), ("é", "bab", "cdy"), ("a", "cc")])
def test_states_between_steps_are_those_after_a_whole_step_end(ends):
    """Ids without text keep what stands at their sides apart; what follows a step's end in a token is no part of the next."""
    rng = np.random.default_rng(0)
    tokens, length = rng.integers(0, V, (400, R)).astype(np.int32), rng.integers(1, R + 1, 400).astype(np.int32)
    automaton = stop_strings.build([*BYTES, None], ends, vocab=V)
    found = state_values.between_steps(tokens, length, automaton)
    assert found.shape == (400, R) and found.dtype == bool
    expected = np.zeros((400, R), bool)
    seen = dict.fromkeys(("within a token", "across tokens", "last token"), 0)
    for row, (of_row, n) in enumerate(zip(tokens.tolist(), length.tolist(), strict=True)):
        text = b""
        for t, token in enumerate(of_row[:n]):
            text = text + BYTES[token] if token < len(BYTES) else b""
            if not any(end.encode() in text for end in ends):
                continue
            alone = any(end.encode() in BYTES[token] for end in ends)
            seen["last token" if t + 1 == n else "within a token" if alone else "across tokens"] += 1
            text = b""
            if t + 1 < n:
                expected[row, t + 1] = True
    np.testing.assert_array_equal(found, expected)
    assert min(seen.values()) > 0 and not found[:, 0].any()


def test_states_that_are_left_out_leave_steps_of_equal_number():
    for n, most in itertools.product(range(12), range(12)):
        states = np.arange(n) * 3 + 1
        chosen = state_values.evenly(states, most).tolist()
        if most == 0 or n <= most:
            assert chosen == states.tolist()
            continue
        assert len(set(chosen)) == most and chosen == sorted(chosen) and set(chosen) <= set(states.tolist())
        # n states separate n + 1 steps: how many of them are between two that are valued.
        between = np.diff([-1, *((state - 1) // 3 for state in chosen), n])
        assert between.max() - between.min() <= 1
