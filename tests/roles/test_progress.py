"""What a person sees of a run, while it runs and at its end."""

import json
import tracemalloc

from tba_jax.roles import progress
from tba_jax.run import layout, metrics, status
from tba_jax.run.metrics import MetricWriter


def test_a_step_that_was_done_twice_is_drawn_once():
    """Steps 10 and 15 were done twice: the trainer was killed after them, and went on from step 5."""
    lines = [{"step": step, "reward": reward} for step, reward in ((5, 0.1), (10, 0.2), (15, 0.3), (10, 0.4), (15, 0.5))]
    assert progress.by_step(lines, ["reward"]).tolist() == [[5, 0.1], [10, 0.4], [15, 0.5]]


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
        found = progress.summary(run)
        table = progress.by_step(metrics.each_line(run.metrics("trainer")), ["reward", "staleness_max"])
        assert tracemalloc.get_traced_memory()[1] < 3e6
    finally:
        tracemalloc.stop()
    assert found["mean staleness (steps)"] == 2.0 and found["largest staleness (steps)"] == 6
    assert table.shape == (points, 3) and table[-1].tolist() == [points - 1, 0.5, (points - 1) % 7]


def shown(run: layout.RunDir, capsys) -> progress.Progress:
    run.references.mkdir()
    layout.write_json(run.initial_reference, {"id": "0"})
    for role in ("trainer", "searcher-0", "searcher-1"):
        MetricWriter(run.metrics(role), event_megabytes=1).close()
    return progress.Progress(run, steps=12, searchers=2, warm_start_steps=0, plain_seconds=0.0)


def test_a_run_that_waits_says_for_what(tmp_path, capsys):
    run = layout.RunDir(tmp_path)
    show = shown(run, capsys)
    status.Status(run.metrics("trainer")).waits("rows: 2 of 3 queries", seconds=42.0)
    status.Status(run.metrics("searcher-1")).waits("a snapshot newer than step 0", seconds=40.0)
    show()
    assert capsys.readouterr().out.split("s  ", 1)[1] == (
        "starting  the trainer has waited 42 s for rows: 2 of 3 queries; 1 of 2 searchers wait for a snapshot\n"
    )


def test_rewards_that_fail_are_told_on_lines_of_their_own_and_not_again_and_again(tmp_path, capsys):
    run = layout.RunDir(tmp_path)
    show, told = shown(run, capsys), status.Status(run.metrics("searcher-0"))
    told.trouble("no row has a reward: 64 of 64 failed, KeyError: 'x'")
    show()
    show()
    lines = [line.split("s  ", 1)[1] for line in capsys.readouterr().out.splitlines()]
    assert lines == ["searcher-0: no row has a reward: 64 of 64 failed, KeyError: 'x'", "starting", "starting"]
    told.trouble("")
    show()
    show()
    lines = [line.split("s  ", 1)[1] for line in capsys.readouterr().out.splitlines()]
    assert lines == ["searcher-0: rows have rewards again", "starting", "starting"]


def test_a_line_that_is_no_text_is_passed_over(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 3}\n\xff\xfe\n')
    assert progress.last_line(tmp_path) == {"step": 3}
