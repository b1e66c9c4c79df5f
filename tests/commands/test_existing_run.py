"""Commands that open a run: readers execute nothing, what needs its task asks for trust, and --step names a snapshot."""

import functools
import json
import logging
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest

from tba_jax import main
from tba_jax.commands import append, audit, command_line, evaluate, export, rescore, show
from tba_jax.experiment import jobs
from tba_jax.run import processes
from tba_jax.storage import layout, places, snapshots
from tba_jax.text.visible import visible
from tests.support import frozen_runs, task_files, tiny_run
from tests.support.summaries import write_rows

pytestmark = pytest.mark.usefixtures("one_device_throughout")


class Given(NamedTuple):
    """file: the task that config.json names; mark: is there once it was executed; own: the same task in a file of the user."""

    root: Path
    file: Path
    mark: Path
    own: Path

    def call(self, command, *flags: str) -> int:
        return command_line.execute(command, [f"--workdir={self.root}", *flags])


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("existing")
    c = tiny_run.config(task__name=f"{task_files.write(folder / 'theirs')}:Ones", learner__steps=2, schedule__mode="interleaved")
    c.task.custom.count = 40
    assert jobs.everything(tiny_run.settings(folder / "run", c))() == 0
    return folder


@pytest.fixture
def given(finished, tmp_path) -> Given:
    """A copy of the run."""
    file = finished / "theirs" / "my_task.py"
    mark = task_files.trap(file)
    mark.unlink(missing_ok=True)
    shutil.copytree(finished / "run", tmp_path / "run")
    return Given(tmp_path / "run", file, mark, task_files.write(tmp_path / "mine"))


def test_readers_execute_nothing_and_print_no_control_character(given, tmp_path, capsys):
    (writer,) = (path.stem for path in (given.root / "replay" / "writers").glob("*.json"))
    (given.root / "replay" / "writers" / "a\x1b[2J\nthe ledger balances.json").write_text("{}")
    before = frozen_runs.contents(given.root)
    readers = [(show, ["--count=40"]), (audit, []), (audit, ["--step=2"]), (audit, [f"--regenerate={writer}:3"])]
    told = []
    for command, flags in [*readers, (export, [f"--output={tmp_path / 'exported'}"])]:
        assert given.call(command, *flags) == 0
        told.append(capsys.readouterr().out)
    assert not given.mark.exists() and frozen_runs.contents(given.root) == before
    assert r"\x1b" in told[0] and r"\x9b" in told[0] and r"\u202e" in told[0]
    assert all(visible(text) == text for text in told)
    assert r"a\x1b[2J\x0athe ledger balances.json is ignored" in told[1]
    assert "is identical" in told[3] and (tmp_path / "exported" / "model.safetensors").exists()


def refusal(given, capsys, command, *flags: str) -> str:
    before = frozen_runs.contents(given.root)
    with pytest.raises(SystemExit) as ended:
        given.call(command, *flags)
    said = capsys.readouterr()
    assert ended.value.code == processes.BAD_INPUT and not said.out and said.err.count("\n") == 1, said.err
    assert frozen_runs.contents(given.root) == before
    return said.err


def test_what_needs_the_task_asks_for_trust(given, tmp_path, capsys):
    responses = write_rows(tmp_path / "given.jsonl", [{"prompt": "001000", "response": "11"}])
    needing = [(evaluate, []), (rescore, []), (append, [f"--responses={responses}"])]
    joining = [(main, [f"--role={role}"]) for role in (*main.ROLES, "all")] + [(main, ["--dry_run"])]
    for command, flags in needing + joining:
        said = refusal(given, capsys, command, *flags)
        assert str(given.file) in said and "--config=RECIPE" in said and "--trust_task" in said
    assert not given.mark.exists()
    flags = [f"--config={given.own}", "--config.task.response_length=5", "--config.task.custom.count=39"]
    for command in (evaluate, rescore):
        said = refusal(given, capsys, command, *flags)
        assert "response_length: 6 there, 5 here" in said and "task.custom.count: 40 there, 39 here" in said
    output = tmp_path / "report.json"
    more = {evaluate: [f"--output={output}", "--config.evaluation.samples=8"]}
    for command, flags in needing:  # one's own recipe: their file is not executed
        assert given.call(command, *flags, f"--config={given.own}", *more.get(command, [])) == 0
        told = capsys.readouterr().out
        assert visible(told) == told
    assert not given.mark.exists()
    told = output.read_text()
    samples = [sample["response"] for kind in json.loads(told)["samples"].values() for sample in kind]
    assert visible(told) == told and set("".join(samples)) & {"\x9b", "\u202e"}, "the values are the texts themselves"
    assert given.call(rescore, "--trust_task") == 0 and given.mark.exists()


