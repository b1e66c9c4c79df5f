"""A terminal for tests: a process on a pseudo-terminal, and what its screen shows."""

import codecs
import contextlib
import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import termios
import threading
import time
from collections.abc import Callable, Mapping, Sequence

_CONTROL = re.compile(r"\x1b\[([?0-9;]*)([A-Za-z])")


class Screen:
    """Rows of text that obey the control sequences which rich writes. Raises ValueError on any other one."""

    def __init__(self, width: int):
        self.width = width
        self.rows, self.row, self.column = [""], 0, 0
        self.cursor_is_visible = True
        # How often a row was written to its last column, after which terminals differ.
        self.full_rows = 0
        self._begun = ""  # a control sequence whose end has not come yet

    def feed(self, text: str) -> None:
        text, self._begun = self._begun + text, ""
        while text:
            if control := _CONTROL.match(text):
                self._obey(*control.groups())
                text = text[control.end() :]
                continue
            if re.fullmatch(r"\x1b(\[[?0-9;]*)?", text):
                self._begun = text
                return
            character, text = text[0], text[1:]
            if character == "\n":
                self.row += 1
                self.rows += [""] * (self.row + 1 - len(self.rows))
            elif character == "\r":
                self.column = 0
            elif character < " ":
                raise ValueError(f"a terminal would obey {character!r} before {text[:40]!r}")
            else:
                self._put(character)

    def _put(self, character: str) -> None:
        if self.column == self.width:
            self.column, self.row = 0, self.row + 1
            self.rows += [""] * (self.row + 1 - len(self.rows))
        row = self.rows[self.row].ljust(self.column)
        self.rows[self.row] = row[: self.column] + character + row[self.column + 1 :]
        self.column += 1
        self.full_rows += self.column == self.width

    def _obey(self, numbers: str, letter: str) -> None:
        if letter == "A":
            self.row = max(0, self.row - int(numbers or 1))
        elif letter == "K" and numbers == "2":
            self.rows[self.row] = ""
        elif letter in "hl" and numbers == "?25":
            self.cursor_is_visible = letter == "h"
        elif letter != "m":
            raise ValueError(f"the screen does not know ESC [ {numbers} {letter}")

    def narrow(self, width: int) -> None:
        """Becomes narrower, and breaks the lines that are longer, as most terminals do."""
        parts = [[row[i : i + width] for i in range(0, max(len(row), 1), width)] for row in self.rows]
        self.row = sum(map(len, parts[: self.row])) + self.column // width
        self.column, self.width = self.column % width, width
        self.rows = [part for row in parts for part in row]

    @property
    def text(self) -> str:
        return "\n".join(row.rstrip() for row in self.rows)


class OnTerminal:
    """A process whose output and input are a pseudo-terminal."""

    def __init__(self, command: Sequence[str], *, width: int, environment: Mapping[str, str], cwd: os.PathLike[str] | str):
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, width, 0, 0))
        settings = termios.tcgetattr(slave)
        settings[3] &= ~termios.ECHO  # what is typed would be on the screen too
        termios.tcsetattr(slave, termios.TCSANOW, settings)
        self.settings = termios.tcgetattr(slave)
        self.screen, self.written, self._lock = Screen(width), "", threading.Lock()
        self.process = subprocess.Popen(
            command,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            cwd=cwd,
            env={"TERM": "xterm-256color", "LANG": "C.UTF-8", **environment, "COLUMNS": "77"},  # of an earlier size, say
            start_new_session=True,
        )
        self._slave, self._error = slave, None
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")()
        with contextlib.suppress(OSError):  # the other side is closed
            while content := os.read(self._master, 65536):
                with self._lock:
                    text = decoder.decode(content)
                    self.written += text
                    try:
                        self.screen.feed(text)
                    except ValueError as error:  # `shows` and `wait` raise it; who writes must not wait for a reader
                        self._error = self._error or error

    def resize(self, width: int) -> None:
        """Narrower alone."""
        with self._lock:
            fcntl.ioctl(self._slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, width, 0, 0))
            self.screen.narrow(width)

    def shows(self, condition: Callable[[str], object], *, seconds: float = 120.0) -> str:
        """The text of the screen as soon as `condition` holds of it. Fails after so many seconds, or at the process' end."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            ended = self.process.poll() is not None
            with self._lock:
                text = self.screen.text
            self._raise()
            if condition(text):
                return text
            assert not ended, f"it has ended, with\n{text}"
            time.sleep(0.02)
        raise AssertionError(f"after {seconds:.0f} s the screen shows\n{text}")

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def interrupt(self) -> None:
        os.kill(self.process.pid, signal.SIGINT)

    def wait(self, seconds: float = 120.0) -> int:
        """The exit code, once all output is on the screen."""
        code = self.process.wait(seconds)
        self.settings_after = termios.tcgetattr(self._slave)
        os.close(self._slave)
        self._slave = -1
        self._reader.join(5)
        os.close(self._master)
        self._raise()
        return code

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def __enter__(self) -> "OnTerminal":
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        if self._slave >= 0:
            os.close(self._slave)
