"""What a person sees of a run, while it runs and at its end."""

from tba_jax.roles import progress
from tba_jax.run import layout, status
from tba_jax.run.metrics import MetricWriter


def test_a_step_that_was_done_twice_is_drawn_once():
    """Steps 10 and 15 were done twice: the trainer was killed after them, and went on from step 5."""
    lines = [{"step": step, "reward": reward} for step, reward in ((5, 0.1), (10, 0.2), (15, 0.3), (10, 0.4), (15, 0.5))]
    assert [(line["step"], line["reward"]) for line in progress.by_step(lines)] == [(5, 0.1), (10, 0.4), (15, 0.5)]


def shown(run: layout.RunDir, capsys) -> progress.Progress:
    run.references.mkdir()
    layout.write_json(run.initial_reference, {"id": "0"})
    for role in ("trainer", "searcher-0", "searcher-1"):
        MetricWriter(run.metrics(role)).close()
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
