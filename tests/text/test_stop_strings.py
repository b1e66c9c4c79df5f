"""Stop strings: the automaton against joined bytes, and against what tokenizers decode."""

from pathlib import Path

import numpy as np
import pytest

from tba_jax.text.stop_strings import StopStrings, build
from tba_jax.text.tokenizers import HuggingFaceTokenizer, open_transformers


def first_accept(stops: StopStrings, tokens: list[int]) -> int:
    """Number of tokens after which a stop string is complete, -1: none is. One token at a time, as a decode loop does it."""
    state = 0
    for n, token in enumerate(tokens, start=1):
        state = stops.run([token], state)
        if state == stops.accept:
            return n
    return -1


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
        tokens, joined, expected = rng.integers(0, 14, 12).tolist(), b"", -1
        for n, token in enumerate(tokens, start=1):
            text = texts[token] if token < len(texts) else None
            joined = b"" if text is None else joined + text
            if expected < 0 and any(stop.encode() in joined for stop in stop_strings):
                expected = n
        assert first_accept(stops, tokens) == expected, (stop_strings, texts, tokens)


def test_what_is_left_out_and_refused():
    assert build([b"a"], [], vocab=3) is None
    with pytest.raises(ValueError, match=r"task\.stop_strings=\('a', ''\) must hold texts of at least one character"):
        build([b"a"], ["a", ""], vocab=3)
    with pytest.raises(ValueError, match="the tokenizer has 2 ids, the embedding only 1"):
        build([b"a", b"b"], ["a"], vocab=1)
    # A stop string that holds another is never complete first.
    assert build([b"a", b"b"], ["bab", "a"], vocab=2).next_state.shape == (2, 2)


def units(folder: Path, tokenizer: HuggingFaceTokenizer) -> tuple[list[list[int]], list[list[int]]]:
    """What random sequences are made of: single tokens of text, and words beyond ASCII. Characters that stories260K spells by
    tokens of a byte stay whole: it decodes a run of these that is no UTF-8 to U+FFFD throughout."""
    pieces = open_transformers(folder)[0].convert_ids_to_tokens(list(range(tokenizer.vocab_size)))
    text = {i for i, piece in enumerate(pieces) if i not in tokenizer.special_ids}
    words = [[i for i in tokenizer.encode(word) if i in text] for word in ("é", "漢", "字é", "…", "naïve")]
    return [[i] for i in sorted(text) if not pieces[i].startswith("<0x")], [word for word in words if word]


@pytest.mark.parametrize("name", ["TinyStories-656K", "stories260K-hf"])
def test_the_first_prefix_whose_text_holds_a_stop_string(data_dir, name):
    """Stop strings are cut from the text of the random sequence itself, so that they begin and end within tokens."""
    tokenizer = HuggingFaceTokenizer(data_dir / "models" / name)
    rng, prompt = np.random.default_rng(0), tokenizer.encode("Once upon a time")
    single, words = units(data_dir / "models" / name, tokenizer)
    texts, beyond_ascii = tokenizer.token_bytes(), 0
    for _ in range(16):
        chosen = [words if rng.random() < 0.3 else single for _ in range(6)]
        ids = [i for pool in chosen for i in pool[rng.integers(len(pool))]]
        prefixes = [tokenizer.decode_continuation(prompt, ids[:n]) for n in range(1, len(ids) + 1)]
        whole, stop_strings = prefixes[-1], set()
        while not stop_strings:
            begin, end = np.sort(rng.integers(len(whole) // 3, len(whole) + 1, 2))
            # What it begins with and what overlaps it, too.
            cuts = (whole[begin:end], whole[begin : end - 1], whole[begin + 1 : end + 1])
            stop_strings = {cut for cut in cuts if 2 <= len(cut) <= 9 and "�" not in cut}
        stops = build(texts, sorted(stop_strings), vocab=tokenizer.vocab_size + 7)
        expected = 1 + next(n for n, text in enumerate(prefixes) if any(stop in text for stop in stop_strings))
        assert first_accept(stops, ids) == expected, (stop_strings, ids, whole)
        beyond_ascii += any(stop in prefixes[expected - 1] and not stop.isascii() for stop in stop_strings)
    assert beyond_ascii or all(texts[i].isascii() for unit in words for i in unit)
