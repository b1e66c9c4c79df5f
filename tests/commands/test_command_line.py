"""How a command ends and opens a run: exits, trust in its task, and the snapshot that --step names."""

import errno
import functools
import json
import logging
import os
import re
import shutil
import sys
import types
from pathlib import Path
from typing import NamedTuple

import pytest

from tba_jax import main
from tba_jax.commands import append, audit, command_line, estimate, evaluate, export, report, rescore, show, supervised
from tba_jax.experiment import jobs
from tba_jax.outputs import visible
from tba_jax.run import processes
from tba_jax.storage import layout, places, published, snapshots
from tba_jax.storage.lease import LeaseHeld
from tests.support import frozen_runs, task_files, tiny_run, tiny_snapshots
from tests.support.summaries import write_rows
from tests.support.tiny_log import objects

pytestmark = pytest.mark.usefixtures("one_device_throughout")


@pytest.mark.parametrize(
    "error, code, words",
    [
        (OSError(errno.ENOSPC, "No space left on device"), processes.STORAGE_FAILED, "storage failed; what was committed"),
        (OSError(errno.EROFS, "Read-only file system"), processes.STORAGE_FORBIDS, "Read-only file system"),
        (processes.BadInput("slots=3\ncannot be \x1b[2J"), processes.BAD_INPUT, r"error: slots=3 cannot be \x1b[2J"),
        (ModuleNotFoundError("No module named 'nosuch'", name="nosuch.part"), processes.BAD_INPUT, "the package 'nosuch' is not"),
        (FloatingPointError("step 3: loss nan"), processes.NOT_FINITE, "error: step 3: loss nan"),
        (RuntimeError("of another kind\nin two lines"), 1, "error: RuntimeError: of another kind in two lines"),
    ],
)
def test_failures_end_by_code_and_sentence(error, code, words, capsys, monkeypatch):
    monkeypatch.setattr(os, "_exit", sys.exit)  # which storage that failed is left by, without waiting for any thread
    with pytest.raises(SystemExit) as ended, command_line.failures():
        raise error
    told = capsys.readouterr().err.strip().splitlines()
    assert ended.value.code == code and words in told[-1]
    assert len(told) == 1 or code == 1, "only what nobody foresaw shows a traceback"


def test_ctrl_c_before_a_command_asks_for_signals_is_no_failure(capsys):
    """Also while a library is imported: a module written in C turns it into an error of its own."""
    with pytest.raises(SystemExit) as ended, command_line.failures():
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt as interrupt:
            raise ImportError("initialization failed") from interrupt
    assert ended.value.code == processes.STOPPED and capsys.readouterr().err == "stopped\n"


@pytest.mark.parametrize("error", [ValueError("steps=0\nmust be positive"), LeaseHeld("steps=0 must be positive")], ids=repr)
def test_a_users_mistake_is_one_sentence_and_a_full_disk_is_none(error, capsys):
    with pytest.raises(SystemExit, match=str(processes.BAD_INPUT)), command_line.mistakes():
        raise error
    assert capsys.readouterr().err == "error: steps=0 must be positive\n"
    with pytest.raises(ValueError), command_line.mistakes():
        raise ValueError("cannot be read") from OSError(errno.ENOSPC, "No space left on device")


def test_what_a_job_raises_is_no_mistake_of_the_user(capsys):
    def job() -> int:
        raise ValueError("shapes (3,) and (4,)")

    command = types.SimpleNamespace(__name__="tba_jax.commands.given", add_flags=lambda values: None, run=lambda given: job)
    with pytest.raises(SystemExit) as ended:
        command_line.execute(command, [])
    assert ended.value.code == 1 and "Traceback" in capsys.readouterr().err


COMMANDS = (append, audit, estimate, evaluate, export, main, report, rescore, show, supervised)


def refusal(capsys, module, *arguments: str) -> str:
    """The one sentence that a command refuses its arguments with, on the last line."""
    with pytest.raises(SystemExit) as ended:
        command_line.execute(module, arguments)
    out, err = capsys.readouterr()
    assert ended.value.code == processes.BAD_INPUT and not out and err.count("error: ") == 1, err
    return err.splitlines()[-1]


