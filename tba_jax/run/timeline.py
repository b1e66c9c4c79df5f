"""What each thread of a role did, and when: `timeline.jsonl` in the role's folder of metrics.

A line is {"at": unix seconds, "lane": name, "spans": [[name, seconds after at, seconds], ...]}. A lane is a thread, "main" the
main thread; spans of a lane come in the order of their ends. Lines are written about once a second. A span shorter than
SHORTEST_SECONDS is joined to one of the same name that ended just before it, or left out. Once the file has half of the megabytes
that it may take, it becomes `timeline.jsonl.1`, and the older half goes.
"""

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tba_jax.run import json_lines
from tba_jax.run.cost import Cost

FILE = "timeline.jsonl"
SHORTEST_SECONDS = 0.002
# Spans of a lane that wait for storage; while it does not answer, the oldest are let go of.
_MOST_WAITING = 20_000


class Timeline:
    """Records spans of a process. Storage that refuses is left to the writers of what must not be lost."""

    def __init__(self, folder: Path | None, *, megabytes: float = 0.0, cost: Cost | None = None):
        """Args: folder: None, as megabytes=0: nothing is recorded. cost: counts the time that recording takes."""
        self._path = folder / FILE if folder is not None and megabytes > 0 else None
        self._half, self._cost = int(megabytes * 2**19), cost or Cost()
        self._lock, self._writing = threading.Lock(), threading.Lock()
        # Lane -> [name, begin, end], of time.monotonic. Guarded by the first lock.
        self._spans: dict[str, list[list[Any]]] = {}

    @contextlib.contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Records the time spent inside as a span of this thread."""
        begin = time.monotonic()
        try:
            yield
        finally:
            self.note(name, begin, time.monotonic())

    def note(self, name: str, begin: float, end: float, *, lane: str = "") -> None:
        """Records a span. Args: begin, end: of time.monotonic. lane: "" = that of this thread."""
        if self._path is None:
            return
        with self._cost.measure(), self._lock:
            spans = self._spans.setdefault(lane or _lane(), [])
            last = spans[-1] if spans else None
            if last is not None and last[0] == name and begin - last[2] < SHORTEST_SECONDS:
                last[2] = end
                return
            if last is not None and _is_short(last):
                spans.pop()
            spans.append([name, begin, end])
            if len(spans) > _MOST_WAITING:
                del spans[: _MOST_WAITING // 2]

    def flush(self) -> None:
        """Writes the spans that were recorded since the last call."""
        if self._path is None or not self._spans:
            return
        with self._cost.measure(), self._writing:
            with self._lock:
                taken, self._spans = self._spans, {}
            offset = time.time() - time.monotonic()
            lines = [_line(lane, long, offset) for lane, spans in taken.items() if (long := _long(spans))]
            if lines:
                with contextlib.suppress(OSError):
                    json_lines.append(self._path, lines)
                    if self._path.stat().st_size > self._half:
                        self._path.replace(self._path.with_name(f"{FILE}.1"))


def _lane() -> str:
    thread = threading.current_thread()
    return "main" if thread is threading.main_thread() else thread.name.removesuffix("_0")  # of an executor's one thread


def _is_short(span: list[Any]) -> bool:
    return span[2] - span[1] < SHORTEST_SECONDS


def _long(spans: list[list[Any]]) -> list[list[Any]]:
    return [span for span in spans if not _is_short(span)]


def _line(lane: str, spans: list[list[Any]], offset: float) -> str:
    """Args: offset: unix seconds at time.monotonic() = 0."""
    at = round(min(begin for _, begin, _ in spans) + offset, 4)
    told = [[name, round(begin + offset - at, 4), round(end - begin, 4)] for name, begin, end in spans]
    return json.dumps({"at": at, "lane": lane, "spans": told}, separators=(",", ":"))


def each_line(folder: Path) -> Iterator[dict[str, Any]]:
    """The lines of a role's timeline, oldest first. Raises OSError where the storage refuses."""
    for file in (folder / f"{FILE}.1", folder / FILE):
        yield from json_lines.each(file)
