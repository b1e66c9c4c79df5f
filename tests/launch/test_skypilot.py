"""The SkyPilot tasks: what their shell runs; a script stands for Python."""

import os
import subprocess
from pathlib import Path

import pytest
import yaml
from absl import flags

from tba_jax import main
from tests.support import tiny_run

LAUNCH = tiny_run.ROOT / "launch"


def words(folder: Path, name: str, **variables: str) -> list[str]:
    """What the task's shell runs; a script stands for Python, and the folder for the volume."""
    python, task = folder / ".venv" / "bin" / "python", yaml.safe_load((LAUNCH / name).read_text())
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    python.chmod(0o755)
    variables = dict(HOME=str(folder), RUN="--config=configs/demo.py --config.seed=3") | variables
    told = os.environ | {name: str(value) for name, value in task["envs"].items()} | variables
    return subprocess.run(
        ["bash", "-c", task["run"]], cwd=folder, env=told, capture_output=True, text=True, check=True
    ).stdout.splitlines()


@pytest.mark.parametrize(
    "name, variables, workdir, world",
    [
        ("skypilot.yaml", {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1"}, "/runs/gsm8k", ("10.0.0.5:8476", 2, 1)),
        ("skypilot.yaml", {"SKYPILOT_NUM_NODES": "1", "ROLE": "all", "SHARED": "s3://b/x"}, "/runs/gsm8k", ("", None, None)),
        ("skypilot_searchers.yaml", {"SHARED": "s3://b/tba/x"}, "{}/runs/x", ("", None, None)),
    ],
)
def test_a_machine_runs_its_role_and_its_process(tmp_path, name, variables, workdir, world):
    said, workdir = words(tmp_path, name, SKYPILOT_NODE_IPS="10.0.0.5\n10.0.0.6", **variables), workdir.format(tmp_path)
    assert said[:4] == ["-m", "tba_jax.run.restart", f"--workdir={workdir}", "--deaths=20"]
    values = flags.FlagValues()
    main.add_flags(values)
    values([word for word in said[said.index("tba_jax.main") :] if not word.startswith("--config.")])
    role = variables.get("ROLE", "searcher" if "searchers" in name else "trainer")
    assert (values.role, values.shared, str(values.workdir)) == (role, variables.get("SHARED", ""), workdir)
    assert (values.coordinator, values.processes, values.process) == world and "--config.seed=3" in said
