"""Control characters of text that others wrote: escaped for people and for JSON, and nothing else is touched."""

import json
import unicodedata

import pytest

from tba_jax.text.visible import visible, visible_json, visible_line

SHOWN = {
    "\x1b[2J": r"\x1b[2J",
    "\r": r"\x0d",
    "\x00\x08\x0b\x1f": r"\x00\x08\x0b\x1f",
    "\x7f": r"\x7f",
    "\x9b31m": r"\x9b31m",
    "\x85": r"\x85",
    "a\u202eb\u2066c": r"a\u202eb\u2066c",
    "\u2028\u2029": r"\u2028\u2029",
    "\ud800": r"\ud800",
}


@pytest.mark.parametrize("text", SHOWN, ids=ascii)
def test_what_a_terminal_obeys_is_shown(text):
    assert visible(text) == SHOWN[text]
    document = json.dumps([text], ensure_ascii=False)
    assert visible(visible_json(document)) == visible_json(document), "nothing is left to escape"
    assert json.loads(visible_json(document)) == [text]


def test_no_control_or_bidirectional_character_is_left():
    everything = map(chr, range(0x110000))
    controls = {c for c in everything if unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp")} - {"\n", "\t"}
    directed = {c for c in map(chr, range(0x3000)) if unicodedata.bidirectional(c) in ("LRE", "RLE", "LRO", "RLO", "PDF")}
    isolates = {c for c in map(chr, range(0x3000)) if unicodedata.bidirectional(c) in ("LRI", "RLI", "FSI", "PDI")}
    for character in controls | directed | isolates:
        assert visible(character).isascii() and visible(character) != character


def test_other_text_stays():
    text = "x = \\frac{1}{2}\n\té 日本 🙂 שלום \u200d \xa0 \\x1b"
    assert visible(text) == text == visible_json(text)
    assert visible_line("a\n\tb") == r"a\x0a\x09b"
