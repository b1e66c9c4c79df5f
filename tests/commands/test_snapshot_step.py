"""The snapshot that --step names: best, last or a number; what is taken without it, and what is refused."""

import logging
from pathlib import Path

import pytest

from tba_jax.commands import command_line, existing_run, export
from tba_jax.run import processes
from tba_jax.storage import layout, places, snapshots

SCORES = {0: 0.25, 10: 0.75, 20: 0.5}


@pytest.fixture(params=["folder", "memory"])
def run(request, tmp_path) -> layout.RunDir:
    """A run whose snapshots are here or in an object store; its reports are in the workdir."""
    shared = places.place("memory://store/shared") if request.param == "memory" else None
    made = layout.RunDir(tmp_path, shared)
    made.evaluations.mkdir()
    return made


def publish(run: layout.RunDir, *steps: int) -> None:
    for step in steps:
        places.make_folder(run.policies / layout.step_name(step), below=2)
        layout.write_json(run.policies / layout.step_name(step) / snapshots.COMMIT, {})


def score(run: layout.RunDir, step: int, reward: float | None) -> None:
    layout.write_json(run.evaluations / f"{layout.step_name(step)}.json", {"step": step, "greedy_reward": reward})


def chosen(run: layout.RunDir, asked: existing_run.AskedStep) -> int:
    return existing_run.chosen_step(run, asked, called="RUN")


def test_the_best_step_is_the_default_and_is_told(run, caplog):
    caplog.set_level(logging.INFO)
    publish(run, 0, 10, 20, 30)
    for step, reward in SCORES.items():
        score(run, step, reward)
    assert chosen(run, None) == chosen(run, "best") == 10 and chosen(run, "last") == 30 and chosen(run, 20) == 20
    assert caplog.messages[0] == (
        "step 10 has the best held-out score, 0.750, of 3 evaluated snapshots of RUN; the newest is of step 30 (--step=last)"
    )
    score(run, 30, 0.74)
    assert chosen(run, None) == 10, "the evaluator came later"
    score(run, 30, 0.75)
    assert chosen(run, None) == 30, "the latest of equal scores"
    assert caplog.messages[-1].endswith("of 4 evaluated snapshots of RUN")


def test_a_better_step_without_a_snapshot_is_told(run, caplog):
    caplog.set_level(logging.INFO)
    publish(run, 0, 20)
    for step, reward in SCORES.items():
        score(run, step, reward)
    assert chosen(run, None) == 20
    assert caplog.messages[-1].endswith("; step 10 had 0.750, and its snapshot is gone")


@pytest.mark.parametrize("scores", [{}, {0: None, 20: None}, {10: 0.9}], ids=["none", "not finite", "of a snapshot that is gone"])
def test_without_scores_the_newest_is_taken_unless_the_best_is_asked_for(run, scores, caplog):
    publish(run, 0, 20)
    for step, reward in scores.items():
        score(run, step, reward)
    assert chosen(run, None) == 20
    (told,) = caplog.messages
    assert f"no snapshot of RUN has a held-out score in {run.evaluations}: the newest, of step 20, is taken" == told
    with pytest.raises(ValueError, match=r"^--step=best: no snapshot of RUN .*; --step=last takes the newest, of step 20$"):
        chosen(run, "best")


def test_the_untrained_policy_is_no_default(run, caplog):
    """The evaluator has only begun, or all its later scores are lost."""
    publish(run, 0, 20)
    score(run, 0, 0.5)
    assert chosen(run, None) == 20 and "no snapshot but that of step 0 of RUN has a held-out score" in caplog.text
    assert chosen(run, "best") == 0
    score(run, 20, 0.25)
    assert chosen(run, None) == 0, "training has made it worse"


def test_a_step_that_is_gone_is_refused_with_its_neighbours(run):
    publish(run, *range(0, 120, 10))
    for asked, told in ((7, "steps that are kept are 0 and 10"), (500, "step that is kept is 110")):
        with pytest.raises(ValueError) as refused:
            chosen(run, asked)
        assert str(refused.value) == (
            f"--step={asked} is not a snapshot of RUN; the nearest {told}; there are 0, 10, 20, 30, …, 110"
        )


def test_a_run_without_snapshots_is_refused(run):
    score(run, 10, 0.5)
    for asked in (None, "best", "last", 10):
        with pytest.raises(ValueError, match="holds no snapshot yet"):
            chosen(run, asked)


@pytest.mark.parametrize("value", ["foo", "-1", "1.5", "BEST", "", " ", "٣"])
def test_what_is_no_step_is_one_sentence(value, tmp_path: Path, capsys):
    with pytest.raises(SystemExit) as ended:
        command_line.execute(export, [f"--workdir={tmp_path}", f"--output={tmp_path / 'out'}", f"--step={value}"])
    told = capsys.readouterr().err
    assert ended.value.code == processes.BAD_INPUT and told.count("\n") == 1
    assert told.startswith(f"error: --step={value}: it is best (by held-out score), last (the newest snapshot) or the number")