@pytest.mark.parametrize("flag", ["--init_from={root}@2", "--config.replay.mount=('{root}',)"], ids=["init_from", "mount"])
def test_another_runs_task_is_not_executed(given, flag, tmp_path, capsys):
    arguments = [f"--config={given.own}", f"--workdir={tmp_path / 'second'}", flag.format(root=given.root)]
    assert command_line.execute(main, [*arguments, "--dry_run"]) == 0
    assert command_line.execute(main, [*arguments, "--role=reference"]) == 0
    assert not given.mark.exists() and (tmp_path / "second" / "reference" / "initial.json").exists()


def test_a_damaged_config_is_one_sentence(given, capsys):
    stored = layout.read_json(given.root / "config.json")
    damaged = {
        "setting seed": stored | {"config": {name: value for name, value in stored["config"].items() if name != "seed"}},
        "is damaged": stored | {"config": stored["config"] | {"seed": "many"}},
        "the contract in its config.json": stored | {"contract": stored["contract"] | {"more": 1}},
        "tokenizer: 'another' there": stored | {"contract": stored["contract"] | {"tokenizer": "another"}},
    }
    for words, content in damaged.items():
        layout.write_json(given.root / "config.json", content)
        assert words in refusal(given, capsys, show)


@pytest.fixture
def run(tmp_path) -> layout.RunDir:
    """A run whose snapshots are in an object store; its reports are in the workdir."""
    made = layout.RunDir(tmp_path, places.place(f"memory://{tmp_path.name}/shared"))
    made.evaluations.mkdir()
    return made


OF = "step {} has the best held-out score, {:.3f}, of {} evaluated snapshots of RUN"


@pytest.mark.parametrize(
    ("steps", "scores", "default", "best", "told"),
    [
        (
            (0, 10, 20, 30),
            {0: 0.25, 10: 0.75, 20: 0.5},
            10,
            10,
            OF.format(10, 0.75, 3) + "; the newest is of step 30 (--step=last)",
        ),
        ((0, 10, 30), {10: 0.75, 30: 0.75}, 30, 30, OF.format(30, 0.75, 2)),
        ((0, 20), {0: 0.25, 10: 0.75, 20: 0.5}, 20, 20, OF.format(20, 0.5, 2) + "; step 10 had 0.750, and its snapshot is gone"),
        ((0, 20), {0: 0.5, 20: 0.25}, 0, 0, OF.format(0, 0.5, 2) + "; the newest is of step 20 (--step=last)"),
        (
            (0, 20),
            {0: 0.5},
            20,
            0,
            "no snapshot but that of step 0 of RUN has a held-out score in {folder}: the newest, of step 20, is",
        ),
        (
            (0, 20),
            {0: None, 10: 0.9},
            20,
            None,
            "no snapshot of RUN has a held-out score in {folder}: the newest, of step 20, is taken",
        ),
    ],
)
def test_the_default_is_the_best_step_or_else_the_newest_and_is_told(run, caplog, steps, scores, default, best, told):
    caplog.set_level(logging.INFO)
    for step in steps:
        places.make_folder(run.policies / layout.step_name(step), below=2)
        layout.write_json(run.policies / layout.step_name(step) / snapshots.COMMIT, {})
    for step, reward in scores.items():
        layout.write_json(run.evaluations / f"{layout.step_name(step)}.json", {"step": step, "greedy_reward": reward})
    choose = functools.partial(command_line.chosen_step, run, called="RUN")
    assert choose(None) == default and caplog.messages[0].startswith(told.format(folder=run.evaluations))
    assert choose("last") == steps[-1] and choose(steps[1]) == steps[1]
    if best is None:
        with pytest.raises(ValueError, match=r"^--step=best: no snapshot of RUN .*; --step=last takes the newest, of step 20$"):
            choose("best")
    else:
        assert choose("best") == best
    with pytest.raises(
        ValueError, match=f"^--step=57 is not a snapshot of RUN: the nearest snapshot is of step {steps[-1]}; there"
    ):
        choose(57)


@pytest.mark.parametrize("value", ["foo", "-1", "", "٣"])
def test_what_is_no_step_is_one_sentence(value, tmp_path: Path, capsys):
    with pytest.raises(SystemExit, match=str(processes.BAD_INPUT)):
        command_line.execute(export, [f"--workdir={tmp_path}", f"--output={tmp_path / 'out'}", f"--step={value}"])
    assert capsys.readouterr().err.startswith(
        f"error: --step={value}: it is best (by held-out score), last (the newest snapshot)"
    )
