"""The best step by held-out score: ties, steps without a score, damaged reports, and what is read again."""

import json

from tba_jax.roles import results as best_step
from tba_jax.roles.results import Scores


def test_the_latest_of_the_highest_finite_scores_is_best_and_what_has_changed_is_read_again(tmp_path, monkeypatch):
    def report(step: int, score: object) -> None:
        (tmp_path / f"{step:08d}.json").write_text(json.dumps({"step": step, "greedy_reward": score, "samples": {"greedy": []}}))

    for step, score in ((0, 0.25), (10, 0.75), (20, 0.5), (30, 0.75), (40, None), (50, "0.9"), (60, True)):
        report(step, score)
    (tmp_path / "00000070.json").write_text('{"greedy_reward": 1.0')
    (tmp_path / "00000080.json").write_text("[1.0]")
    scores, read = Scores(tmp_path), []
    monkeypatch.setattr(best_step, "_score", lambda file, found=best_step._score: (read.append(file.stem), found(file))[1])
    assert scores.best() == (30, 0.75) == scores.best() and len(read) == 9
    report(30, 0.125)
    assert scores.best() == (10, 0.75) and read[9:] == ["00000030"]
    (tmp_path / "00000010.json").unlink()
    assert scores() == {0: 0.25, 20: 0.5, 30: 0.125} and len(read) == 10
    assert Scores(tmp_path / "none").best() is None
