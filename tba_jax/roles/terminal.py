"""The live display of a run on a terminal. What others print meanwhile appears above it, in whole lines."""

import io
import logging
import math
import os
import sys
import threading
from typing import BinaryIO, TextIO

from rich.console import Console
from rich.control import Control
from rich.live import Live
from rich.segment import ControlType, Segment
from rich.text import Text

from tba_jax.roles.frame import frame
from tba_jax.roles.standing import Standing


def suits(stream: TextIO) -> bool:
    """Whether a stream is a terminal that can show the display: it moves the cursor, and has the characters of a bar."""
    if not stream.isatty() or os.environ.get("TERM", "dumb") in ("", "dumb", "unknown"):
        return False
    return (stream.encoding or "").lower().startswith("utf")


class _Console(Console):
    """Never hides the cursor: a process that is killed could not show it again."""

    def show_cursor(self, show: bool = True) -> bool:
        return False


class Terminal:
    """The display, from `start` to `stop`. All writing holds one lock: lines of other threads come between two pictures."""

    def __init__(self, stream: TextIO):
        # What shells export as the size does not follow the terminal.
        environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
        self._console = _Console(
            file=stream, force_terminal=True, markup=False, highlight=False, emoji=False, _environ=environment
        )
        self._live = Live(console=self._console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False)
        self._lock = threading.RLock()
        self._width, self._lengths = 0, [0]
        self._diverted: list[tuple[logging.StreamHandler[TextIO], TextIO]] = []
        self._streams: tuple[TextIO, TextIO] | None = None

    def start(self) -> None:
        with self._lock:
            self._live.start()
            self._divert()

    def stop(self) -> None:
        """Takes the picture away, and leaves the terminal as it was."""
        with self._lock:
            self._restore()
            self._follow_width()
            self._live.update(Text(""))
            self._live.stop()

    def show(self, standing: Standing) -> None:
        with self._lock:
            self._follow_width()
            picture = frame(standing, width=self._width, console=self._console)
            lines = self._console.render_lines(picture, pad=False)
            self._lengths = [Segment.get_line_length(line) for line in lines[: self._console.height]]
            self._live.update(picture, refresh=True)

    def tell(self, sentence: str) -> None:
        """Prints news of the run above the picture, broken between words."""
        with self._lock:
            self._follow_width()
            self._console.print(Text(sentence, style="yellow"))

    def above(self, line: str) -> None:
        """Prints a line above the picture as it is; the terminal breaks it."""
        with self._lock:
            self._follow_width()
            self._console.print(Text(line), soft_wrap=True)

    def _follow_width(self) -> None:
        """Takes away the rows that the last picture has got by a terminal that has become narrower: it breaks long lines."""
        width = self._console.width
        if 0 < width < self._width:
            more = sum(max(0, math.ceil(length / width) - 1) for length in self._lengths)
            self._console.control(
                Control(
                    ControlType.CARRIAGE_RETURN,
                    *(((ControlType.ERASE_IN_LINE, 2), (ControlType.CURSOR_UP, 1)) * more),
                )
            )
        self._width = width

    def _divert(self) -> None:
        """Sends to `above` what the process prints, and what it logs to a terminal."""
        self._streams = sys.stdout, sys.stderr
        above = _Above(self, sys.stdout)
        for handler in logging.getLogger().handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream in self._streams and handler.stream.isatty():
                self._diverted.append((handler, handler.stream))
                handler.setStream(above)
        sys.stdout = above
        if sys.stderr.isatty():
            sys.stderr = above

    def _restore(self) -> None:
        if self._streams is not None:
            for stream in {sys.stdout, sys.stderr}:
                if isinstance(stream, _Above):
                    stream.end()
            sys.stdout, sys.stderr = self._streams
            self._streams = None
        for handler, stream in self._diverted:
            handler.setStream(stream)
        self._diverted.clear()


class _Above(io.TextIOBase):
    """A text stream whose whole lines appear above the picture. A line that is written over itself appears as it ends."""

    encoding = "utf-8"

    def __init__(self, terminal: Terminal, stream: TextIO):
        """Args: stream: of the terminal, for whoever writes bytes."""
        self._terminal, self._stream, self._begun = terminal, stream, ""
        self._lock = threading.Lock()

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._stream.fileno()

    @property
    def buffer(self) -> BinaryIO:
        return self._stream.buffer

    def write(self, text: str) -> int:
        with self._lock:
            *whole, begun = (self._begun + text).split("\n")
            self._begun = begun.rpartition("\r")[2] if not begun.endswith("\r") else begun
        for line in whole:
            self._terminal.above(line.rstrip("\r").rpartition("\r")[2])
        return len(text)

    def end(self) -> None:
        """Prints a line that has no end yet."""
        with self._lock:
            line, self._begun = self._begun, ""
        if line:
            self._terminal.above(line)
