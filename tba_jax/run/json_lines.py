"""Files of JSON lines that processes append to and that a kill may cut short: metrics, alarms."""

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any


def parse_line(line: str) -> dict[str, Any]:
    """One line; {} for a line that a kill cut short, or that is no object."""
    try:
        parsed = json.loads(line)
    except (ValueError, RecursionError):  # also a number of very many digits, and very many brackets
        return {}
    return parsed if isinstance(parsed, dict) else {}


def each(path: Path) -> Iterator[dict[str, Any]]:
    """The whole lines of a file, oldest first; none where there is no file. Raises OSError where the storage refuses."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            yield from filter(None, map(parse_line, file))
    except FileNotFoundError:
        return


def append(path: Path, lines: Sequence[str]) -> None:
    """Appends lines by one write. After a line that a kill cut short they begin on a line of their own.

    Raises:
      OSError: the storage refused.
    """
    content = "".join(f"{line}\n" for line in lines)
    if is_torn(path):
        content = "\n" + content
    with open(path, "ab", buffering=0) as file:
        file.write(content.encode())


def is_torn(path: Path) -> bool:
    """Whether the last line of a file has no end."""
    try:
        with open(path, "rb") as file:
            if not file.seek(0, os.SEEK_END):
                return False
            file.seek(-1, os.SEEK_END)
            return file.read() != b"\n"
    except FileNotFoundError:
        return False
