"""Evaluation of a snapshot by one command: the figures of the run's own evaluator, other settings, and what is refused."""

import json

import pytest

from tba_jax.commands import command_line, evaluate
from tba_jax.storage import layout
from tests.commands.test_command_line import refusal

pytestmark = pytest.mark.usefixtures("one_device_throughout")


def test_the_report_is_that_of_the_runs_evaluator(finished, tmp_path, capsys):
    run = finished.run
    path = run.evaluations / f"{layout.step_name(6)}.json"
    before, output = path.read_bytes(), tmp_path / "report.json"
    command_line.execute(evaluate, [f"--workdir={run.root}", "--step=6", f"--output={output}"])
    found, theirs = json.loads(output.read_text()), json.loads(before)
    figure = f"{theirs['score_name']} {theirs['greedy_reward']:.3f} ± {theirs['greedy_reward_stderr']:.3f} of greedy responses"
    said = capsys.readouterr().out
    assert said == f"step 6: {figure} to {theirs['queries']} held-out queries; the report is in {output}\n"
    assert found.keys() == theirs.keys() and "greedy_win_rate_strict" not in found
    for name in theirs.keys() - {"time", "seconds", "samples", "score_name"}:
        assert found[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-5), name
    assert path.read_bytes() == before, "the run's own report stays"
    settings = command_line.Source(overrides=("--config.evaluation.queries=3",))
    assert evaluate.evaluate(run.root, step=0, settings=settings)["queries"] == 3


@pytest.mark.parametrize(
    "flags, sentence",
    [
        (["--step=٣"], "--step=٣: it is best (by held-out score), last (the newest snapshot)"),
        (["--config.task.name=tldr"], "is a run of task.name='arithmetic', and --config.task.name asks for task.name='tldr'"),
        (["--output={run}/config.json"], "is in the run's folder"),
        (["--workdir={run}/none"], "holds no run"),
    ],
)
def test_mistakes_are_one_sentence(finished, flags, sentence, capsys):
    run = finished.run
    assert sentence in refusal(capsys, evaluate, f"--workdir={run.root}", *(flag.format(run=run.root) for flag in flags))