@pytest.mark.parametrize("module", COMMANDS, ids=lambda module: module.__name__)
def test_every_command_answers_mistakes_and_help_alike(module, capsys):
    mistakes = {"--workdr=x": "'--workdr'; did you mean '--workdir'", "extra": "'extra' is no argument", "--zzz=1": "'--zzz'"}
    required = ["--workdir=x", "--config=configs/demo.py", "--output=x", "--responses=x", "--policy=x"]
    taken = [each for each in required if f" {each.partition('=')[0]}" in (module.__doc__ or "")]
    assert all(words in refusal(capsys, module, *taken, argument) for argument, words in mistakes.items())
    assert re.search(r"--(workdir|config) needs a value: ", refusal(capsys, module))
    assert command_line.execute(module, ["--help"]) == 0
    told = capsys.readouterr().out
    assert told.startswith(module.__doc__.splitlines()[0])
    assert all(
        f"\n  --{name} " in told for name in re.findall(r"--(\w+)\b(?!\.)", module.__doc__.split("\n\n")[1]) if name != "help"
    )


WITHOUT_JAX = r"""
import contextlib, io, sys
from pathlib import Path
from tba_jax import __main__ as commands, main
from tba_jax.commands import command_line, version

def code(function, *arguments):
    try:
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
            found = function(*arguments)
    except SystemExit as ended:
        found = ended.code
    return found, out.getvalue(), err.getvalue()

found, told, _ = code(commands.main, [])
assert found == 0 and "  show        Prints rows of a run's replay log as text." in told
assert code(commands.main, ["shwo"])[::2] == (2, "error: there is no command 'shwo'; did you mean 'show'?\n")
assert all(code(commands.main, [name, "--help"])[0] == 0 for name in commands.commands())
for asked, words in (("", "configs/demo.py "), ("=learner.steps", "learner.steps = setting(500"), ("=lerner", "")):
    found, told, _ = code(command_line.execute, main, [f"--help{asked}"])
    assert found == (0 if words else 2) and words in told, told
for mistake in ("--config=configs/demoo.py", "--config=configs/demo.py:x", "--config.lerner.steps=1", "--role=nobody", "--zzz"):
    found, told, said = code(command_line.execute, main, ["--config=configs/demo.py", "--workdir=nowhere", mistake])
    assert found == 2 and not told and said.startswith("error: ") and said.count("\n") == 1, (mistake, said)
version._ASK = "import no_such_jax"
found, told, said = code(commands.main, ["version"])
assert found == 0 and "none: JAX does not start, see below" in told and "no_such_jax" in told.partition("JAX says:")[2], told
for wrong in ("--dry_run=foo", "--processes=two", "--completions=3", "--allow_change", "--workdir="):
    assert code(command_line.execute, main, ["--workdir=nowhere", wrong])[2].startswith("error: "), wrong
assert "jax" not in sys.modules, "help and mistakes must come at once, and where JAX is broken its versions matter most"
from tba_jax.commands import report, show
report.write(Path(sys.argv[1]), Path(sys.argv[2]))
assert "rows of" in show.show(Path(sys.argv[1]), "best", 3)
import jax
assert not jax._src.xla_bridge._backends, "readers need no device"
"""


def test_help_and_mistakes_need_no_jax_and_readers_no_device(finished, tmp_path):
    done = tiny_run.call([sys.executable, "-c", WITHOUT_JAX, str(finished.run.root), str(tmp_path / "report.html")])
    assert done.returncode == 0, done.stderr
    assert not (tiny_run.ROOT / "nowhere").exists()


class Given(NamedTuple):
    """file: the task that config.json names; mark: is there once it was executed; own: the same task in a file of the user."""

    root: Path
    file: Path
    mark: Path
    own: Path

    def call(self, command, *flags: str) -> int:
        return command_line.execute(command, [f"--workdir={self.root}", *flags])


@pytest.fixture(scope="module")
def theirs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("existing")
    c = tiny_run.config(task__name=f"{task_files.write(folder / 'theirs')}:Ones", learner__steps=2, schedule__mode="interleaved")
    c.task.custom.count = 40
    assert jobs.everything(tiny_run.settings(folder / "run", c))() == 0
    return folder


@pytest.fixture
def given(theirs, tmp_path) -> Given:
    file = theirs / "theirs" / "my_task.py"
    mark = task_files.trap(file)
    mark.unlink(missing_ok=True)
    shutil.copytree(theirs / "run", tmp_path / "run")
    return Given(tmp_path / "run", file, mark, task_files.write(tmp_path / "mine"))


