"""What a person sees of a run at its end."""

from tba_jax.roles import results
from tba_jax.storage import layout
from tests.support import role_files


def test_a_step_that_was_done_twice_is_drawn_once():
    """Steps 10 and 15 were done twice: the trainer was killed after them, and went on from step 5."""
    lines = [{"step": step, "reward": reward} for step, reward in ((5, 0.1), (10, 0.2), (15, 0.3), (10, 0.4), (15, 0.5))]
    assert results.by_step(lines, ["reward"]).tolist() == [[5, 0.1], [10, 0.4], [15, 0.5]]


FIGURES = {"staleness_mean": 2.0, "staleness_max": 3.0, "draws_per_row": 1.0, "rows_seen": 9.0, "steps_per_second": 3.0}


def evaluation(run: layout.RunDir, step: int, reward: float) -> None:
    names = ("sampled_reward", "finished", "ref_nll_per_token", "kl_to_initial")
    run.evaluations.mkdir(exist_ok=True)
    layout.write_json(
        run.evaluations / f"{layout.step_name(step)}.json",
        {"step": step, "greedy_reward": reward, "greedy_reward_stderr": 0.01, "samples": [], **dict.fromkeys(names, 0.25)},
    )


def test_a_run_that_was_stopped_early_shows_what_is_there(tmp_path, capsys):
    """One evaluation, and no line with a result: the run has none."""
    run = layout.RunDir(tmp_path)
    results.tell(run, label="demo", score_name="accuracy")
    assert capsys.readouterr().out == "" and not (tmp_path / "progress.png").exists(), "nothing is there"
    role_files.write_lines(run, "trainer", [{"step": 5, "ago": 1.0, "reward": 0.5, **FIGURES}])
    evaluation(run, 0, 0.125)
    results.tell(run, label="demo", score_name="accuracy")
    told = capsys.readouterr().out
    assert "step 0" in told and "0.125 ± 0.010" in told and "rows seen by the trainer" in told and "results in" not in told
    assert (tmp_path / "progress.png").read_bytes()[:4] == b"\x89PNG"
    assert "since it resumed" not in told
    more = {**FIGURES, "staleness_mean": 3.0, "staleness_max": 1.0, "rows_seen": 10.0}
    role_files.write_lines(run, "trainer", [{"step": 6, "ago": 0.5, "reward": 0.5, "resumed_from": 3.0, **more}])
    found = results.figures(run)
    assert "trainer steps per second, since it resumed" in found and found["rows seen by the trainer"] == 10
    assert (found["mean staleness (steps)"], found["largest staleness (steps)"]) == (2.5, 3), "of the whole run"


def test_the_best_step_is_named(tmp_path, capsys):
    run = layout.RunDir(tmp_path)
    for step, reward in ((0, 0.125), (10, 0.75), (20, 0.75), (30, 0.5)):
        evaluation(run, step, reward)
    results.tell(run, label="demo", score_name="accuracy", outcome="in 3 s")
    told = capsys.readouterr().out
    assert "step 0" in told and "step 20, the best" in told and "step 30" in told and "step 10" not in told
    assert told.splitlines()[-1].startswith("demo: accuracy 0.12 -> 0.50 (best 0.75 at step 20) in 3 s")
    evaluation(run, 30, 0.875)
    results.tell(run, label="demo", score_name="accuracy", outcome="in 3 s")
    told = capsys.readouterr().out
    assert "step 30, the best" in told and "step 20" not in told and "accuracy 0.12 -> 0.88 in 3 s" in told


def test_a_task_s_name_of_its_score_is_text(tmp_path, capsys):
    """Neither markup of rich, nor mathematics of matplotlib, nor a control character of a terminal."""
    run = layout.RunDir(tmp_path)
    role_files.write_lines(run, "trainer", [{"step": 5, "ago": 1.0, "reward": 0.5, **FIGURES}])
    for step, reward in ((10, 0.75), (0, 0.125)):
        evaluation(run, step, reward)
    results.tell(run, label="demo", score_name="[red]$\\frac$ \x1b[2J", outcome="in 3 s")
    told = capsys.readouterr().out
    assert "greedy [red]$\\frac$ \\x1b[2J" in told and "\x1b" not in told
    assert told.splitlines()[-1] == (
        f"demo: [red]$\\frac$ \\x1b[2J 0.12 -> 0.75 in 3 s, mean staleness 2.0 steps, results in {tmp_path}"
    )
