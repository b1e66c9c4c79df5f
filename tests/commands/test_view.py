"""The command that serves a run: its refusals, and its end."""

import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request

import pytest

from tba_jax.commands import command_line, view
from tba_jax.experiment import storage
from tba_jax.run import layout
from tests.support import frozen_runs, hostile_runs, tiny_run


def refusal(capsys, *flags: str) -> str:
    with pytest.raises(SystemExit) as ended:
        command_line.execute(view, flags)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1
    return said


def test_what_is_no_run_is_one_sentence(tmp_path, capsys):
    assert "holds no run" in refusal(capsys, f"--workdir={tmp_path}")
    assert "nowhere holds no run" in refusal(capsys, f"--workdir={tmp_path / 'nowhere'}")
    run = hostile_runs.make(tmp_path / "run")
    capsys.readouterr()
    assert "b holds no run" in refusal(capsys, f"--workdir={run.root}", f"--other={tmp_path / 'b'}")
    layout.write_json(run.config, layout.read_json(run.config) | {"format": 99})
    assert "has format 99" in refusal(capsys, f"--workdir={run.root}")
    assert "--port=70000 must be a whole number of at least 0 and at most 65535" in refusal(
        capsys, f"--workdir={run.root}", "--port=70000"
    )
    assert "--workdir is needed" in refusal(capsys)


def test_a_store_that_does_not_answer_is_one_sentence(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(storage, "DRY_RUN_SECONDS", 0.5)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        (tmp_path / "shared.json").write_text('{"shared": "s3://runs/away"}')
        assert "s3://runs/away has not answered within 0.5 s" in refusal(capsys, f"--workdir={tmp_path}")


def test_ctrl_c_ends_it_and_nothing_is_written(tmp_path):
    run = hostile_runs.make(tmp_path / "run")
    before = frozen_runs.contents(run.root)
    command = [sys.executable, "-m", "tba_jax", "view", f"--workdir={run.root}"]
    process = subprocess.Popen(
        command, cwd=tiny_run.ROOT, env=tiny_run.environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        address = process.stdout.readline().strip()
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/\?token=[\w-]{32}", address)
        with urllib.request.urlopen(address, timeout=20) as answer:
            assert answer.status == 200
        process.send_signal(signal.SIGINT)
        began = time.monotonic()
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 0 and out.endswith("stopped\n") and time.monotonic() - began < 15
    assert err == "" and frozen_runs.contents(run.root) == before


# Sends itself SIGINT at the moment at which the command itself is about to wait, if it waits by a lock of Python's.
_INTERRUPTED = """
import os, signal, sys, threading
from tba_jax.commands import command_line, view
def at_waits(frame, event, arg):
    if frame.f_code is threading.Condition.wait.__code__ and frame.f_back.f_back.f_code.co_filename == view.__file__:
        os.kill(os.getpid(), signal.SIGINT)
sys.settrace(at_waits)
sys.exit(command_line.execute(view, sys.argv[1:]))
"""


def test_ctrl_c_ends_it_whatever_it_is_at(tmp_path):
    run = hostile_runs.make(tmp_path / "run")
    command = [sys.executable, "-c", _INTERRUPTED, f"--workdir={run.root}"]
    process = subprocess.Popen(command, cwd=tiny_run.ROOT, env=tiny_run.environment(), stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline().startswith("http://")
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=30)[0].endswith("stopped\n")
    finally:
        process.kill()


def test_no_task_is_imported(tmp_path):
    """Nor is jax asked for devices: the viewer runs beside a trainer that has them all."""
    folder, mark = tmp_path / "task", tmp_path / "executed"
    folder.mkdir()
    (folder / "my_task.py").write_text(f"open({str(mark)!r}, 'w').close()\n")
    run = hostile_runs.make(tmp_path / "run")
    stored = layout.read_json(run.config)
    stored["config"]["task"]["name"] = f"{folder / 'my_task.py'}:Ones"
    layout.write_json(run.config, stored)
    program = f"""
import sys
from tba_jax.reporting.live_run import LiveRun
from tba_jax.reporting.viewer import make_app
run = LiveRun({str(run.root)!r})
for part in (run.trainer, run.draws, run.table):
    part.advance()
client = make_app([run], "t").test_client()
host = {{"Host": "127.0.0.1"}}
client.get("/?token=t", headers=host)
assert all(client.get(f"/run/0/{{page}}", headers=host).status_code == 200 for page in ("", "rows", "row/w0/1", "step/1"))
bridge = sys.modules.get("jax._src.xla_bridge")
print(any(name.startswith("tba_jax.tasks.") for name in sys.modules), bool(bridge and bridge._backends))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tiny_run.ROOT, env=tiny_run.environment(), capture_output=True, text=True, check=True
    )
    assert done.stdout == "False False\n" and not mark.exists()
