"""The command that serves a run: its refusals, and its end."""

import re
import signal
import subprocess
import sys
import time
import urllib.request

import pytest

from tba_jax.commands import command_line, view
from tba_jax.storage import layout
from tests.support import frozen_runs, hostile_runs, tiny_run


def refusal(capsys, *flags: str) -> str:
    with pytest.raises(SystemExit) as ended:
        command_line.execute(view, flags)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1
    return said


def test_what_is_no_run_is_one_sentence(tmp_path, capsys):
    assert "nowhere holds no run" in refusal(capsys, f"--workdir={tmp_path / 'nowhere'}")
    run = hostile_runs.make(tmp_path / "run")
    capsys.readouterr()
    assert "there is no argument '--other'" in refusal(capsys, f"--workdir={run.root}", "--other=b")
    layout.write_json(run.config, layout.read_json(run.config) | {"format": 99})
    assert "has format 99" in refusal(capsys, f"--workdir={run.root}")
    told = refusal(capsys, f"--workdir={run.root}", "--port=70000")
    assert "--port=70000 must be an integer in the range [0, 65535]" in told


def test_ctrl_c_ends_it_and_nothing_is_written(tmp_path):
    run = hostile_runs.make(tmp_path / "run")
    before = frozen_runs.contents(run.root)
    command = [sys.executable, "-m", "tba_jax", "view", f"--workdir={run.root}"]
    process = subprocess.Popen(
        command, cwd=tiny_run.ROOT, env=tiny_run.environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        address = process.stdout.readline().strip()
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/[\w-]{32}/", address)
        with urllib.request.urlopen(address, timeout=20) as answer:
            assert answer.status == 200
        process.send_signal(signal.SIGINT)
        began = time.monotonic()
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 0 and out.endswith("stopped\n") and time.monotonic() - began < 15
    assert err == "" and frozen_runs.contents(run.root) == before
