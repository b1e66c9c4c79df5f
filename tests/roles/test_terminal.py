"""The live display on a real pseudo-terminal: whole lines above it, one picture at a time, and nothing left behind."""

import io
import os
import signal
import sys
from pathlib import Path

import pytest

from tba_jax.roles import terminal
from tests.support.screen import OnTerminal

ROOT = Path(__file__).parent.parent.parent
SETUP = """
import logging, sys, threading, time
from tba_jax.commands import command_line
from tba_jax.roles.standing import Standing
from tba_jax.roles.terminal import Terminal
command_line.log_to_stderr()
log = logging.getLogger("tba_jax.test")
shown = Terminal(sys.stdout)
def show(step, **more):
    figures = {"reward": 0.5, "buffer_rows": 1000.0, "staleness_mean": 2.0, "staleness_max": 3.0}
    says = [("trainer", "has waited 42 s for rows: 2 of 3 queries; in 18 s it publishes step 3 unless that is there")]
    shown.show(Standing(seconds=9.0, step=step, steps=9, trainer=figures, says=says, **more))
"""


def on_terminal(program: str, *, width: int = 80, **environment: str) -> OnTerminal:
    whole = os.environ | {"PYTHONPATH": str(ROOT)} | environment
    return OnTerminal([sys.executable, "-c", SETUP + program], width=width, environment=whole, cwd=ROOT)


def test_lines_that_are_logged_and_printed_meanwhile_are_whole():
    program = """
def speak():
    for n in range(200):
        log.warning("warning %d %s", n, "x" * 100)
        print("printed", n, end=" ")
        print("whole")
shown.start()
show(1)
threads = [threading.Thread(target=speak)]
for thread in threads: thread.start()
while any(thread.is_alive() for thread in threads):
    show(2)
    time.sleep(0.001)
print("without an end", end="")
shown.stop()
print("the end")
"""
    with on_terminal(program, width=200) as shown:
        assert shown.wait() == 0
        lines = shown.screen.text.split("\n")
    spoken = [line.split(" ", 1)[1] if line[2:3] == ":" else line for line in lines if line]
    pairs = [(f"warning {n} {'x' * 100}", f"printed {n} whole") for n in range(200)]
    assert spoken == [*(line for pair in pairs for line in pair), "without an end", "the end"]


def test_news_are_broken_between_words():
    with on_terminal(
        "shown.start()\nshow(1)\nshown.tell('warning: [b]' + 12 * ' reward')\nshow(2)\nshown.stop()", width=40
    ) as shown:
        assert shown.wait() == 0
    lines = [line for line in shown.screen.text.split("\n") if line]
    assert lines[0] == "warning: [b] reward reward reward reward" and " ".join(lines) == "warning: [b]" + 12 * " reward"


def test_a_bar_of_a_library_appears_as_it_ends_and_a_child_finds_a_file():
    program = """
import subprocess
shown.start()
show(1)
for share in (10, 50, 100):
    print(f"{share} %", end="\\r", file=sys.stderr, flush=True)
print("done\\r", file=sys.stderr)
subprocess.run(["true"], stdout=sys.stdout, stderr=sys.stderr, check=True)
shown.stop()
print("the end")
"""
    with on_terminal(program) as shown:
        assert shown.wait() == 0
        assert [line for line in shown.screen.text.split("\n") if line] == ["done", "the end"]


@pytest.mark.parametrize("widths", [(80, 50), (200, 60), (60, 33)])
def test_a_terminal_that_becomes_narrower_holds_one_picture(widths):
    program = """
shown.start()
print("a line of before")
begin = time.monotonic()
step = 1
while time.monotonic() < begin + 60 and step < 8:
    show(step)
    if sys.stdin.readline():
        step += 1
shown.stop()
print("the end")
"""
    before, after = widths
    with on_terminal(program, width=before) as shown:
        shown.shows(lambda text: "step 1/9" in text and "step 3 unless" in " ".join(text.split()))
        shown.resize(after)
        shown.type("\n")
        text = shown.shows(lambda text: "step 2/9" in text and "unless" in text)
        assert [line.split()[0] for line in text.split("\n") if line.startswith(("step", "reward", "rows", "trainer:"))] == [
            *("step", "reward", "rows", "trainer:")
        ], text
        assert text.startswith("a line of before\n")
        for _ in range(6):
            shown.type("\n")
        assert shown.wait() == 0
        assert [line for line in shown.screen.text.split("\n") if line] == ["a line of before", "the end"]


def test_a_process_that_is_killed_leaves_a_cursor():
    with on_terminal("shown.start()\nshow(1)\ntime.sleep(60)") as shown:
        shown.shows(lambda text: "step 1/9" in text)
        os.kill(shown.process.pid, signal.SIGKILL)
        shown.wait()
        assert shown.screen.cursor_is_visible and shown.settings_after == shown.settings


def test_an_error_is_printed_below_a_picture_that_is_gone():
    program = """
try:
    shown.start()
    show(1)
    raise RuntimeError("wrong")
finally:
    shown.stop()
"""
    with on_terminal(program) as shown:
        assert shown.wait() == 1
        text = shown.screen.text
    assert text.startswith("Traceback") and text.rstrip().endswith("RuntimeError: wrong") and "step 1/9" not in text


def test_colours_may_be_refused():
    with on_terminal("shown.start()\nshow(1, headline='starting')\nshown.stop()", NO_COLOR="1") as shown:
        assert shown.wait() == 0
    with on_terminal("shown.start()\nshow(1, headline='starting')\nshown.stop()") as coloured:
        assert coloured.wait() == 0
    assert "\x1b[1;33m" in coloured.written and "33m" not in shown.written and "36m" not in shown.written


@pytest.mark.parametrize(
    ("term", "encoding", "suits"),
    [("xterm", "utf-8", True), ("dumb", "utf-8", False), ("", "utf-8", False), ("xterm", "ascii", False), (None, "utf-8", False)],
)
def test_which_streams_get_a_display(monkeypatch, term, encoding, suits):
    class Terminal(io.TextIOWrapper):
        def isatty(self) -> bool:
            return True

    monkeypatch.delenv("TERM", raising=False)
    if term is not None:
        monkeypatch.setenv("TERM", term)
    assert terminal.suits(Terminal(io.BytesIO(), encoding=encoding)) == suits
    assert not terminal.suits(io.StringIO())
