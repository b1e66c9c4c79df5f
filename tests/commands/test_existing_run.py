"""Commands that open a run: what reads it executes nothing, what needs its task asks for trust or for the user's own recipe, and
--step names a snapshot: best, last or a number."""

import json
import logging
import re
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest

from tba_jax import main
from tba_jax.commands import append, audit, command_line, evaluate, existing_run, export, rescore, show
from tba_jax.experiment import jobs, stored_run
from tba_jax.run import processes
from tba_jax.storage import layout, places, snapshots
from tba_jax.text.visible import visible
from tests.support import frozen_runs, task_files, tiny_run
from tests.support.summaries import write_rows

pytestmark = pytest.mark.usefixtures("one_device_throughout")


class Given(NamedTuple):
    """root: of the run; file: the task that its config.json names; mark: is there once that file was executed; own: the same
    task in a file of one's own."""

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
    before = frozen_runs.contents(given.root)
    readers = [(show, ["--count=40"]), (audit, []), (audit, ["--step=2"]), (audit, [f"--regenerate={writer}:3"])]
    told = []
    for command, flags in [*readers, (export, [f"--output={tmp_path / 'exported'}"])]:
        assert given.call(command, *flags) == 0
        told.append(capsys.readouterr().out)
    assert not given.mark.exists() and frozen_runs.contents(given.root) == before
    assert r"\x1b" in told[0] and r"\x9b" in told[0] and r"\u202e" in told[0]
    assert all(visible(text) == text for text in told)
    assert "is identical" in told[3] and (tmp_path / "exported" / "model.safetensors").exists()


def test_names_that_a_workdir_gives_are_printed_in_one_line(given, capsys):
    (given.root / "replay" / "writers" / "a\x1b[2J\nthe ledger balances.json").write_text("{}")
    assert given.call(audit) == 0
    told = capsys.readouterr().out
    assert visible(told) == told and r"a\x1b[2J\x0athe ledger balances.json is ignored" in told
    assert given.call(audit, "--step=1") == 0 and given.call(show) == 0


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


def test_ones_own_recipe_is_compared_with_the_run(given, capsys):
    flags = [f"--config={given.own}", "--config.task.response_length=5", "--config.task.custom.count=39"]
    for command in (evaluate, rescore):
        said = refusal(given, capsys, command, *flags)
        assert "response_length: 6 there, 5 here" in said and "task.custom.count: 40 there, 39 here" in said


def test_another_task_than_the_runs_is_named(given, capsys):
    """Not the settings of its own that the run's task has, which the other one does not take."""
    for command in (evaluate, rescore, main):
        said = refusal(given, capsys, command, "--config.task.name=arithmetic")
        assert f"is a run of task.name='{given.file}:Ones', and --config.task.name asks for task.name='arithmetic'" in said
    assert not given.mark.exists()


def test_errors_and_the_log_show_control_characters(given, tmp_path, capsys):
    responses = write_rows(tmp_path / "given.jsonl", [{"prompt": "1\x1b]0;x\x07\u202e\x9b", "response": "11"}])
    said = refusal(given, capsys, append, f"--config={given.own}", f"--responses={responses}")
    assert visible(said) == said and "is none of the 40 train queries" in said
    command_line.log_to_stderr()
    stored_run.log.warning("a line that quotes %s", "\x1b[31m\x9b\u2028")
    assert r"quotes \x1b[31m\x9b\u2028" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--init_from={root}@2", "--config.replay.mount=('{root}',)"], ids=["init_from", "mount"])
def test_another_runs_task_is_not_executed(given, flag, tmp_path, capsys):
    arguments = [f"--config={given.own}", f"--workdir={tmp_path / 'second'}", flag.format(root=given.root)]
    assert command_line.execute(main, [*arguments, "--dry_run"]) == 0
    assert command_line.execute(main, [*arguments, "--role=reference"]) == 0
    assert not given.mark.exists() and (tmp_path / "second" / "reference" / "initial.json").exists()


