"""Points of a role: what is written, what is kept, and what a kill or storage that refuses does to them."""

import json
import time

import numpy as np
import pytest

from tba_jax.telemetry import metrics
from tba_jax.telemetry.metrics import MetricWriter
from tba_jax.telemetry.status import Status


@pytest.fixture
def folder(tmp_path):
    """A role's metrics with points of steps 1 to 3."""
    writer = MetricWriter(tmp_path / "trainer", megabytes=1, status=(told := Status(None)))
    for step in (1, 2, 3):
        writer.write(step, {"loss": np.float32(step / 2), "count": step, "note": "text"}, {"staleness": np.array([1, 1, 3])})
        assert metrics.read_lines(tmp_path / "trainer")[-1]["step"] == step, "it is on disk at once"
    assert told._told["figures"] == {"loss": 1.5, "count": 3.0}
    writer.close()
    return tmp_path / "trainer"


def test_points_come_back(folder):
    lines = metrics.read_lines(folder)
    found = [(line["step"], line["loss"], line["count"], line["note"]) for line in lines]
    assert found == [(1, 0.5, 1.0, "text"), (2, 1.0, 2.0, "text"), (3, 1.5, 3.0, "text")]
    assert abs(lines[-1]["time"] - time.time()) < 60
    assert lines[0]["staleness_histogram"]["counts"] == [2, 0, 1] and len(lines[0]["staleness_histogram"]["edges"]) == 4


def test_numbers_that_are_not_finite_are_left_out(tmp_path):
    writer = MetricWriter(tmp_path, megabytes=1)
    writer.write(7, {"loss": np.float32("nan"), "grad_norm": float("inf"), "reward": 0.5, "note": "text"})
    writer.close()
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    found = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert set(found) == {"step", "time", "reward", "note"}


def test_the_newest_points_are_kept_within_the_megabytes_also_over_starts(tmp_path):
    for start in range(10):
        writer = MetricWriter(tmp_path, megabytes=0.01)
        for step in range(20):
            writer.write(20 * start + step, {"loss": 1.0, "note": "x" * 50})
            assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= 0.01 * 2**20
        writer.close()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["metrics.jsonl", "metrics.jsonl.1"]
    steps = [line["step"] for line in metrics.each_line(tmp_path)]
    assert steps == list(range(steps[0], 200)) and 25 < len(steps) < 100


@pytest.mark.parametrize("cut", [1, 30])
def test_a_torn_last_line_is_left_out_and_harms_no_other(folder, cut):
    path = folder / "metrics.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[: -min(cut, len(whole.splitlines(keepends=True)[-1]) - 1)])
    kept = [1, 2, 3] if cut == 1 else [1, 2]
    assert [line["step"] for line in metrics.read_lines(folder)] == kept
    writer = MetricWriter(folder, megabytes=1)
    writer.write(4, {"loss": 9.0})
    writer.close()
    assert [line["step"] for line in metrics.read_lines(folder)] == [*kept, 4]
