"""The newest lines of the metrics of roles, read from the ends of their files alone."""

from pathlib import Path
from typing import Any

from tba_jax.run import events, json_lines

TAIL_BYTES = 1 << 16

Line = dict[str, Any]


def last_line(folder: Path) -> Line:
    """The newest whole line of a role's metrics, {} where there is none. Reads only the end of the file."""
    return (newest_lines(folder, count=1) or [{}])[0]


def last_step(folder: Path) -> int:
    """The newest step that a trainer tells of, 0 before there is one: it writes figures at some steps alone, its end at any."""
    told = [last_line(folder), *newest_lines(folder, count=1, name=events.FILE)]
    numbers = [(line.get("time"), line.get("step")) for line in told if line.get("event", "end") == "end"]
    known = [(at, step) for at, step in numbers if isinstance(at, int | float) and isinstance(step, int)]
    return max(known, default=(0.0, 0))[1]


def newest_lines(folder: Path, *, count: int, name: str = "metrics.jsonl") -> list[Line]:
    """Up to `count` of the newest whole lines of a role's file, as many as its last TAIL_BYTES hold, oldest first."""
    try:
        with open(folder / name, "rb") as file:
            file.seek(max(0, file.seek(0, 2) - TAIL_BYTES))
            lines = file.read().split(b"\n")
    except FileNotFoundError:
        return []
    found: list[Line] = []
    # The part after the last newline is a line that is still being written.
    for line in reversed(lines[:-1]):
        if parsed := json_lines.parse_line(line.decode(errors="replace")):
            found.append(parsed)
        if len(found) == count:
            break
    return found[::-1]


class Tails:
    """The newest lines of several roles; a file that has not changed is not read again."""

    def __init__(self, *, count: int):
        """Args: count: of lines that are read of a role."""
        self._count = count
        self._known: dict[Path, tuple[tuple[int, int], list[Line]]] = {}

    def __call__(self, folder: Path) -> list[Line]:
        """The lines, oldest first. Raises OSError where the storage refuses."""
        try:
            found = (folder / "metrics.jsonl").stat()
        except FileNotFoundError:
            return []
        stamp = found.st_size, found.st_mtime_ns
        if folder not in self._known or self._known[folder][0] != stamp:
            self._known[folder] = stamp, newest_lines(folder, count=self._count)
        return self._known[folder][1]
