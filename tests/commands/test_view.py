"""The command that serves a run: its refusals, and its end."""

import os
import signal
import threading
import urllib.request

import pytest

from tba_jax.commands import command_line, view
from tba_jax.reporting import server
from tests.support import hostile_runs


@pytest.mark.parametrize(
    ("flag", "words"),
    [("--workdir=nowhere", "nowhere holds no run"), ("--port=70000", "--port=70000 must be an integer in the range")],
)
def test_a_mistake_is_one_sentence(flag, words, capsys):
    with pytest.raises(SystemExit, match="2"):
        command_line.execute(view, ["--workdir=nowhere", flag])
    said = capsys.readouterr().err
    assert said.startswith("error: ") and words in said and said.count("\n") == 1


def test_ctrl_c_ends_it(tmp_path, monkeypatch, capsys):
    run, answers = hostile_runs.make(tmp_path / "run"), []

    def ask(address: str) -> None:
        with urllib.request.urlopen(address, timeout=20) as answer:
            answers.append(answer.status)
        os.kill(os.getpid(), signal.SIGINT)

    enter = server.Server.__enter__
    monkeypatch.setattr(
        server.Server, "__enter__", lambda self: (threading.Thread(target=ask, args=(self.address,)).start(), enter(self))[1]
    )
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        assert command_line.execute(view, [f"--workdir={run.root}"]) == 0
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    said = capsys.readouterr().out
    assert answers == [200] and said.startswith("http://127.0.0.1:") and said.endswith("\nCtrl-C ends it.\nstopped\n")
