"""Evaluation of a snapshot by one command: the figures of the run's own evaluator, other settings, and what is refused."""

import json

import numpy as np
import pytest

from tba_jax.commands import command_line, evaluate, existing_run
from tba_jax.experiment import jobs
from tba_jax.replay.reader import LogReader
from tba_jax.run import processes
from tba_jax.storage import contract, layout
from tba_jax.telemetry import metrics
from tests.support import tiny_run

pytestmark = pytest.mark.usefixtures("one_device_throughout")

# What depends on when and for how long, and not on the snapshot.
_OF_THE_CLOCK = ("time", "seconds")


@pytest.fixture(scope="module")
def run(tmp_path_factory, one_device_throughout) -> layout.RunDir:
    """A run of two steps with two evaluations, which samples from int8 weights."""
    settings = {"schedule__mode": "interleaved", "task__missing_eos_reward": -1.0, "evaluation__every_steps": 2}
    int8 = {"searchers__weights": "int8", "learner__logprob_gap_every_steps": 2}
    c = tiny_run.config(learner__steps=2, **settings, **int8)
    s = tiny_run.settings(tmp_path_factory.mktemp("evaluate") / "run", c)
    assert jobs.everything(s)() == 0
    return s.run


def test_the_report_is_that_of_the_runs_evaluator(run, tmp_path, capsys):
    path = run.evaluations / f"{layout.step_name(2)}.json"
    before, output = path.read_bytes(), tmp_path / "report.json"
    command_line.execute(evaluate, [f"--workdir={run.root}", "--step=2", f"--output={output}"])
    found, theirs = json.loads(output.read_text()), json.loads(before)
    figure = f"{theirs['score_name']} {theirs['greedy_reward']:.3f} ± {theirs['greedy_reward_stderr']:.3f} of greedy responses"
    said = capsys.readouterr().out
    assert said == f"step 2: {figure} to {theirs['queries']} held-out queries; the report is in {output}\n"
    assert found.keys() == theirs.keys() and "greedy_win_rate_strict" not in found
    for name in theirs.keys() - {*_OF_THE_CLOCK, "samples", "score_name"}:
        assert found[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-5), name
    assert path.read_bytes() == before, "the run's own report stays"


def test_other_settings(run):
    settings = existing_run.Source(overrides=("--config.evaluation.queries=3",))
    assert evaluate.evaluate(run.root, step=0, settings=settings)["queries"] == 3


@pytest.mark.parametrize(
    "flags, sentence",
    [
        (["--step=1000"], "--step=1000 is not a snapshot of"),
        (["--config.task.response_length=5"], "task.response_length: 6 there, 5 here"),
        (["--config.task.name=tldr"], "is a run of task.name='arithmetic', and --config.task.name asks for task.name='tldr'"),
        (["--config.evaluation.queries=-1"], "evaluation.queries=-1 must be at least 0"),
        (["--output={run}/config.json"], "is in the run's folder"),
        (["--workdir={run}/none"], "holds no run"),
    ],
)
def test_mistakes_are_one_sentence(run, flags, sentence, capsys):
    with pytest.raises(SystemExit) as ended:
        command_line.execute(evaluate, [f"--workdir={run.root}", *(flag.format(run=run.root) for flag in flags)])
    told = capsys.readouterr().err.strip().splitlines()[-1]
    assert ended.value.code == processes.BAD_INPUT and told.startswith("error: ") and sentence in told


def test_a_report_that_cannot_be_written_is_printed(run, tmp_path, monkeypatch, capsys):
    output = tmp_path / "folder" / "report.json"
    output.parent.mkdir()

    def report_and_lose_the_folder(*_, **__):
        output.parent.rmdir()
        return {"step": 3}

    monkeypatch.setattr(evaluate, "evaluate", report_and_lose_the_folder)
    with pytest.raises(SystemExit):
        command_line.execute(evaluate, [f"--workdir={run.root}", f"--output={output}"])
    said = capsys.readouterr()
    assert json.loads(said.out) == {"step": 3} and f"--output={output} cannot be written: No such file" in said.err


def test_searchers_sample_from_int8_weights(run):
    """The rows come from a policy that is a little off, and the trainer compares them with that policy."""
    gaps = [line["logprob_gap_max"] for line in metrics.each_line(run.metrics("trainer")) if "logprob_gap_max" in line]
    assert gaps and max(gaps) < 1e-4
    reader = LogReader(run.replay, contract.Contract(**contract.read(run)["contract"]).row_shape())
    ((writer, head),) = reader.heads().items()
    rows = reader.read(writer, 0, head)
    first = rows["policy_step"][:, 0] == 0  # step 0 is the reference, which is never rounded
    assert 1e-6 < np.abs(rows["ref_logprobs"] - rows["policy_logprobs"])[first].max() < 0.05
