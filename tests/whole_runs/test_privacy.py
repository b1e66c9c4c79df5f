"""Who may read the files of a run: of red-teaming, their owner alone; of others, whom the user's umask lets."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tba_jax import main
from tba_jax.commands import command_line
from tests.support import tiny_run

RED_TEAM = tiny_run.ROOT / "configs" / "red_team_gpt2.py"
SMALL = ("--config.learner.steps=4", "--config.evaluation.every_steps=4", "--config.checkpoint.every_steps=2")


def call(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A process of a user whose files everybody may read."""
    environment = {name: value for name, value in tiny_run.environment().items() if name != "JAX_COMPILATION_CACHE_DIR"}
    done = subprocess.run(
        [sys.executable, "-m", *arguments], cwd=tiny_run.ROOT, env=environment, umask=0o022, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done


def open_to_others(folder: Path) -> list[str]:
    """The files and folders that others than their owner may use, this folder among them."""
    return [str(path) for path in (folder, *folder.rglob("*")) if stat.S_IMODE(path.lstat().st_mode) & 0o077]


@pytest.mark.slow
def test_the_files_of_a_red_teaming_run_are_their_owners(tmp_path):
    """Of every role and every command, in a workdir and a place of --shared that a launcher has made for everybody."""
    run, shared = tmp_path / "run", tmp_path / "shared"
    for folder in (run, shared):
        folder.mkdir(mode=0o755)
    call("tba_jax.main", f"--config={RED_TEAM}:small", f"--workdir={run}", f"--shared={shared}", *SMALL)
    (tmp_path / "attacks.jsonl").write_text('{"response": " say it"}\n')
    call("tba_jax", "append", f"--workdir={run}", f"--responses={tmp_path}/attacks.jsonl", "--unfit=skip")
    call("tba_jax", "evaluate", f"--workdir={run}", f"--output={tmp_path}/report.json")
    call("tba_jax", "export", f"--workdir={run}", f"--output={tmp_path}/policy")
    for made in (run, shared, tmp_path / "policy", tmp_path / "report.json"):
        assert open_to_others(made) == []
    there = {path.relative_to(run).parts[0] for path in run.rglob("*")}
    assert {"logs", "metrics", "journal", "checkpoints", "evaluations", "compilation_cache"} <= there
    assert {"config.json", "policy", "replay", "reference"} <= {path.name for path in shared.iterdir()}


# A task of the user's that keeps its runs private, in the least words.
OWN = """
from tba_jax.tasks.arithmetic import Arithmetic


class Secret(Arithmetic):
    private_files = True

    def __init__(self):
        super().__init__(digits=2, train_queries=40, heldout_queries=8, seed=0)
"""


@pytest.fixture
def readable_by_all():
    """The umask of a user whose files everybody may read."""
    before = os.umask(0o022)
    yield
    os.umask(before)


def test_a_task_of_ones_own_may_ask_for_it(tmp_path, one_device, readable_by_all):
    (tmp_path / "secret.py").write_text(OWN)
    asked = ("--config.schedule.mode=interleaved", "--config.learner.steps=2", "--config.evaluation.enabled=False")
    arguments = tiny_run.command(tmp_path / "run", *asked, f"--config.task.name={tmp_path}/secret.py:Secret")[3:]
    assert command_line.execute(main, [each for each in arguments if "task.arithmetic" not in each]) == 0
    assert open_to_others(tmp_path / "run") == []
    assert os.path.exists(tmp_path / "run" / "replay")
