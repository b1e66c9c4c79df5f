"""Lines of metrics that are followed while they come: curves, the newest line, the line of a step."""

import json

import numpy as np

from tba_jax.reporting import metric_lines
from tba_jax.reporting.metric_lines import MetricLines


def line(step: int, **figures: object) -> str:
    return json.dumps({"step": step, "time": 100.0 + step, **figures}) + "\n"


def test_lines_are_read_once_and_only_whole(tmp_path):
    path, found = tmp_path / "metrics.jsonl", MetricLines(tmp_path)
    assert found.advance() and found.last == {} and found.of_step(1) == {}
    path.write_text(line(5, reward=1.0) + line(10, reward=3.0, note="x") + line(15, reward=5.0)[:20])
    assert found.advance() and found.last["step"] == 10 and found.damaged == 0
    path.write_text(line(5, reward=1.0) + line(10, reward=3.0, note="x") + line(15, reward=5.0, entropy=0.5))
    assert found.advance() and found.last["step"] == 15
    x, y = found.curve("reward")
    assert x.tolist() == [5, 10, 15] and y.tolist() == [1, 3, 5]
    assert [each.tolist() for each in found.curve("entropy")] == [[15], [0.5]] and len(found.curve("none")[0]) == 0
    assert set(found.names()) >= {"reward", "entropy"} and "note" not in found.names()


def test_the_line_of_a_step_is_its_own_or_the_next_and_the_newest_of_several(tmp_path, monkeypatch):
    monkeypatch.setattr(metric_lines, "_LINES_AT_ONCE", 2)
    steps = [5, 10, 15, 10, 15, 20]  # a trainer that did two steps again
    (tmp_path / "metrics.jsonl").write_text("".join(line(step, number=n) for n, step in enumerate(steps)))
    found = MetricLines(tmp_path)
    calls = 1
    while not found.advance(seconds=-1.0):
        calls += 1
    assert calls > 2
    assert {step: found.of_step(step).get("number") for step in (1, 5, 6, 10, 15, 16, 21)} == {
        1: 0, 5: 0, 6: 3, 10: 3, 15: 4, 16: 5, 21: None,
    }  # fmt: skip


def test_damaged_lines_are_counted_and_left_out(tmp_path):
    odd = ["no json\n", "[1]\n", '{"step": "x", "time": 1}\n', "\n", '{"step": 3}\n', "\xff\n"]
    content = line(1, reward=1.0) + "".join(odd) + line(2, reward=2.0)
    (tmp_path / "metrics.jsonl").write_bytes(content.encode("latin-1"))
    found = MetricLines(tmp_path)
    assert found.advance() and found.damaged == 5 and found.curve("reward")[1].tolist() == [1.0, 2.0]


def test_a_file_that_was_replaced_is_read_from_its_begin(tmp_path):
    path, found = tmp_path / "metrics.jsonl", MetricLines(tmp_path)
    path.write_text("".join(line(step, reward=0.0) for step in range(1, 50)))
    found.advance()
    path.write_text(line(50, reward=9.0))
    assert found.advance() and found.last["reward"] == 9.0 and np.max(found.curve("reward")[1]) == 9.0
