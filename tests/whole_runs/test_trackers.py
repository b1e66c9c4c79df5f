"""A run with both trackers: every role is in its group, and nothing but the run's own words reaches the terminal."""

import json
import re
import sqlite3
import subprocess

import pytest

from tba_jax.storage import layout
from tba_jax.telemetry import metrics
from tests.support import tiny_run, wandb_files

pytest.importorskip("wandb", reason="wandb is not installed")
pytest.importorskip("trackio", reason="trackio is not installed")


def test_a_run_is_one_group_with_samples(tmp_path):
    flags = ["--config.metrics.sinks=('wandb','trackio')", "--config.schedule.mode=interleaved", "--config.learner.steps=3"]
    own = {"HOME": str(tmp_path), "WANDB_MODE": "offline", "TRACKIO_DIR": str(tmp_path / "trackio")}
    done = subprocess.run(
        tiny_run.command(tmp_path / "run", *flags),
        cwd=tiny_run.ROOT,
        env=tiny_run.environment() | own,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert all(re.match(r"\d\d:\d\d:\d\d ", line) for line in done.stderr.splitlines()), done.stderr
    run = layout.open_run_dir(tmp_path / "run")
    called = f"run-{layout.read_json(run.config)['id'][:8]}"
    for role, seen in (
        ("trainer", "train/loss"),
        ("searcher-0", "search/samples.nrows"),
        ("evaluator", "evaluate/samples.nrows"),
    ):
        (path,) = run.metrics(role).glob("wandb/offline-run-*/*.wandb")
        found = wandb_files.read(path)
        assert (found["run"].run_group, found["run"].display_name) == (called, f"{called}-{role}")
        assert any(seen in point for point in found["history"])
        assert not [*run.metrics(role).glob("events.out.*")]
    with sqlite3.connect(tmp_path / "trackio" / "tba_jax.db") as connection:
        points = connection.execute("select run_name, step, metrics from metrics order by id").fetchall()
    assert {name for name, _, _ in points} == {f"{called}-{role}" for role in ("trainer", "searcher-0", "evaluator")}
    trained = [(step, json.loads(values)) for name, step, values in points if name.endswith("-trainer")]
    lines = metrics.read_lines(run.metrics("trainer"))
    assert [(step, values["train/loss"]) for step, values in trained] == [(line["step"], line["loss"]) for line in lines]
    assert {"tokens_per_second", "computed_tokens_per_second"} <= lines[-1].keys() and "mfu" not in lines[-1]
