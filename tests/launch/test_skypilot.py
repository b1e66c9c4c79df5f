"""The SkyPilot tasks: their flags, and by the schema of the package itself."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from absl import flags

from tba_jax import main
from tests.support import kustomize, tiny_run

LAUNCH = tiny_run.ROOT / "launch"
TASKS = ("skypilot.yaml", "skypilot_searchers.yaml")


def task(name: str) -> dict[str, Any]:
    (found,) = kustomize.load(LAUNCH / name)
    return found


def arguments(tmp_path: Path, name: str, **variables: str) -> list[str]:
    """What `run` gives to Python on a machine with these variables; a script stands for it, which prints its arguments."""
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    python.chmod(0o755)
    shutil.copytree(LAUNCH, tmp_path / "launch")
    told = task(name)["envs"] | {"HOME": str(tmp_path / "home")} | variables
    command = ["bash", "-c", task(name)["run"]]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | told, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def read(words: list[str]) -> flags.FlagValues:
    """The flags of the roles' command line, which may stand behind that of the wrapper; --config.SETTING=VALUE aside."""
    words = words[words.index("tba_jax.main") - 1 :]
    assert words[:2] == ["-m", "tba_jax.main"]
    values = flags.FlagValues()
    main.add_flags(values)
    values([word for word in words[1:] if not word.startswith("--config.")])
    return values


@pytest.mark.parametrize(
    "name, role, shared", [("skypilot.yaml", "all", ""), ("skypilot_searchers.yaml", "searcher", "s3://bucket/tba/run")]
)
def test_a_machine_runs_its_roles(tmp_path, name, role, shared):
    words = arguments(tmp_path, name, SHARED=shared, NAME="run", RUN="--config=configs/demo.py --config.seed=3")
    values, workdir = read(words), tmp_path / "home/runs/run"
    assert (values.role, values.shared, str(values.workdir)) == (role, shared, str(workdir)) and "--config.seed=3" in words
    is_restarted = words[:3] == ["-m", "tba_jax.run.restart", f"--workdir={workdir}"]
    assert is_restarted == (role == "searcher") == task(name)["resources"].get("use_spot", False)


# Has SkyPilot's own schemas read a task.
PROGRAM = """
import sys, yaml
from sky.utils import common_utils, schemas
config = yaml.safe_load(open(sys.argv[1]))
common_utils.validate_schema(config, schemas.get_task_schema(), "task: ")
common_utils.validate_schema(config["resources"], schemas.get_resources_schema(), "resources: ")
"""


@pytest.mark.slow
def test_skypilot_takes_the_tasks(tmp_path):
    """In an environment of its own: it has a hundred dependencies, too many for the extra `dev`."""
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    python = str(tmp_path / "venv/bin/python")
    install = [python, "-m", "pip", "install", "--quiet", "--retries=1", "--timeout=15", "skypilot==0.14.1"]
    done = subprocess.run(install, capture_output=True, text=True, timeout=1200, check=False)
    if done.returncode and not os.environ.get("REQUIRE_PACKAGES"):
        pytest.skip(f"packages cannot be fetched here: {' '.join(done.stderr.split())[-200:]}")
    # It keeps its state below HOME, and asks nobody.
    environment = os.environ | {"HOME": str(tmp_path), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
    for name in TASKS:
        subprocess.run([python, "-c", PROGRAM, str(LAUNCH / name)], env=environment, check=True, timeout=300)
