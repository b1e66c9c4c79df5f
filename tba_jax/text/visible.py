"""Text that others wrote, made safe to print: a terminal obeys control characters, and bidirectional ones reorder a line."""

import re

# C0 but tab and newline, DEL, C1; marks, embeddings, overrides and isolates of bidirectional text; the separators of lines and
# paragraphs; lone surrogates, which no encoding can write. An ANSI sequence begins with ESC, or with a character of C1.
_HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str) -> str:
    """The text with an escape such as \\x1b or \\u202e in place of each such character. Tabs and newlines stay."""
    return _HIDDEN.sub(lambda found: _escape(found[0]), text)


def visible_line(text: str) -> str:
    """The text with tabs and newlines escaped too: for names, which could otherwise pass for further lines."""
    return visible(text).replace("\t", _escape("\t")).replace("\n", _escape("\n"))


def visible_json(document: str) -> str:
    """A JSON document with the same characters as escapes of JSON: whoever parses it finds the same values."""
    return _HIDDEN.sub(lambda found: f"\\u{ord(found[0]):04x}", document)


def _escape(character: str) -> str:
    number = ord(character)
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}"
