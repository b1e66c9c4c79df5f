"""The SkyPilot tasks: what their shell runs; a script stands for Python."""

import os
import shutil
import subprocess

import pytest
import yaml
from absl import flags

from tba_jax import main
from tests.support import tiny_run

LAUNCH = tiny_run.ROOT / "launch"


@pytest.mark.parametrize(
    "name, role, shared", [("skypilot.yaml", "all", ""), ("skypilot_searchers.yaml", "searcher", "s3://bucket/tba/run")]
)
def test_a_machine_runs_its_roles(tmp_path, name, role, shared):
    python, task = tmp_path / ".venv" / "bin" / "python", yaml.safe_load((LAUNCH / name).read_text())
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    python.chmod(0o755)
    shutil.copytree(LAUNCH, tmp_path / "launch")
    variables = dict(HOME=str(tmp_path / "home"), SHARED=shared, NAME="run", RUN="--config=configs/demo.py --config.seed=3")
    environment = os.environ | task["envs"] | variables
    done = subprocess.run(["bash", "-c", task["run"]], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    words, workdir = done.stdout.splitlines(), tmp_path / "home/runs/run"
    is_restarted = words[:3] == ["-m", "tba_jax.run.restart", f"--workdir={workdir}"]
    assert is_restarted == (role == "searcher") == task["resources"].get("use_spot", False)
    values = flags.FlagValues()
    main.add_flags(values)
    values([word for word in words[words.index("tba_jax.main") :] if not word.startswith("--config.")])
    assert (values.role, values.shared, str(values.workdir)) == (role, shared, str(workdir)) and "--config.seed=3" in words
