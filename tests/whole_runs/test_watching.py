"""What a person sees of a run on a terminal and without one, until it ends or is stopped."""

import contextlib
import json
import os
import pty
import re
import signal
import sqlite3
import subprocess
import termios
import threading
import time
from pathlib import Path

import pytest

from tba_jax import main
from tba_jax.commands import command_line
from tba_jax.storage import layout
from tba_jax.telemetry import metrics
from tests.support import tiny_run, wandb_files


def test_the_run_is_shown_and_a_stop_leaves_tables_and_a_clean_terminal(tmp_path):
    workdir, (master, slave), written = tmp_path / "run", pty.openpty(), bytearray()
    command = tiny_run.command(workdir, "--config.learner.steps=100000", "--config.schedule.mode=interleaved")
    settings = termios.tcgetattr(slave)
    whole = tiny_run.environment() | {"TERM": "xterm-256color", "LANG": "C.UTF-8"}
    process = subprocess.Popen(
        command, stdin=slave, stdout=slave, stderr=slave, cwd=tiny_run.ROOT, env=whole, start_new_session=True
    )

    def read() -> None:
        with contextlib.suppress(OSError):  # the other side is closed
            while content := os.read(master, 65536):
                written.extend(content)

    def text() -> str:
        return re.sub(r"\x1b\[[?0-9;]*[A-Za-z]", "", written.decode(errors="replace"))

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        deadline = time.monotonic() + 120
        while not all(words in text() for words in ("compiling the update", "steps/s", "ETA", "reward  ")):
            assert process.poll() is None and time.monotonic() < deadline, text()
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        assert termios.tcgetattr(slave) == settings
    finally:
        process.kill()
        os.close(slave)
        reader.join(5)
        os.close(master)
    assert written.rfind(b"\x1b[?25h") >= written.rfind(b"\x1b[?25l"), "the cursor is visible"
    assert "rows seen by the trainer" in text() and "stopped after" in text()
    said = "".join(text().split())  # the terminal breaks the line at a space or within a word
    assert "of100000;thisresumestherun:" in said, "the last line says where it stands and how to go on"
    assert (workdir / "progress.png").read_bytes()[:4] == b"\x89PNG"


def test_a_run_without_a_display_has_plain_lines_trackers_and_its_result_once(tmp_path, one_device, capsys):
    """Every role is in the run's group of both trackers."""
    for package in ("wandb", "trackio"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    workdir, database = tmp_path / "run", tmp_path / "trackio" / "tba_jax.db"
    flags = ("--config.metrics.sinks=('wandb','trackio')", "--config.schedule.mode=interleaved", "--config.learner.steps=3")
    command = tiny_run.command(workdir, *flags)
    whole = tiny_run.environment() | {"HOME": str(tmp_path), "WANDB_MODE": "offline", "TRACKIO_DIR": str(database.parent)}
    done = subprocess.run(command, cwd=tiny_run.ROOT, env=whole, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert all(re.match(r"\d\d:\d\d:\d\d ", line) for line in done.stderr.splitlines()), done.stderr
    assert re.search(r"^ +\d+ s  step 0/3  0 %", done.stdout, re.MULTILINE), done.stdout
    assert re.search(r"^base: accuracy .* s, mean staleness", done.stdout, re.MULTILINE), done.stdout
    check_group(layout.open_run_dir(workdir), database)
    finished = layout.read_json(layout.RunDir(workdir).finished)
    assert command_line.execute(main, command[3:]) == 0
    said, logged = capsys.readouterr()
    assert "base: already finished: accuracy 0.00 -> 0.00, mean staleness" in said and "\x1b" not in said + logged
    assert "--config.learner.steps=N --allow_change=learner.steps, with N > 3, goes on" in logged
    assert layout.read_json(layout.RunDir(workdir).finished) == finished, "nothing was done again"


def check_group(run: layout.RunDir, database: Path) -> None:
    called = f"run-{layout.read_json(run.config)['id'][:8]}"
    seen = {"trainer": "train/loss", "searcher-0": "search/samples.nrows", "evaluator": "evaluate/samples.nrows"}
    for role, name in seen.items():
        (path,) = run.metrics(role).glob("wandb/offline-run-*/*.wandb")
        found = wandb_files.read(path)
        assert (found["run"].run_group, found["run"].display_name) == (called, f"{called}-{role}")
        assert any(name in point for point in found["history"])
        assert not [*run.metrics(role).glob("events.out.*")]
    with sqlite3.connect(database) as connection:
        points = connection.execute("select run_name, step, metrics from metrics order by id").fetchall()
    assert {name for name, _, _ in points} == {f"{called}-{role}" for role in seen}
    trained = [(step, json.loads(values)["train/loss"]) for name, step, values in points if name.endswith("-trainer")]
    assert trained == [(line["step"], line["loss"]) for line in metrics.read_lines(run.metrics("trainer"))]
