"""Writers that were silent for long and are closed: how far each had been taken up, at a bounded cost to a checkpoint.

A checkpoint holds the last closings, and the names of files that hold the others, `CLOSED_AT_ONCE` each. A file's name is the
hash of its content, so whoever writes it writes the same, and no checkpoint can find another content in it.
"""

import collections
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tba_jax.storage import layout, places

CLOSED_AT_ONCE = 4096


class ClosedWriters:
    """Attributes: heads: writer -> its rows that were taken up. counts: what became of them, of all writers together, and under
    "rows" how many they were, under "writers" how many writers."""

    def __init__(self) -> None:
        self.heads: dict[str, int] = {}
        self.counts: collections.Counter[str] = collections.Counter()
        self._recent: dict[str, int] = {}
        self._sealed: list[str] = []

    def close(self, writer: str, head: int, *, base: int, counts: Mapping[str, int]) -> None:
        """Args: base: its rows that had been closed before. counts: of the rows since."""
        self.heads[writer] = self._recent[writer] = head
        self.counts.update({**counts, "rows": head - base, "writers": int(base == 0)})

    def reopen(self, writer: str) -> int:
        """The rows of a writer that were taken up before it comes again, 0 where it was not closed."""
        self._recent.pop(writer, None)
        return self.heads.pop(writer, 0)

    def seal(self, folder: Path) -> None:
        """Moves closings to files, durably, so that `state` is small. Args: folder: RunDir.closed. Raises OSError."""
        while len(self._recent) >= CLOSED_AT_ONCE:
            block = dict(list(self._recent.items())[:CLOSED_AT_ONCE])
            content = json.dumps(block, separators=(",", ":")).encode()
            name = f"{hashlib.sha256(content).hexdigest()[:32]}.json"
            places.make_folder(folder)
            places.create(folder / name, content)
            self._sealed.append(name)
            for writer in block:
                del self._recent[writer]

    def state(self) -> dict[str, Any]:
        """All that `restore` needs besides the files (JSON)."""
        return {"recent": self._recent.copy(), "sealed": self._sealed.copy(), "counts": dict(self.counts)}

    @classmethod
    def restore(cls, state: Mapping[str, Any], folder: Path, *, is_open: Mapping[str, int]) -> "ClosedWriters":
        """The object whose `state` this is. Args: is_open: writers that have come again since.
        Raises FileNotFoundError, ValueError: a file is not there, or not what was written."""
        made = cls()
        made._recent, made._sealed, made.counts = (
            dict(state["recent"]),
            list(state["sealed"]),
            collections.Counter(state["counts"]),
        )
        for name in made._sealed:
            content = layout.read_file(folder / name)
            if hashlib.sha256(content).hexdigest()[:32] != name.removesuffix(".json"):
                raise ValueError(f"{folder / name} is damaged: restore it from a copy")
            made.heads |= json.loads(content)
        made.heads = {writer: head for writer, head in (made.heads | made._recent).items() if writer not in is_open}
        return made
