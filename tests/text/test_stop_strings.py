"""Stop strings: the automaton by hand and against joined bytes."""

import numpy as np
import pytest

from tba_jax.text.stop_strings import build


def test_states_by_hand():
    texts = [b"a", b"b", b"ab", b"xabx", None, b"", b"aa"]
    stops = build(texts, ["aab"], vocab=8)
    assert stops.accept == 3 and stops.next_state.dtype == np.int32
    expected = [
        # a  b  ab xabx -  "" aa -
        [1, 0, 0, 0, 0, 0, 2, 0],
        [2, 0, 3, 0, 0, 1, 2, 0],
        [2, 3, 3, 0, 0, 2, 2, 0],
        [3, 3, 3, 3, 3, 3, 3, 3],
    ]
    np.testing.assert_array_equal(stops.next_state, expected)
    assert stops.run([0, 5, 2]) == 3 and stops.run([0, 4, 2]) == 0 and stops.run([1], state=2) == 3
    inside = build(texts, ["b"], vocab=7)
    assert [inside.run([token]) for token in range(7)] == [0, 1, 1, 1, 0, 0, 0]


@pytest.mark.parametrize("seed", range(3))
def test_states_equal_a_search_of_the_joined_bytes(seed):
    """Over two letters, so that stop strings overlap themselves and each other, hold each other and begin alike."""
    rng = np.random.default_rng(seed)

    def word(low: int, high: int) -> str:
        return "".join(rng.choice(["a", "b"], rng.integers(low, high + 1)))

    stop_strings = [word(1, 6) for _ in range(rng.integers(1, 5))]
    texts = [None, b"", *(word(1, 4).encode() for _ in range(10))]
    stops = build(texts, stop_strings, vocab=14)
    for _ in range(50):
        state, joined, complete = 0, b"", False
        for token in rng.integers(0, 14, 12).tolist():
            text = texts[token] if token < len(texts) else None
            joined = b"" if text is None else joined + text
            complete |= any(stop.encode() in joined for stop in stop_strings)
            state = stops.run([token], state)
            assert (state == stops.accept) == complete, (stop_strings, texts, joined)


def test_what_is_left_out_and_refused():
    assert build([b"a"], [], vocab=3) is None
    with pytest.raises(ValueError, match="the tokenizer has 2 ids, the embedding only 1"):
        build([b"a", b"b"], ["a"], vocab=1)
    # A stop string that holds another is never complete first.
    assert build([b"a", b"b"], ["bab", "a"], vocab=2).next_state.shape == (2, 2)
