"""What a person sees of a run at its end."""

import json
import tracemalloc

from tba_jax.roles import results
from tba_jax.run import layout, metrics


def test_a_step_that_was_done_twice_is_drawn_once():
    """Steps 10 and 15 were done twice: the trainer was killed after them, and went on from step 5."""
    lines = [{"step": step, "reward": reward} for step, reward in ((5, 0.1), (10, 0.2), (15, 0.3), (10, 0.4), (15, 0.5))]
    assert results.by_step(lines, ["reward"]).tolist() == [[5, 0.1], [10, 0.4], [15, 0.5]]


def test_the_end_of_a_long_run_holds_a_few_numbers_a_line(tmp_path):
    """20 MB of metrics."""
    run, points = layout.RunDir(tmp_path), 8_000
    figures = {"staleness_mean": 2.0, "reward": 0.5, "draws_per_row": 1.0, "rows_seen": 9.0, "steps_per_second": 3.0}
    run.metrics("trainer").mkdir(parents=True)
    with open(run.metrics("trainer") / "metrics.jsonl", "w") as file:
        for step in range(points):
            line = {"step": step, **figures, "staleness_max": step % 7, "padding": "x" * 2500}
            file.write(json.dumps(line) + "\n")
    tracemalloc.start()
    try:
        found = results.figures(run)
        table = results.by_step(metrics.each_line(run.metrics("trainer")), ["reward", "staleness_max"])
        assert tracemalloc.get_traced_memory()[1] < 3e6
    finally:
        tracemalloc.stop()
    assert found["mean staleness (steps)"] == 2.0 and found["largest staleness (steps)"] == 6
    assert table.shape == (points, 3) and table[-1].tolist() == [points - 1, 0.5, (points - 1) % 7]
