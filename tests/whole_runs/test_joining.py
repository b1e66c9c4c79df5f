"""Roles that are started with a folder alone, whose task is a file of the user's; and who comes after the end."""

from tba_jax import main
from tba_jax.commands import command_line
from tba_jax.storage import layout
from tests.support import task_files
from tests.support.frozen_runs import contents

STEPS = 6


def test_roles_need_the_folder_and_trust_and_find_a_finished_run_finished(tmp_path, one_device, capsys):
    """The folder has a custom task that is its own recipe, and a run with its reference policy."""
    recipe, run = task_files.write(tmp_path), layout.RunDir(tmp_path / "run")

    def here(*flags: str) -> int:
        try:
            return command_line.execute(main, [f"--workdir={run.root}", *flags])
        except SystemExit as ended:
            return ended.code

    begun = (f"--config.learner.steps={STEPS}", "--config.schedule.mode=interleaved")
    assert here(f"--config={recipe}", "--role=reference", *begun) == 0
    before = contents(run.root)
    capsys.readouterr()
    assert here("--role=searcher") == 2
    said = capsys.readouterr().err.strip()
    assert str(tmp_path / "my_task.py") in said and "--trust_task" in said and len(said.splitlines()) == 1
    assert contents(run.root) == before

    assert here("--trust_task", "--config.evaluation.batch_size=8") == 0
    assert layout.read_json(run.finished)["step"] == STEPS and layout.steps_in(run.evaluations) == [0, STEPS]

    before = contents(run.root / "replay")
    capsys.readouterr()
    assert here(f"--config={recipe}", "--role=searcher", "--config.learner.steps=1000") == 0
    assert f"has finished its {STEPS} steps" in capsys.readouterr().err
    assert contents(run.root / "replay") == before
    assert here("--role=trainer", "--trust_task") == 0