def test_readers_execute_nothing_and_print_no_control_character(given, tmp_path, capsys):
    (writer,) = (path.stem for path in (given.root / "replay" / "writers").glob("*.json"))
    (objects(given.root / "replay", writer)[0].parent / "a\x1b[2J\nthe ledger balances.json").write_text("{}")
    before = frozen_runs.contents(given.root)
    readers = [(show, ["--count=40"]), (audit, []), (audit, ["--step=2"]), (audit, [f"--regenerate={writer}:3"])]
    readers.append((estimate, ["--policy=2", "--min_effective=1"]))
    told = []
    for command, flags in [*readers, (export, [f"--output={tmp_path / 'exported'}"])]:
        assert given.call(command, *flags) == 0
        told.append(capsys.readouterr().out)
    assert not given.mark.exists() and frozen_runs.contents(given.root) == before
    assert r"\x1b" in told[0] and r"\x9b" in told[0] and r"\u202e" in told[0]
    assert all(visible(text) == text for text in told)
    assert r"a\x1b[2J\x0athe ledger balances.json is ignored" in told[1]
    assert "is identical" in told[3] and (tmp_path / "exported" / "model.safetensors").exists()


def refused(given, capsys, command, *flags: str) -> str:
    before = frozen_runs.contents(given.root)
    said = refusal(capsys, command, f"--workdir={given.root}", *flags)
    assert frozen_runs.contents(given.root) == before
    return said


def test_what_needs_the_task_asks_for_trust(given, tmp_path, capsys):
    responses = write_rows(tmp_path / "given.jsonl", [{"prompt": "001000", "response": "11"}])
    needing = [(evaluate, []), (rescore, []), (append, [f"--responses={responses}"])]
    joining = [(main, [flag]) for flag in ("--role=all", "--role=searcher", "--role=trainer", "--dry_run")]
    for command, flags in needing + joining:
        said = refused(given, capsys, command, *flags)
        assert str(given.file) in said and "--config=RECIPE" in said and "--trust_task" in said
    other = ["--config.task.response_length=5", "--config.task.custom.count=39"]
    for command in (evaluate, rescore):
        said = refused(given, capsys, command, f"--config={given.own}", *other)
        assert "response_length: 6 there, 5 here" in said and "task.custom.count: 40 there, 39 here" in said
    output = tmp_path / "report.json"
    more = {evaluate: [f"--output={output}", "--config.evaluation.samples=8"]}
    for command, flags in needing:  # one's own recipe: their file is not executed
        assert given.call(command, *flags, f"--config={given.own}", *more.get(command, [])) == 0
        assert visible(told := capsys.readouterr().out) == told
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
        assert words in refused(given, capsys, show)


GONE = "step 20 has the best held-out score, 0.500, of 2 evaluated snapshots; step 10 had 0.750, and its snapshot is gone"
# Snapshots, held-out scores, the default, the best, and words of the log.
STEPS = [
    ((0, 10, 20, 30), {0: 0.25, 10: 0.75, 20: 0.5}, 10, 10, "0.750, of 3 evaluated snapshots; the newest is of step 30"),
    ((0, 10, 30), {10: 0.75, 30: 0.75}, 30, 30, "RUN: step 30 has the best held-out score, 0.750, of 2"),
    ((0, 20), {0: 0.25, 10: 0.75, 20: 0.5}, 20, 20, GONE),
    ((0, 20), {0: 0.5, 20: 0.25}, 0, 0, "of 2 evaluated snapshots; the newest is of step 20 (--step=last)"),
    ((0, 20), {0: 0.5}, 20, 0, "no snapshot but that of step 0 of RUN has a held-out score in "),
    ((0, 20), {0: None, 10: 0.9}, 20, None, "no snapshot of RUN has a held-out score in "),
]


@pytest.mark.parametrize(("steps", "scores", "default", "best", "told"), STEPS)
def test_the_default_is_the_best_step_or_else_the_newest_and_is_told(tmp_path, caplog, steps, scores, default, best, told):
    caplog.set_level(logging.INFO)
    run = layout.RunDir(tmp_path, places.place(f"memory://{tmp_path.name}/shared"))
    run.evaluations.mkdir()
    for step in steps:
        there = {**published.kept(run.policies), step: run.policies / snapshots.new_name(step, 1)}
        tiny_snapshots.point(run.policies, there)
    for step, reward in scores.items():
        layout.write_json(run.evaluations / f"{layout.step_name(step)}.json", {"step": step, "greedy_reward": reward})
    choose = functools.partial(command_line.chosen_step, run, called="RUN")
    assert choose(None) == default and told in caplog.messages[0]
    assert choose("last") == steps[-1] and choose(steps[1]) == steps[1]
    if best is None:
        with pytest.raises(ValueError, match=r"^--step=best: no snapshot of RUN .*; --step=last takes the newest, of step 20$"):
            choose("best")
    else:
        assert choose("best") == best
    with pytest.raises(ValueError, match=f"^--step=57 is not a snapshot of RUN: the nearest snapshot is of step {steps[-1]}; "):
        choose(57)
