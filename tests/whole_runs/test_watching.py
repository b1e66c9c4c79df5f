"""What a person sees of a run on a terminal and without one, until it ends or is stopped."""

import json
import re
import sqlite3
import subprocess
from pathlib import Path

import pytest

from tba_jax.storage import layout
from tba_jax.telemetry import metrics
from tests.support import tiny_run, wandb_files
from tests.support.screen import OnTerminal


def on_terminal(workdir: Path, *flags: str, width: int, **environment: str) -> OnTerminal:
    whole = tiny_run.environment() | {"TERM": "xterm-256color"} | environment
    return OnTerminal(tiny_run.command(workdir, *flags), width=width, environment=whole, cwd=tiny_run.ROOT)


def picture(text: str) -> list[str]:
    """The lines from the last bar on."""
    lines = text.split("\n")
    first = max((number for number, line in enumerate(lines) if line.startswith("step ")), default=len(lines))
    return [line.rstrip() for line in lines[first:]]


def test_the_run_is_shown_and_a_stop_leaves_tables_and_a_clean_terminal(tmp_path):
    workdir = tmp_path / "run"
    with on_terminal(workdir, "--config.learner.steps=5000", "--config.searchers.count=1", width=60) as shown:
        shown.shows(lambda text: any("compiling the update" in line for line in picture(text)))
        shown.shows(lambda text: "steps/s" in "".join(picture(text)) and "ETA" in picture(text)[0])
        lines = picture(shown.shows(lambda text: any(line.startswith("reward ") for line in picture(text))))
        assert all(len(line) < 60 for line in lines), lines
        shown.interrupt()
        assert shown.wait() == 130
        text = shown.screen.text
        assert shown.screen.cursor_is_visible and shown.settings_after == shown.settings
    assert "rows seen by the trainer" in text and "stopped after" in text and not picture(text)
    said = "".join(text.split())  # the terminal breaks the line at a space or within a word, as many digits as its numbers have
    assert "of5000;thisresumestherun:" in said, "the last line says where it stands and how to go on"
    assert (workdir / "progress.png").read_bytes()[:4] == b"\x89PNG"


def test_a_run_without_a_display_has_plain_lines_trackers_and_its_result_once(tmp_path):
    """Every role is in the run's group of both trackers."""
    for package in ("wandb", "trackio"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    workdir, database = tmp_path / "run", tmp_path / "trackio" / "tba_jax.db"
    flags = ("--config.metrics.sinks=('wandb','trackio')", "--config.schedule.mode=interleaved", "--config.learner.steps=3")
    own = {"HOME": str(tmp_path), "WANDB_MODE": "offline", "TRACKIO_DIR": str(database.parent)}

    def call() -> tuple[str, str]:
        asked = dict(
            cwd=tiny_run.ROOT, env=tiny_run.environment() | own, capture_output=True, text=True, timeout=300, check=False
        )
        done = subprocess.run(tiny_run.command(workdir, *flags), **asked)
        assert done.returncode == 0, done.stderr
        return done.stdout, done.stderr

    said, logged = call()
    assert all(re.match(r"\d\d:\d\d:\d\d ", line) for line in logged.splitlines()), logged
    assert re.search(r"^ +\d+ s  step 0/3  0 %", said, re.MULTILINE), said
    assert re.search(r"^base: accuracy .* s, mean staleness", said, re.MULTILINE), said
    check_group(layout.open_run_dir(workdir), database)
    finished = layout.read_json(layout.RunDir(workdir).finished)
    said, logged = call()
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
