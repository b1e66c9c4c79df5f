"""Roles that are started with a folder alone, in processes of their own; and who comes after the end."""

import pytest

from tba_jax.storage import layout
from tests.support import task_files, tiny_run
from tests.support.frozen_runs import contents

STEPS = 6


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a custom task that is its own recipe, and with a run that has its reference policy."""
    folder = tmp_path_factory.mktemp("joined")
    recipe = task_files.write(folder)
    made = tiny_run.call(command(folder, f"--config={recipe}", "--role=reference", f"--config.learner.steps={STEPS}"))
    assert made.returncode == 0, made.stderr
    return folder


def command(place, *flags: str) -> list[str]:
    return [*tiny_run.command(place / "run", tiny=False)[:3], f"--workdir={place / 'run'}", *flags]


def test_trainer_searcher_and_evaluator_need_the_folder_and_trust(place):
    before = contents(place / "run")
    refused = tiny_run.call(command(place, "--role=searcher"))
    assert refused.returncode == 2 and len(refused.stderr.strip().splitlines()) == 1
    assert str(place / "my_task.py") in refused.stderr and "--trust_task" in refused.stderr
    assert contents(place / "run") == before
    flags = {"searcher": ["--config.searchers.slots=8"], "trainer": [], "evaluator": ["--config.evaluation.batch_size=8"]}
    roles = {name: tiny_run.start(command(place, f"--role={name}", "--trust_task", *own)) for name, own in flags.items()}
    try:
        for name, process in roles.items():
            said, _ = process.communicate(timeout=180)
            assert process.returncode == 0, f"{name}: {said}"
    finally:
        for process in roles.values():
            process.kill()
    assert layout.read_json(place / "run" / "finished.json")["step"] == STEPS
    assert layout.steps_in(place / "run" / "evaluations") == [0, STEPS]


@pytest.fixture
def finished(place):
    """The same folder, once the run has finished: in the test above, or here where another process runs that one."""
    if not (place / "run" / "finished.json").exists():
        done = tiny_run.call(command(place, "--role=all", "--trust_task"))
        assert done.returncode == 0, done.stderr
    return place


def test_a_finished_run_is_finished_for_whoever_comes(finished):
    place = finished
    before = contents(place / "run" / "replay")
    late = command(place, f"--config={place / 'my_task.py'}", "--role=searcher", "--config.learner.steps=1000")
    done = tiny_run.call(late, timeout=60)
    assert done.returncode == 0 and f"has finished its {STEPS} steps" in done.stderr, done.stderr
    assert contents(place / "run" / "replay") == before
    again = tiny_run.call(command(place, "--role=trainer", "--trust_task"))
    assert again.returncode == 0, again.stderr
