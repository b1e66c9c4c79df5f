"""Pages of docs/ as programs: their blocks of shell and Python, in order."""

import re
from pathlib import Path
from typing import NamedTuple

_BLOCK = re.compile(r"^```(sh|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"Write this file as `([\w.]+)`")


class Block(NamedTuple):
    """file: the name that the text before a block of Python gives it."""

    language: str
    text: str
    file: str = ""


def blocks(page: Path) -> list[Block]:
    """All blocks of a page. Raises ValueError where a block of Python has no name."""
    text, found, end = page.read_text(encoding="utf-8"), list[Block](), 0
    for match in _BLOCK.finditer(text):
        names = _FILE.findall(text[end : match.start()])
        if match[1] == "python" and not names:
            raise ValueError(f"{page}: the text before {match[2].splitlines()[0]!r} does not name its file")
        found.append(Block(match[1], match[2], names[-1] if match[1] == "python" else ""))
        end = match.end()
    return found
