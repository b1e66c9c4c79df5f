"""The best step by held-out score: ties, steps without a score, damaged reports, and what is read again."""

import json
import math
from pathlib import Path

from tba_jax.storage import best_step
from tba_jax.storage.best_step import Scored, Scores


def report(folder: Path, step: int, score: object) -> Path:
    folder.mkdir(exist_ok=True)
    file = folder / f"{step:08d}.json"
    file.write_text(json.dumps({"step": step, "greedy_reward": score, "samples": {"greedy": []}}))
    return file


def test_the_latest_of_equal_scores_is_the_best(tmp_path):
    for step, score in ((0, 0.25), (10, 0.75), (20, 0.5), (30, 0.75)):
        report(tmp_path, step, score)
    assert Scores(tmp_path).best() == (30, 0.75)
    assert best_step.best([(30, -1.0), (10, -1.0), (20, -2.0)]) == Scored(30, -1.0)


def test_steps_without_a_score_are_never_the_best(tmp_path):
    for step, score in ((0, None), (10, -3.5), (20, "0.9"), (30, True)):
        report(tmp_path, step, score)
    (tmp_path / "00000040.json").write_text('{"greedy_reward": 1.0')
    (tmp_path / "00000050.json").write_text("[1.0]")
    assert Scores(tmp_path)() == {10: -3.5}
    assert best_step.best([(0, math.nan), (1, math.inf)]) is None
    assert Scores(tmp_path / "none").best() is None


def test_a_report_is_read_again_only_where_it_has_changed(tmp_path, monkeypatch):
    """The evaluator of a resumed run writes a step's report anew, and the trainer removes those of lost steps."""
    for step, score in ((0, 0.1), (10, 0.9), (20, 0.4)):
        report(tmp_path, step, score)
    scores, read = Scores(tmp_path), []
    monkeypatch.setattr(best_step, "_score", lambda file, found=best_step._score: (read.append(file.stem), found(file))[1])
    assert scores.best() == (10, 0.9) == scores.best() and len(read) == 3
    report(tmp_path, 10, 0.25)
    assert scores.best() == (20, 0.4) and read[3:] == ["00000010"]
    (tmp_path / "00000020.json").unlink()
    assert scores.best() == (10, 0.25) and len(read) == 4
