"""The texts and colours of the tokens of a row."""

import re

import numpy as np
import pytest

from tba_jax.reporting import report, tokens
from tba_jax.text.tokenizers import CharacterTokenizer


class Bytes:
    """A tokenizer with one id a byte, as byte-level vocabularies have them, and an end of sequence."""

    vocab_size, eos_id, pad_id, special_ids = 257, 256, 256, (256,)

    def token_bytes(self):
        return [*(bytes([byte]) for byte in range(256)), b"<|end|>"]


def row(ids, *, policy=None, reference=None, step=None):
    """One row whose prompt is one token."""
    n = len(ids)
    return {
        "tokens": np.array([[5, *ids, 0, 0]]),
        "prompt_length": np.array([1]),
        "response_length": np.array([n]),
        "policy_logprobs": np.array([policy or [-1.0] * n], np.float32),
        "ref_logprobs": np.array([reference or [-1.0] * n], np.float32),
        "behavior_logprobs": np.zeros((1, n), np.float32),
        "policy_step": np.array([step or [0] * n]),
    }


def test_a_character_of_several_tokens_stands_at_the_one_that_completes_it():
    ids = [*"aé→b".encode(), 256]
    texts = tokens.Pieces(Bytes()).texts(ids)
    assert texts == [
        ("a", False),
        ("", False),
        ("é", False),
        ("", False),
        ("", False),
        ("→", False),
        ("b", False),
        ("⟨end⟩", True),
    ]


def test_a_character_that_is_cut_off_is_shown_as_such():
    pieces = tokens.Pieces(Bytes())
    assert pieces.texts("é".encode()[:1]) == [("�", False)]
    assert pieces.texts(["é".encode()[0], 256, 97]) == [("", False), ("�⟨end⟩", True), ("a", False)]


@pytest.mark.parametrize("hidden", ["\x1b[31m", "\u202e", "\u2066", "\x07", "\x9b"])
def test_no_control_character_is_left(hidden):
    ids = hidden.encode()
    text = "".join(text for text, _ in tokens.Pieces(Bytes()).texts(ids))
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", text) and "\\" in text


def test_without_a_tokenizer_tokens_are_numbers():
    assert tokens.Pieces(None).texts([7, 100_000]) == [("⟨7⟩", True), ("⟨100000⟩", True)]


def test_ids_outside_of_the_vocabulary_are_numbers():
    assert tokens.Pieces(CharacterTokenizer("ab")).texts([3, 4, 2, -1, 99]) == [
        ("a", False),
        ("b", False),
        ("⟨end⟩", True),
        ("⟨-1⟩", True),
        ("⟨99⟩", True),
    ]


def test_colours_follow_the_ratio_and_the_step():
    rows = row([3, 4, 3], policy=[-0.5, -4.0, -1.0], reference=[-2.5, -0.1, -1.0], step=[0, 40, 80])
    found = tokens.tokens(rows, 0, tokens.Pieces(CharacterTokenizer("ab")), newest_step=80)
    assert [token.text for token in found] == ["a", "b", "a"]
    assert [token.ratio_colour for token in found] == ["m4", "l5", "r0"]
    assert [token.step_colour for token in found] == ["s0", "s3", "s7"]
    assert found[0].log_ratio == 2.0 and "+2.00" in found[0].told and "policy step 0" in found[0].told


def test_every_class_has_a_colour():
    css = tokens.style()
    for ratio in np.linspace(-9, 9, 400):
        name = tokens.ratio_colour(float(ratio))
        assert name == "r0" or f".{name}{{" in css
    for step in range(1001):
        assert f".{tokens.step_colour(step, 1000)}{{" in css
    assert tokens.ratio_colour(float("nan")) == tokens.ratio_colour(float("inf")) == "r0"


def test_a_limit_cuts_the_response():
    found = tokens.tokens(row([3, 4, 3, 2]), 0, tokens.Pieces(CharacterTokenizer("ab")), newest_step=0, limit=2)
    assert [token.text for token in found] == ["a", "b"]


def test_text_can_be_read_on_every_colour():
    def brightness(colour):  # relative luminance of WCAG 2
        parts = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
        return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4) @ [0.2126, 0.7152, 0.0722]

    style = tokens.style()
    colours = re.findall(r"background:(#[0-9a-f]{6})", style)
    assert len(colours) == 2 * len(tokens.RATIO_LIMITS) + tokens.STEP_COLOURS and not re.search(r"[{;]color:", style)
    ink = brightness(re.search(r"--ink: (#[0-9a-f]{6})", (report.TEMPLATES / "view.css").read_text())[1])
    assert min((brightness(colour) + 0.05) / (ink + 0.05) for colour in colours) >= 4.5
