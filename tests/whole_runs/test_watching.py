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

import pytest

from tba_jax import main
from tba_jax.commands import command_line
from tba_jax.storage import layout
from tba_jax.telemetry import metrics
from tests.support import tiny_run


def test_the_run_is_shown_and_a_stop_leaves_tables_and_a_clean_terminal(tmp_path):
    workdir, (master, slave), written = tmp_path / "run", pty.openpty(), bytearray()
    flags = ("--config.learner.steps=100000", "--config.schedule.mode=interleaved", "--config.evaluation.enabled=False")
    command = tiny_run.command(workdir, *flags)
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


def test_a_run_without_a_display_has_plain_lines_and_its_result_once(tmp_path, one_device, capsys):
    command = tiny_run.command(tmp_path, "--config.schedule.mode=interleaved", "--config.learner.steps=3")[3:]
    assert command_line.execute(main, command) == 0
    said, logged = capsys.readouterr()
    assert all(re.match(r"\d\d:\d\d:\d\d ", line) for line in logged.splitlines()), logged
    assert re.search(r"^ +\d+ s  step 0/3  0 %", said, re.MULTILINE), said
    assert re.search(r"^base: accuracy .* s, mean staleness", said, re.MULTILINE), said
    finished = layout.read_json(layout.RunDir(tmp_path).finished)
    assert command_line.execute(main, command) == 0
    said, logged = capsys.readouterr()
    assert "base: already finished: accuracy 0.00 -> 0.00, mean staleness" in said and "\x1b" not in said + logged
    assert "--config.learner.steps=N --allow_change=learner.steps, with N > 3, goes on" in logged
    assert layout.read_json(layout.RunDir(tmp_path).finished) == finished, "nothing was done again"


@pytest.mark.slow
def test_every_role_is_in_the_group_of_the_run_of_both_trackers(tmp_path):
    for package in ("wandb", "trackio"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    run, database = layout.RunDir(tmp_path / "run"), tmp_path / "trackio" / "tba_jax.db"
    flags = ("--config.metrics.sinks=('wandb','trackio')", "--config.schedule.mode=interleaved", "--config.learner.steps=3")
    whole = tiny_run.environment() | {"HOME": str(tmp_path), "WANDB_MODE": "offline", "TRACKIO_DIR": str(database.parent)}
    command = tiny_run.command(run.root, *flags)
    done = subprocess.run(command, cwd=tiny_run.ROOT, env=whole, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    called = f"run-{layout.read_json(run.config)['id'][:8]}"
    seen = {"trainer": "train/loss", "searcher-0": "search/samples.nrows", "evaluator": "evaluate/samples.nrows"}
    for role, name in seen.items():
        (path,) = run.metrics(role).glob("wandb/offline-run-*/*.wandb")
        assert all(words.encode() in path.read_bytes() for words in (called, f"{called}-{role}", name))
        assert not [*run.metrics(role).glob("events.out.*")]
    with sqlite3.connect(database) as connection:
        points = connection.execute("select run_name, step, metrics from metrics order by id").fetchall()
    assert {name for name, _, _ in points} == {f"{called}-{role}" for role in seen}
    trained = [(step, json.loads(values)["train/loss"]) for name, step, values in points if name.endswith("-trainer")]
    assert trained == [(line["step"], line["loss"]) for line in metrics.read_lines(run.metrics("trainer"))]