def test_a_run_goes_on_by_its_folder_alone(given, capsys):
    assert given.call(main, "--trust_task", "--dry_run=full", "--config.searchers.slots=8") == 0
    shown = re.search(r"config:\n(\{.*?\n\})", capsys.readouterr().out, re.DOTALL)
    assert json.loads(shown[1])["learner"]["steps"] == 2 and json.loads(shown[1])["searchers"]["slots"] == 8
    extended = ["--config.learner.steps=3", "--allow_change=learner.steps"]
    assert "--allow_change=learner.steps" in refusal(given, capsys, main, "--trust_task", extended[0])
    assert given.call(main, "--trust_task", *extended) == 0
    assert layout.read_json(given.root / "finished.json")["step"] == 3
    assert layout.read_json(given.root / "config.json")["config"]["learner"]["steps"] == 3


def test_who_joins_by_folder_takes_the_schedule_of_the_run(given, tmp_path, capsys):
    for role in ("searcher", "reference"):
        flags = ["--trust_task", f"--role={role}"]
        said = refusal(given, capsys, main, *flags, "--config.learner.steps=9")
        assert f"--role={role} takes the schedule of the run" in said and "learner.steps: 2 there, 9 here" in said
        assert given.call(main, *flags, "--config.learner.steps=2", "--config.replay.poll_seconds=0.1") == 0
        capsys.readouterr()
    nowhere = given._replace(root=tmp_path / "nowhere")
    for role in main.ROLES:
        assert "holds no run yet: --config=RECIPE" in refusal(nowhere, capsys, main, f"--role={role}")
    assert not nowhere.root.exists()


def test_a_machine_with_a_folder_of_its_own_joins_by_the_shared_one(given, tmp_path, capsys):
    local = given._replace(root=tmp_path / "local")
    shared = [f"--shared={given.root}", "--role=searcher"]
    assert str(given.file) in refusal(local, capsys, main, *shared) and not local.root.exists()
    assert local.call(main, *shared, "--trust_task") == 0
    assert layout.read_json(local.root / "shared.json") == {"shared": str(given.root)}
    assert local.call(main, "--role=searcher", "--trust_task") == 0, "the folder remembers where its roles meet"


def test_a_searcher_leaves_a_finished_run_whatever_its_flags_say(given, capsys):
    before = frozen_runs.contents(given.root / "replay")
    assert given.call(main, f"--config={given.own}", "--role=searcher", "--config.learner.steps=1000") == 0
    assert "has finished its 2 steps" in capsys.readouterr().err and not given.mark.exists()
    assert frozen_runs.contents(given.root / "replay") == before


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


SCORES = {0: 0.25, 10: 0.75, 20: 0.5}


@pytest.fixture
def run(tmp_path) -> layout.RunDir:
    """A run whose snapshots are in an object store; its reports are in the workdir."""
    made = layout.RunDir(tmp_path, places.place(f"memory://{tmp_path.name}/shared"))
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


def test_a_step_that_is_gone_is_refused_with_those_that_are_kept(run):
    with pytest.raises(ValueError, match="holds no snapshot yet"):
        chosen(run, None)
    publish(run, *range(0, 120, 10))
    with pytest.raises(ValueError) as refused:
        chosen(run, 57)
    told = "--step=57 is not a snapshot of RUN: the nearest snapshot is of step 60; there are 0, 10, 20, 30, …, 110"
    assert str(refused.value) == told


@pytest.mark.parametrize("value", ["foo", "-1", "", "٣"])
def test_what_is_no_step_is_one_sentence(value, tmp_path: Path, capsys):
    with pytest.raises(SystemExit) as ended:
        command_line.execute(export, [f"--workdir={tmp_path}", f"--output={tmp_path / 'out'}", f"--step={value}"])
    told = capsys.readouterr().err
    assert ended.value.code == processes.BAD_INPUT and told.count("\n") == 1
    assert told.startswith(f"error: --step={value}: it is best (by held-out score), last (the newest snapshot) or the number")
