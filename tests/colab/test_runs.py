"""What the notebook shows of runs, and the settings that it takes for a device."""

import subprocess
import sys

import pytest

from colab import runs as notebook
from tba_jax.commands import recipes
from tba_jax.experiment import checks
from tba_jax.storage import layout
from tests.support import role_files


def config(flags: list[str]):
    return recipes.load("configs/demo.py", tuple(flags), program=recipes.BASE)


@pytest.mark.parametrize(("platform", "kind"), [("cpu", "cpu"), ("gpu", "Tesla T4"), ("tpu", "TPU v5 lite")])
def test_settings_of_a_device_can_be_run(platform, kind):
    found = notebook.runtime_of(platform, 1, kind)
    c = config([*found.flags, *notebook.schedule(searchers=found.searchers), f"--config.learner.steps={found.steps}"])
    checks.check(c, new=True)
    assert c.schedule.mode == ("interleaved" if platform == "tpu" else "asynchronous"), "one process at a time may use a TPU"
    assert c.model.compute_dtype == ("bfloat16" if platform == "tpu" else "float32") and c.model.compute_dtype in found.why


def evaluation(run: layout.RunDir, step: int, response: str, reward: float | None) -> None:
    run.evaluations.mkdir(parents=True, exist_ok=True)
    samples = {"greedy": [{"query": "1 + 1 =", "response": response, "reward": reward}], "sampled": []}
    report = {"step": step, "greedy_reward": reward, "sampled_reward": 0.5, "samples": samples}
    layout.write_json(run.evaluations / f"{layout.step_name(step)}.json", report)


def test_responses_stand_side_by_side_as_text_and_runs_in_one_picture(tmp_path):
    run = layout.RunDir(tmp_path / "first")
    evaluation(run, 0, "<script>alert(1)</script>\x1b[2J", 0.0)
    role_files.write_lines(run, "trainer", role_files.steps(1, 5, ago=0.0, seconds=1.0))
    with pytest.raises(ValueError, match="has 1 evaluations"):
        notebook.side_by_side(run.root)
    png = notebook.compared({"lag 3": run.root, "there is nothing yet": tmp_path / "second"}, score_name="accuracy")
    assert png[:4] == b"\x89PNG"
    evaluation(run, 20, "2", None)
    found = notebook.side_by_side(run.root)
    assert all(words in found for words in ("step 0", "step 20", "1 + 1 =", "&lt;script&gt;", "reward 0.00", "no reward"))
    assert "<script>" not in found and "\x1b" not in found


def test_a_run_that_fails_says_why_and_holds_the_lifeline_of_its_notebook(tmp_path, monkeypatch):
    program = tmp_path / "program"
    program.write_text('#!/bin/sh\necho "$TBA_JAX_LIFELINE $TBA_JAX_PARENT"\necho "error: no $4"\nexit 2\n')
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    started, popen = [], subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *given, **options: (started.append(options), popen(*given, **options))[1])
    run = notebook.BackgroundRun(tmp_path / "run", "--config=x.py", score_name="accuracy")
    assert run._process.wait(60) == 2 and not run.goes_on and not run.has_trained
    assert run.failure() == "run: error: no --config=x.py" and run.said() == "error: no --config=x.py"
    assert run.log.read_text().split()[0] == str(*started[0]["pass_fds"])
