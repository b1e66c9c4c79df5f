"""How a command ends: exit codes and one sentence."""

import errno
import logging
import os
import re
import sys
import types

import pytest
from absl import flags

from tba_jax import main
from tba_jax.commands import append, audit, command_line, evaluate, export, report, rescore, show, supervised
from tba_jax.run import processes
from tba_jax.storage.lease import LeaseHeld
from tests.support import tiny_run


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


def test_the_log_shows_control_characters(capsys):
    command_line.log_to_stderr()
    logging.getLogger("tba_jax.test").info("a line that quotes %s", "\x1b[31m\x9b\u2028")
    assert r"quotes \x1b[31m\x9b\u2028" in capsys.readouterr().err


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
    """A role that fails is started again, and one that refuses its user is not."""

    def job() -> int:
        raise ValueError("shapes (3,) and (4,)")

    command = types.SimpleNamespace(__name__="tba_jax.commands.given", add_flags=lambda values: None, run=lambda given: job)
    with pytest.raises(SystemExit) as ended:
        command_line.execute(command, [])
    assert ended.value.code == 1 and "Traceback" in capsys.readouterr().err


COMMANDS = (append, audit, evaluate, export, main, report, rescore, show, supervised)


def refusal(capsys, module, *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        command_line.execute(module, arguments)
    told = capsys.readouterr().err
    assert ended.value.code == processes.BAD_INPUT and told.count("\n") == 1, told
    return told


@pytest.mark.parametrize("module", COMMANDS, ids=lambda module: module.__name__)
def test_every_command_answers_mistakes_and_help_alike(module, capsys):
    for argument, words in {
        "--workdr=x": "'--workdr'; did you mean '--workdir'",
        "extra": "'extra' is no argument",
        "--zzz=1": "'--zzz'",
    }.items():
        required = ["--workdir=x", "--config=configs/demo.py", "--output=x", "--responses=x"]
        taken = [each for each in required if f" {each.partition('=')[0]}" in (module.__doc__ or "")]
        assert words in refusal(capsys, module, *taken, argument)
    assert re.search(r"--(workdir|config) needs a value: ", refusal(capsys, module))
    assert command_line.execute(module, ["--help"]) == 0
    assert capsys.readouterr().out.startswith(module.__doc__.splitlines()[0])
    values = flags.FlagValues()
    module.add_flags(values)
    assert set(re.findall(r"--(\w+)\b(?!\.)", module.__doc__.split("\n\n")[1])) - {"help"} <= set(values)


@pytest.mark.parametrize(
    "argument, sentence",
    [
        ("--dry_run=foo", "--dry_run=foo must be true, false or full"),
        ("--compile=maybe", "--compile=maybe must be true or false"),
        ("--processes=two", "--processes=two must be an integer"),
        ("--role=nobody", "--role=nobody: value should be one of <all|reference|trainer|searcher|evaluator>"),
        ("config.learner.steps=3", "'config.learner.steps=3' is no argument; --help tells which there are"),
        (
            "--completions=3",
            "there is no argument '--completions'; did you mean '--config.learner.completions'?; --help tells which there are",
        ),
        ("--allow_change", "--allow_change needs a value: A,B: schedule settings that a resumed run may change"),
        ("--workdir=", "--workdir=: a path is needed"),
    ],
)
def test_what_a_flag_takes_is_said_in_words(argument, sentence, capsys):
    assert refusal(capsys, main, "--workdir=nowhere", argument) == f"error: {sentence}\n"


WITHOUT_JAX = r"""
import contextlib, io, sys
from tba_jax import __main__ as commands, main
from tba_jax.commands import command_line

def code(function, *arguments):
    try:
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
            found = function(*arguments)
    except SystemExit as ended:
        found = ended.code
    return found, out.getvalue(), err.getvalue()

def of_main(*arguments):
    return code(lambda: command_line.execute(main, arguments))

found, told, _ = code(commands.main, [])
assert found == 0 and "  show        Prints rows of a run's replay log as text." in told
assert code(commands.main, ["shwo"])[::2] == (2, "error: there is no command 'shwo'; did you mean 'show'?\n")
for name in commands.commands():
    assert code(commands.main, [name, "--help"])[0] == 0, name
found, told, _ = of_main("--help")
assert found == 0 and "configs/demo.py " in told and "tba_jax/experiment/schema.py" in told and "learner" in told
found, told, _ = of_main("--help=learner.steps")
assert found == 0 and "learner.steps = setting(500" in told
assert of_main("--help=lerner")[0] == 2
for mistake in ("--config=configs/demoo.py", "--config=configs/demo.py:x", "--config.lerner.steps=1", "--role=nobody", "--zzz"):
    found, told, said = of_main("--config=configs/demo.py", "--workdir=nowhere", mistake)
    assert found == 2 and not told and said.startswith("error: ") and said.count("\n") == 1, (mistake, said)
assert "jax" not in sys.modules, "help and mistakes must come at once"
from tba_jax.commands import version
version._ASK = "import no_such_jax"
found, told, said = code(commands.main, ["version"])
assert found == 0 and "none: JAX does not start, see below" in told and "no_such_jax" in told.partition("JAX says:")[2], told
assert "jax" not in sys.modules, "where JAX is broken its versions matter most"
"""


def test_help_and_mistakes_need_no_jax():
    done = tiny_run.call([sys.executable, "-c", WITHOUT_JAX])
    assert done.returncode == 0, done.stderr
    assert not (tiny_run.ROOT / "nowhere").exists()
