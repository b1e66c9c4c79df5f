"""Who may read the files of a run whose task keeps them private: their owner alone, whatever the user's umask lets."""

import json
import os
import stat
from pathlib import Path

import pytest

from tba_jax import main
from tba_jax.commands import append, command_line, evaluate
from tba_jax.tasks.arithmetic import Arithmetic
from tba_jax.tasks.red_team import RedTeam
from tests.support import tiny_run

# A task of the user's that keeps its runs private, in the least words.
SIZES = "digits=2, train_queries=40, heldout_queries=8, seed=0"
OWN = f"""
from tba_jax.tasks.arithmetic import Arithmetic


class Secret(Arithmetic):
    private_files = True

    def __init__(self):
        super().__init__({SIZES})
"""


@pytest.fixture
def readable_by_all():
    """The umask of a user whose files everybody may read."""
    before = os.umask(0o022)
    yield
    os.umask(before)


def open_to_others(folder: Path) -> list[str]:
    """The files and folders that others than their owner may use, this folder among them."""
    return [str(path) for path in (folder, *folder.rglob("*")) if stat.S_IMODE(path.lstat().st_mode) & 0o077]


def test_what_roles_and_commands_write_is_its_owners(tmp_path, one_device, readable_by_all):
    """In a workdir and a place of --shared that a launcher has made for everybody."""
    assert RedTeam.private_files
    run, shared, report = tmp_path / "run", tmp_path / "shared", tmp_path / "report.json"
    for folder in (run, shared):
        folder.mkdir(mode=0o755)
    (tmp_path / "secret.py").write_text(OWN)
    asked = ("--config.schedule.mode=interleaved", "--config.learner.steps=4", f"--config.task.name={tmp_path}/secret.py:Secret")
    arguments = tiny_run.command(run, *asked, "--config.checkpoint.every_steps=2", f"--shared={shared}")[3:]
    assert command_line.execute(main, [each for each in arguments if "task.arithmetic" not in each]) == 0
    query = Arithmetic(digits=2, train_queries=40, heldout_queries=8, seed=0).queries("train")[0]
    (tmp_path / "responses.jsonl").write_text(json.dumps({"prompt": query.prompt, "response": "7"}) + "\n")
    known = [f"--workdir={run}", "--trust_task"]
    assert command_line.execute(append, [*known, f"--responses={tmp_path / 'responses.jsonl'}"]) == 0
    assert command_line.execute(evaluate, [*known, f"--output={report}"]) == 0
    for made in (run, shared, report):
        assert open_to_others(made) == []
    assert {"metrics", "journal", "checkpoints", "evaluations"} <= {path.name for path in run.iterdir()}
    assert {"config.json", "policy", "replay", "reference"} <= {path.name for path in shared.iterdir()}
