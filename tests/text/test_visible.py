"""Control characters of text that others wrote: escaped for people and for JSON, and nothing else is touched."""

import json
import unicodedata

from tba_jax.text.visible import visible, visible_json, visible_line


def test_no_control_or_bidirectional_character_is_left():
    everything = map(chr, range(0x110000))
    controls = {c for c in everything if unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp")} - {"\n", "\t"}
    directed = {c for c in map(chr, range(0x3000)) if unicodedata.bidirectional(c) in ("LRE", "RLE", "LRO", "RLO", "PDF")}
    isolates = {c for c in map(chr, range(0x3000)) if unicodedata.bidirectional(c) in ("LRI", "RLI", "FSI", "PDI")}
    for character in controls | directed | isolates:
        assert visible(character).isascii() and visible(character) != character
    given = "x".join(sorted(controls | directed | isolates))
    document = visible_json(json.dumps([given], ensure_ascii=False))
    assert visible(document) == document and json.loads(document) == [given]
    assert visible("\x1b[2J\u202e\ud800") == r"\x1b[2J\u202e\ud800"


def test_other_text_stays():
    text = "x = \\frac{1}{2}\n\té 日本 🙂 שלום \u200d \xa0 \\x1b"
    assert visible(text) == text == visible_json(text)
    assert visible_line("a\n\tb") == r"a\x0a\x09b"
