"""The statistics of evaluations against loops, subsets and formulas by hand; and what a person sees of a run at its end."""

import itertools
import json
import math

import numpy as np
import pytest

from tba_jax.roles import results
from tba_jax.roles.results import Scores, majority, mean, pass_at, with_stderr
from tba_jax.storage import layout
from tests.support import role_files


def by_hand(values: np.ndarray) -> tuple[float, float]:
    """The mean of float[K, Q], and its standard error with the queries as clusters, by loops."""
    known = [(query, float(x)) for row in values for query, x in enumerate(row) if not math.isnan(x)]
    m = sum(x for _, x in known) / len(known)
    queries = {query for query, _ in known}
    squares = sum(sum(x - m for of, x in known if of == query) ** 2 for query in queries)
    return m, math.sqrt(len(queries) / (len(queries) - 1) * squares) / len(known)


@pytest.mark.parametrize("samples, missing", [(1, 0.0), (4, 0.0), (4, 0.3)])
def test_the_standard_error_has_queries_as_clusters(samples, missing):
    rng = np.random.default_rng(samples)
    values = rng.normal(size=(samples, 50)) + 3 * rng.normal(size=50)
    values[rng.random(values.shape) < missing] = np.nan
    found = mean("score", values)
    assert (found["score"], found["score_stderr"]) == pytest.approx(by_hand(values))


def test_of_fewer_than_two_units_there_is_no_error():
    assert mean("rate", np.array([[1.0]])) == {"rate": 1.0} and mean("rate", np.ones((3, 8))) == {"rate": 1.0, "rate_stderr": 0.0}
    assert mean("rate", np.array([[1.0, np.nan], [0.0, np.nan]])) == {"rate": 0.5}, "one query of two has a value"
    assert all(math.isnan(mean("rate", nothing)["rate"]) for nothing in (np.full((2, 3), np.nan), np.zeros((1, 0))))
    of_one_query = mean("rate", np.array([[0.0], [1.0], [1.0], [1.0]]))
    assert of_one_query == pytest.approx({"rate": 0.75, "rate_stderr": math.sqrt(0.75 * 0.25 / 3)}), "its samples are the units"
    figures = {"a": 0.5, "a_stderr": 0.0312, "b": -0.0001, "c": None, "d": math.nan, "d_stderr": None}
    assert [with_stderr(figures, name) for name in "abcde"] == ["0.500 ± 0.031", "0.000", "–", "–", "–"]


@pytest.mark.parametrize("samples, right", [(1, 1), (4, 0), (4, 1), (4, 4), (7, 2), (16, 5)])
def test_pass_at_k_is_the_share_of_subsets_that_hold_a_right_one(samples, right):
    given = [True] * right + [False] * (samples - right)
    for k in range(1, samples + 1):
        subsets = [any(subset) for subset in itertools.combinations(given, k)]
        found = pass_at(np.array([right, samples]), samples, k)
        np.testing.assert_allclose(found, [np.mean(subsets), 1], rtol=1e-12)


@pytest.mark.parametrize(
    "answers, right, share",
    [
        (["3", "4", "3"], [True, False, True], 1),
        (["3", "4", "4"], [True, False, False], 0),
        (["3", "4"], [True, False], 0.5),
        (["", "", "3"], [False, False, True], 1),  # nothing is no answer
        (["", ""], [False, False], 0),
        (["3", "3"], [True, False], 0.5),  # one was cut at the limit, say
    ],
)
def test_the_majority_is_right_as_its_most_frequent_answers(answers, right, share):
    assert majority(answers, right) == share


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
    run = layout.RunDir(tmp_path)
    results.tell(run, label="demo", score_name="accuracy")
    assert capsys.readouterr().out == "" and not (tmp_path / "progress.png").exists(), "nothing is there"
    role_files.write_lines(run, "trainer", [{"step": 5, "ago": 1.0, "reward": 0.5, **FIGURES}])
    evaluation(run, 0, 0.125)
    results.tell(run, label="demo", score_name="accuracy")
    told = capsys.readouterr().out
    assert "step 0" in told and "0.125 ± 0.010" in told and "results in" not in told
    more = {**FIGURES, "staleness_mean": 3.0, "staleness_max": 1.0, "rows_seen": 10.0}
    role_files.write_lines(run, "trainer", [{"step": 6, "ago": 0.5, "reward": 0.5, "resumed_from": 3.0, **more}])
    found = results.figures(run)
    assert "trainer steps per second, since it resumed" in found and found["rows seen by the trainer"] == 10
    assert (found["mean staleness (steps)"], found["largest staleness (steps)"]) == (2.5, 3), "of the whole run"


def test_the_best_step_is_named_and_a_name_of_a_score_is_text(tmp_path, capsys, monkeypatch):
    """Neither markup of rich, nor mathematics of matplotlib, nor a control character of a terminal."""
    monkeypatch.setenv("COLUMNS", "200")
    run = layout.RunDir(tmp_path)
    role_files.write_lines(run, "trainer", [{"step": 5, "ago": 1.0, "reward": 0.5, **FIGURES}])
    for step, reward in ((0, 0.125), (10, 0.75), (20, 0.75), (30, 0.5)):
        evaluation(run, step, reward)
    results.tell(run, label="demo", score_name="[red]$\\frac$ \x1b[2J", outcome="in 3 s")
    told = capsys.readouterr().out
    assert "step 0" in told and "step 20, the best" in told and "step 30" in told and "step 10" not in told
    assert "greedy [red]$\\frac$ \\x1b[2J" in told and "\x1b" not in told
    scores = "demo: [red]$\\frac$ \\x1b[2J 0.12 -> 0.50 (best 0.75 at step 20) in 3 s"
    assert told.splitlines()[-1] == f"{scores}, mean staleness 2.0 steps, results in {tmp_path}"
    assert (tmp_path / "progress.png").read_bytes()[:4] == b"\x89PNG"
    evaluation(run, 30, 0.875)
    results.tell(run, label="demo", score_name="accuracy", outcome="in 3 s")
    told = capsys.readouterr().out
    assert "step 30, the best" in told and "step 20" not in told and "accuracy 0.12 -> 0.88 in 3 s" in told


def test_the_latest_of_the_highest_finite_scores_is_best_and_what_has_changed_is_read_again(tmp_path, monkeypatch):
    def report(step: int, score: object) -> None:
        (tmp_path / f"{step:08d}.json").write_text(json.dumps({"step": step, "greedy_reward": score, "samples": {"greedy": []}}))

    for step, score in ((0, 0.25), (10, 0.75), (20, 0.5), (30, 0.75), (40, None), (50, "0.9"), (60, True)):
        report(step, score)
    (tmp_path / "00000070.json").write_text('{"greedy_reward": 1.0')
    (tmp_path / "00000080.json").write_text("[1.0]")
    scores, read = Scores(tmp_path), []
    monkeypatch.setattr(results, "_score", lambda file, found=results._score: (read.append(file.stem), found(file))[1])
    assert scores.best() == (30, 0.75) == scores.best() and len(read) == 9
    report(30, 0.125)
    assert scores.best() == (10, 0.75) and read[9:] == ["00000030"]
    (tmp_path / "00000010.json").unlink()
    assert scores() == {0: 0.25, 20: 0.5, 30: 0.125} and len(read) == 10
    assert Scores(tmp_path / "none").best() is None
