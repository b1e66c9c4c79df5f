"""What the notebook shows of runs, and the settings that it takes for a device."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from colab import runs as notebook
from tba_jax.commands import recipes
from tba_jax.experiment import checks
from tba_jax.storage import layout
from tests.support import role_files, tiny_run


def config(flags: list[str]):
    return recipes.load("configs/demo.py", tuple(flags), program=recipes.BASE)


@pytest.mark.parametrize(("platform", "kind"), [("cpu", "cpu"), ("gpu", "Tesla T4"), ("tpu", "TPU v5 lite")])
def test_settings_of_a_device_can_be_run(platform, kind):
    found = notebook.runtime_of(platform, 1, kind)
    c = config([*found.flags, *notebook.schedule(searchers=found.searchers), f"--config.learner.steps={found.steps}"])
    checks.check(c, new=True)
    assert c.schedule.mode == ("interleaved" if platform == "tpu" else "asynchronous"), "one process at a time may use a TPU"
    assert c.model.compute_dtype == ("bfloat16" if platform == "tpu" else "float32") and c.learner.steps >= 100
    assert c.model.compute_dtype in found.why and (platform == "cpu" or kind in found.why)


def test_a_lag_keeps_the_snapshots_that_it_needs():
    c = config(notebook.schedule(searchers=0, lag=50))
    checks.check(c, new=True)
    assert c.schedule.lag == 50 and c.schedule.mode == "interleaved"


def evaluation(run: layout.RunDir, step: int, response: str, reward: float | None) -> None:
    run.evaluations.mkdir(parents=True, exist_ok=True)
    greedy = [{"query": "1 + 1 =", "response": response, "reward": reward}]
    layout.write_json(
        run.evaluations / f"{layout.step_name(step)}.json",
        {"step": step, "greedy_reward": reward, "sampled_reward": 0.5, "samples": {"greedy": greedy, "sampled": []}},
    )


def test_responses_stand_side_by_side_as_text(tmp_path):
    run = layout.RunDir(tmp_path)
    evaluation(run, 0, "<script>alert(1)</script>\x1b[2J", 0.0)
    with pytest.raises(ValueError, match="has 1 evaluations"):
        notebook.side_by_side(tmp_path)
    evaluation(run, 20, "2", None)
    found = notebook.side_by_side(tmp_path)
    assert "step 0" in found and "step 20" in found and "1 + 1 =" in found
    assert "&lt;script&gt;" in found and "<script>" not in found and "\x1b" not in found
    assert "reward 0.00" in found and "no reward" in found


def test_runs_are_compared_in_one_picture(tmp_path):
    """Of one of them there is nothing yet."""
    run = layout.RunDir(tmp_path / "first")
    role_files.write_lines(run, "trainer", role_files.steps(1, 5, ago=0.0, seconds=1.0))
    evaluation(run, 0, "2", 0.25)
    png = notebook.compared({"lag 3": run.root, "lag 0": tmp_path / "second"}, score_name="accuracy")
    assert png[:4] == b"\x89PNG"


def test_a_run_that_fails_says_why(tmp_path):
    run = notebook.BackgroundRun(tmp_path / "run", "--config=configs/demo.py", "--config.learner.stepz=3", score_name="accuracy")
    assert run._process.wait(60) == 2 and not run.goes_on and not run.has_trained
    assert run.failure().startswith("run: error: ") and "learner.stepz" in run.failure() and run.said().startswith("error: ")


PARENT = """
import sys, time
from colab import runs as notebook
run = notebook.BackgroundRun(sys.argv[1], "--config=configs/demo.py", score_name="accuracy")
print(run._process.pid, flush=True)
time.sleep(600)
"""


def test_a_run_ends_with_its_notebook(tmp_path):
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path / "run")], cwd=tiny_run.ROOT, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    deadline = time.monotonic() + 60
    while is_alive(child):
        assert time.monotonic() < deadline, "the run outlives its notebook"
        time.sleep(0.1)


def is_alive(process: int) -> bool:
    try:  # a process that init has not taken yet is a zombie
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_without_a_network_the_pretrained_model_is_left_out_with_a_sentence(tmp_path):
    """In a process of its own: the hub's client reads the address of the hub when it is imported."""
    code = """
        import pathlib, sys
        from colab import runs as notebook
        for model in ("nobody/no-model", sys.argv[1]):
            try:
                notebook.pretrained(model, "nobody/no-stories", into=pathlib.Path(sys.argv[1]))
            except ValueError as error:
                print(str(error).splitlines()[0])
    """
    closed = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path / "home"), "no_proxy": "127.0.0.1"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)],
        cwd=tiny_run.ROOT,
        env=os.environ | closed,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 2 and all("no-stories" in line and "hub" in line for line in lines), done.stdout
