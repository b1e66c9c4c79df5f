"""The SkyPilot tasks: their shell, their flags, and by the schema of the package itself, in an environment of its own."""

import os
import re
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
# It has a hundred dependencies, too many for the extra `dev`.
PACKAGE = "skypilot==0.14.1"


def task(name: str) -> dict[str, Any]:
    (found,) = kustomize.load(LAUNCH / name)
    return found


@pytest.mark.parametrize("name", TASKS)
def test_the_shell_is_valid_and_every_variable_is_there(name):
    found = task(name)
    assert found.keys() == {"name", "resources", "workdir", "envs", "setup", "run"}
    for part in ("setup", "run"):
        assert subprocess.run(["bash", "-n"], input=found[part], text=True, check=False).returncode == 0
    used = set(re.findall(r"\$\{?([A-Z]\w*)", found["setup"] + found["run"]))
    assert used - {"HOME", "PATH", "WORKDIR"} == found["envs"].keys() and found["envs"]["CUDA"] == "13"
    assert all(isinstance(value, str) for value in found["envs"].values())


# In the place of Python: prints its arguments, one a line.
PYTHON = "#!/usr/bin/env bash\nprintf '%s\\n' \"$@\"\n"


def arguments(tmp_path: Path, name: str, **variables: str) -> list[str]:
    """What `run` gives to Python on a machine with these variables."""
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(PYTHON)
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


@pytest.mark.parametrize("shared", ["gs://bucket/run", ""])
def test_a_machine_runs_all_roles(tmp_path, shared):
    words = arguments(tmp_path, "skypilot.yaml", SHARED=shared, RUN="--config=configs/demo.py --config.seed=3", NAME="one")
    values = read(words)
    assert (values.role, values.shared, str(values.workdir)) == ("all", shared, str(tmp_path / "home/runs/one"))
    assert "--config.seed=3" in words and (tmp_path / "home/runs").is_dir()


def test_a_spot_machine_runs_a_searcher(tmp_path):
    words = arguments(tmp_path, "skypilot_searchers.yaml", SHARED="s3://bucket/tba/run", RUN="--config.searchers.slots=8")
    values = read(words)
    assert words[:3] == ["-m", "tba_jax.run.restart", f"--workdir={tmp_path / 'home/runs/run'}"]
    assert (values.role, values.shared, str(values.workdir)) == (
        "searcher",
        "s3://bucket/tba/run",
        str(tmp_path / "home/runs/run"),
    )
    found = task("skypilot_searchers.yaml")
    assert found["resources"]["use_spot"] is True and "use_spot" not in task("skypilot.yaml")["resources"]


# Prints what SkyPilot reads of a task, or its refusal. Which clouds have which accelerators it would ask its catalog on the web.
PROGRAM = """
import sys
import sky
import yaml
from sky.utils import common_utils, schemas
try:
    with open(sys.argv[1]) as file:
        config = yaml.safe_load(file)
    common_utils.validate_schema(config, schemas.get_task_schema(), "task: ")
    common_utils.validate_schema(config["resources"], schemas.get_resources_schema(), "resources: ")
    del config["resources"]["accelerators"]
    task = sky.Task.from_yaml_config(config)
    task.expand_and_validate_workdir()
    task.validate_run()
    for resources in task.resources:
        resources.validate()
except Exception as error:
    sys.exit(f"refused: {error}")
print(task.name, task.num_nodes, any(resources.use_spot for resources in task.resources), sorted(task.envs))
"""


@pytest.fixture(scope="module")
def sky(tmp_path_factory):
    """A function that has SkyPilot read a task."""
    folder = tmp_path_factory.mktemp("skypilot")
    subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
    python, options = str(folder / "venv/bin/python"), ["--quiet", "--disable-pip-version-check"]
    probe = [python, "-m", "pip", "download", *options, "--no-deps", "--retries=1", "--timeout=15", f"--dest={folder}", PACKAGE]
    failed = subprocess.run(probe, capture_output=True, text=True, check=False)
    if failed.returncode and not os.environ.get("REQUIRE_PACKAGES"):
        pytest.skip(f"packages cannot be fetched here: {' '.join(failed.stderr.split())[-200:]}")
    subprocess.run([python, "-m", "pip", "install", *options, PACKAGE], check=True, timeout=1200)
    # It keeps its state below HOME, and asks nobody.
    environment = os.environ | {"HOME": str(folder), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}

    def ask(path: Path) -> subprocess.CompletedProcess[str]:
        command = [python, "-c", PROGRAM, str(path)]
        return subprocess.run(
            command, cwd=tiny_run.ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False
        )

    return ask


@pytest.mark.slow
@pytest.mark.parametrize("name", TASKS)
def test_skypilot_takes_the_task(sky, name):
    done = sky(LAUNCH / name)
    assert done.returncode == 0, done.stderr
    expected = task(name)
    shown = f"{expected['name']} 1 {expected['resources'].get('use_spot', False)} {sorted(expected['envs'])}"
    assert done.stdout.splitlines()[-1] == shown
