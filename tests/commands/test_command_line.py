"""How a command ends: exit codes and one sentence."""

import errno
import os
import sys

import pytest

from tba_jax.commands import command_line
from tba_jax.run import processes


@pytest.mark.parametrize(
    "error, code, words",
    [
        (OSError(errno.ENOSPC, "No space left on device"), processes.STORAGE_FAILED, "storage failed"),
        (OSError(errno.EROFS, "Read-only file system"), processes.STORAGE_FAILED, "Read-only file system"),
        (RuntimeError("write: No space left on device"), processes.STORAGE_FAILED, "what was committed stays readable"),
        (processes.BadInput("slots=3\ncannot be divided"), processes.BAD_INPUT, "error: slots=3 cannot be divided"),
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


@pytest.mark.parametrize(
    "error, sentence",
    [
        (ValueError("steps=0\nmust be positive"), "error: steps=0 must be positive"),
        (KeyError("stepz"), "error: the config has no setting 'stepz'"),
        (
            AttributeError('Did you mean "steps" instead of "stepz"?'),
            "error: the config has no setting 'stepz'; did you mean 'steps'?",
        ),
        (
            ValueError(
                "flag --config=x.py:b: Error whilst parsing config file:\n\nTraceback (most recent call last):\n"
                '  File "x.py", line 1, in get_config\n    raise ValueError("ValueError: b")\nValueError: b is not\none of a\n'
            ),
            "error: flag --config=x.py:b: b is not one of a",
        ),
        (
            TypeError(
                "flag --config=x.py:b: Error whilst parsing config file:\n\nTraceback (most recent call last):\n"
                '  File "y.py", line 1, in parse\n    f("b")\nTypeError: f() takes 0 arguments\n'
            ),
            "error: flag --config=x.py:b: TypeError: f() takes 0 arguments",
        ),
    ],
)
def test_a_users_mistake_is_one_sentence(error, sentence, capsys):
    with pytest.raises(SystemExit) as ended:
        command_line.refuse(error)
    assert ended.value.code == processes.BAD_INPUT and capsys.readouterr().err == sentence + "\n"
