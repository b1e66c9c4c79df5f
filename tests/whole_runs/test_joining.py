"""Roles that are started with a folder alone, in processes of their own; and who comes after the end."""

from tba_jax import main
from tba_jax.commands import command_line
from tba_jax.storage import layout
from tests.support import task_files, tiny_run
from tests.support.frozen_runs import contents

STEPS = 6


def test_roles_need_the_folder_and_trust_and_find_a_finished_run_finished(tmp_path, one_device, capsys):
    """The folder has a custom task that is its own recipe, and a run with its reference policy."""
    recipe, run = task_files.write(tmp_path), layout.RunDir(tmp_path / "run")

    def arguments(*flags: str) -> list[str]:
        return [*tiny_run.command(run.root, tiny=False)[:3], f"--workdir={run.root}", *flags]

    def here(*flags: str) -> int:
        try:
            return command_line.execute(main, arguments(*flags)[3:])
        except SystemExit as ended:
            return ended.code

    assert here(f"--config={recipe}", "--role=reference", f"--config.learner.steps={STEPS}") == 0
    before = contents(run.root)
    capsys.readouterr()
    assert here("--role=searcher") == 2
    said = capsys.readouterr().err.strip()
    assert str(tmp_path / "my_task.py") in said and "--trust_task" in said and len(said.splitlines()) == 1
    assert contents(run.root) == before

    flags = {"searcher": ["--config.searchers.slots=8"], "trainer": [], "evaluator": ["--config.evaluation.batch_size=8"]}
    roles = {name: tiny_run.start(arguments(f"--role={name}", "--trust_task", *own)) for name, own in flags.items()}
    try:
        for name, process in roles.items():
            output, _ = process.communicate(timeout=180)
            assert process.returncode == 0, f"{name}: {output}"
    finally:
        for process in roles.values():
            process.kill()
    assert layout.read_json(run.finished)["step"] == STEPS and layout.steps_in(run.evaluations) == [0, STEPS]

    before = contents(run.root / "replay")
    capsys.readouterr()
    assert here(f"--config={recipe}", "--role=searcher", "--config.learner.steps=1000") == 0
    assert f"has finished its {STEPS} steps" in capsys.readouterr().err
    assert contents(run.root / "replay") == before
    assert here("--role=trainer", "--trust_task") == 0
