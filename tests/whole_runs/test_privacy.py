"""Roles that are started with a folder alone, whose task is a file of the user's and keeps the files of its runs private."""

import json
import os
import stat
from pathlib import Path

import pytest

from tba_jax import main
from tba_jax.commands import append, command_line, evaluate
from tba_jax.commands import report as report_command
from tba_jax.storage import layout
from tba_jax.tasks.red_team import RedTeam
from tests.support import task_files
from tests.support.frozen_runs import contents

STEPS = 4
SECRETS = ("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "OPENAI_API_KEY")
CANARY = "canary-29c1f0"


@pytest.fixture
def readable_by_all():
    """The umask of a user whose files everybody may read."""
    before = os.umask(0o022)
    yield
    os.umask(before)


def open_to_others(folder: Path) -> list[str]:
    """The files and folders that others than their owner may use, this folder among them."""
    return [str(path) for path in (folder, *folder.rglob("*")) if stat.S_IMODE(path.lstat().st_mode) & 0o077]


def test_roles_need_the_folder_and_trust_and_what_they_write_is_its_owners(
    tmp_path, one_device, readable_by_all, capsys, monkeypatch
):
    """In a workdir and a place of --shared that a launcher has made for everybody. No file and no output holds what a variable
    of the environment says."""
    for name in SECRETS:
        monkeypatch.setenv(name, CANARY)
    assert RedTeam.private_files
    recipe, shared, report = task_files.write(tmp_path), tmp_path / "shared", tmp_path / "report.json"
    recipe.write_text(recipe.read_text().replace("class Ones:\n", "class Ones:\n    private_files = True\n"))
    run = layout.RunDir(tmp_path / "run", shared)
    for folder in (run.root, shared):
        folder.mkdir(mode=0o755)

    def here(*flags: str) -> int:
        try:
            return command_line.execute(main, [f"--workdir={run.root}", *flags])
        except SystemExit as ended:
            return ended.code

    begun = (f"--config.learner.steps={STEPS}", "--config.schedule.mode=interleaved", "--config.checkpoint.every_steps=2")
    assert here(f"--config={recipe}", "--role=reference", *begun, f"--shared={shared}") == 0
    before = contents(tmp_path)
    capsys.readouterr()
    assert here("--role=searcher") == 2
    said = capsys.readouterr().err.strip()
    assert str(recipe) in said and "--trust_task" in said and len(said.splitlines()) == 1
    assert contents(tmp_path) == before
    assert here("--trust_task") == 0
    assert layout.read_json(run.finished)["step"] == STEPS and layout.steps_in(run.evaluations) == [0, STEPS]
    before = contents(shared / "replay")
    capsys.readouterr()
    assert here(f"--config={recipe}", "--role=searcher", "--config.learner.steps=1000") == 0
    said = capsys.readouterr().err
    assert f"has finished its {STEPS} steps" in said
    assert contents(shared / "replay") == before
    (tmp_path / "responses.jsonl").write_text(json.dumps({"prompt": f"{8:06b}", "response": "a1"}) + "\n")
    known = [f"--workdir={run.root}", "--trust_task"]
    assert command_line.execute(append, [*known, f"--responses={tmp_path / 'responses.jsonl'}"]) == 0
    assert command_line.execute(evaluate, [*known, f"--output={report}"]) == 0
    dry = [f"--config={recipe}", f"--workdir={tmp_path / 'new'}", "--dry_run=full"]
    assert command_line.execute(main, dry) == 0
    assert command_line.execute(report_command, [f"--workdir={run.root}", f"--output={tmp_path / 'report.html'}"]) == 0
    said = capsys.readouterr()
    assert '"task": {' in said.out and CANARY not in said.out + said.err
    assert not [name for name, content in contents(tmp_path).items() if CANARY.encode() in content]
    for made in (run.root, shared, report):
        assert open_to_others(made) == []
    assert {"metrics", "journal", "checkpoints", "evaluations"} <= {path.name for path in run.root.iterdir()}
    assert {"config.json", "policy", "replay", "reference"} <= {path.name for path in shared.iterdir()}
