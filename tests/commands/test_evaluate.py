"""Evaluation of a snapshot by one command: the figures of the run's own evaluator, other settings, and what is refused."""

import json

import jax
import numpy as np
import pytest

from tba_jax.commands import command_line, evaluate, existing_run, rescore
from tba_jax.experiment import jobs
from tba_jax.replay.reader import LogReader
from tba_jax.run import processes
from tba_jax.storage import best_step, contract, layout
from tba_jax.tasks.interface import Scores
from tba_jax.tasks.tldr import TLDR
from tests.support import random_checkpoints, tiny_run
from tests.support.summaries import ROWS, write_rows

pytestmark = pytest.mark.usefixtures("one_device")

# What depends on when and for how long, and not on the snapshot.
_OF_THE_CLOCK = ("time", "seconds")


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> layout.RunDir:
    """A run of two steps on summaries, on two devices, the second of which is the reward model's."""
    folder = tmp_path_factory.mktemp("evaluate")
    tokens = random_checkpoints.byte_tokenizer(folder / "tokens")
    for seed, (name, labels) in enumerate([("policy", 0), ("reward", 1), ("gold", 1)]):
        random_checkpoints.write(folder / name, "pythia-410m", tokens, labels=labels, seed=seed)
    write_rows(folder / "rows.jsonl", ROWS)
    c = tiny_run.config(
        task__name="tldr",
        task__prompt_length=96,
        task__tldr__train_path=str(folder / "rows.jsonl"),
        task__tldr__heldout_path=str(folder / "rows.jsonl"),
        task__tldr__reward_path=str(folder / "reward"),
        task__tldr__compute_dtype="float32",
        model__path=str(folder / "policy"),
        searchers__task_devices=1,
        evaluation__task_devices=1,
        learner__steps=2,
        schedule__mode="interleaved",
    )
    with pytest.MonkeyPatch.context() as patch:
        first = jax.local_devices()[:2]  # jax.devices is that of one device here
        patch.setattr(jax, "devices", lambda *_: first)
        s = tiny_run.settings(folder / "run", c)
        assert jobs.everything(s)() == 0
    return s.run


ON_ONE_DEVICE = ("--config.evaluation.task_devices=0", "--config.searchers.task_devices=0")


def test_the_report_is_that_of_the_runs_evaluator(run):
    path = run.evaluations / f"{layout.step_name(2)}.json"
    before = path.read_bytes()
    found = evaluate.evaluate(run.root, step=2, settings=existing_run.Source(overrides=ON_ONE_DEVICE))
    theirs = json.loads(before)
    assert found.keys() == theirs.keys() and "greedy_win_rate_strict" not in found
    assert found["score_name"] == theirs["score_name"] == "reward"
    for name in theirs.keys() - {*_OF_THE_CLOCK, "samples", "score_name"}:
        assert found[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-5), name
    assert path.read_bytes() == before, "the run's own report stays"


def test_other_settings_and_a_gold_model(run, capsys, tmp_path):
    gold = f"--config.task.tldr.gold_path={run.root.parent / 'gold'}"
    flags = [gold, "--config.evaluation.queries=3", *ON_ONE_DEVICE]
    output = tmp_path / "report.json"
    command_line.execute(evaluate, [f"--workdir={run.root}", f"--output={output}", *flags])
    said, written = capsys.readouterr().out, json.loads(output.read_text())
    figure = (
        f"reward {written['greedy_reward']:.3f} ± {written['greedy_reward_stderr']:.3f} of greedy responses to 3 held-out queries"
    )
    assert said == f"step {written['step']}: {figure}; the report is in {output}\n", "the samples fill a terminal"
    command_line.execute(evaluate, [f"--workdir={run.root}", *flags])
    printed = json.loads(capsys.readouterr().out)
    assert printed.keys() == written.keys() and printed["greedy_reward"] == pytest.approx(written["greedy_reward"])
    best = best_step.Scores(run.evaluations).best()
    assert best is not None and printed["step"] == best.step and printed["queries"] == 3
    for name in ("greedy_win_rate_strict", "greedy_win_rate_ties_half", "sampled_win_rate_strict", "sampled_win_rate_ties_half"):
        assert 0 <= printed[name] <= 1 and 0 <= printed[f"{name}_stderr"] <= 0.5


@pytest.mark.parametrize(
    "flags, sentence",
    [
        (["--step=1000"], "--step=1000 is not a snapshot of"),
        (["--step=foo"], "--step=foo: it is best (by held-out score), last (the newest snapshot) or the number"),
        (["--config.task.response_length=5"], "is a run of another contract; task.response_length: 6 there, 5 here"),
        (
            ["--config.task.name=arithmetic"],
            "is a run of task.name='tldr', and --config.task.name asks for task.name='arithmetic'",
        ),
        (["--config.evaluation.queries=-1"], "evaluation.queries=-1 must be at least 0"),
        (["--config.task.tldr.gold_path=nowhere"], "task.tldr.gold_path='nowhere': model folder nowhere does not exist"),
    ],
)
def test_mistakes_are_one_sentence(run, flags, sentence, capsys):
    with pytest.raises(SystemExit) as ended:
        command_line.execute(evaluate, [f"--workdir={run.root}", *ON_ONE_DEVICE, *flags])
    told = capsys.readouterr().err.strip().splitlines()[-1]
    assert ended.value.code == processes.BAD_INPUT and told.startswith("error: ") and sentence in told


def test_a_report_is_not_written_into_the_run(run, tmp_path, capsys):
    for workdir, output, sentence in (
        (run.root, run.root / "config.json", f"is in the run's folder {run.root}"),
        (run.root, tmp_path / "none" / "report.json", "there is no folder"),
        (tmp_path / "none", tmp_path / "report.json", "holds no run"),
    ):
        with pytest.raises(SystemExit) as ended:
            command_line.execute(evaluate, [f"--workdir={workdir}", f"--output={output}"])
        assert ended.value.code == processes.BAD_INPUT and sentence in capsys.readouterr().err


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


def test_rows_are_scored_again_with_the_models_of_the_task(run, monkeypatch):
    """Twice the score is a new version of the reward."""
    rewards = TLDR.rewards

    def doubled(task, queries, responses, finished):
        scores = rewards(task, queries, responses, finished)
        return Scores(2 * scores.reward, scores.parts)

    monkeypatch.setattr(TLDR, "rewards", doubled)
    monkeypatch.setattr(TLDR, "reward_version", 2)
    told = rescore.rescore(run.root)
    shape = contract.Contract(**contract.read(run)["contract"]).row_shape()
    old, new = (LogReader(folder, shape) for folder in (run.replay, run.rescored(2)))
    ((writer, head),) = old.heads().items()
    assert f"{head} rows of 1 writers have reward version 2" in told
    before, after = (reader.read(writer, 0, head) for reader in (old, new))
    np.testing.assert_allclose(after["reward_parts"], before["reward_parts"], atol=1e-5)
    np.testing.assert_allclose(after["reward"], 2 * before["reward"], atol=1e-5)
    assert len(np.unique(before["reward"])) > head // 2
