"""What a bug report is told of an environment."""

import json
import os
import subprocess
import sys

import jax
import pytest

from tba_jax import __main__ as commands
from tba_jax.commands import version
from tba_jax.telemetry import status
from tests.support import tiny_run


@pytest.fixture
def environment(monkeypatch):
    """One CPU device for the process that asks JAX, and none of the variables that a machine may have."""
    for name in [*version.environment()]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    return monkeypatch


def test_the_text_has_versions_devices_and_variables(environment, capsys):
    environment.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=3")
    environment.setenv("HF_TOKEN", "a secret")
    assert commands.main(["version"]) == 0
    lines = {line.split()[0]: " ".join(line.split()[1:]) for line in capsys.readouterr().out.splitlines() if line}
    assert lines["jax"] == jax.__version__ and lines["Python"].startswith(f"{sys.version.split()[0]}, {sys.executable}")
    assert lines["devices"] == "3 × cpu: cpu" and lines["XLA_FLAGS"] == "--xla_force_host_platform_device_count=3"
    assert lines["tba_jax"].startswith(status.code()["version"]) and "HF_TOKEN" not in lines
    assert {"jaxlib", "flax", "optax", "orbax-checkpoint", "tensorstore", "transformers", "numpy", "driver"} <= lines.keys()


def test_json_has_the_same(environment, capsys):
    assert commands.main(["version", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["tba_jax"] == status.code() and told["versions"]["jaxlib"] and told["devices"] == ["cpu: cpu"]
    assert told["environment"] == {"JAX_PLATFORMS": "cpu"} and told["jax_says"] == []


def test_jax_that_does_not_start_is_told_of(environment, capsys):
    environment.setenv("JAX_PLATFORMS", "no_such_platform")
    assert commands.main(["version"]) == 0
    said = capsys.readouterr().out
    assert "none: JAX does not start, see below" in said and "no_such_platform" in said.partition("JAX says:")[2]


def test_a_driver_that_hangs_or_ends_the_process_is_told_of(environment):
    environment.setattr(version, "_ASK", "import os, signal; os.kill(os.getpid(), signal.SIGABRT)")
    assert version.ask_devices() == ([], ["the process that asks JAX for its devices ended with code -6"])
    environment.setattr(version, "_ASK", "import time; time.sleep(60)")
    environment.setattr(version, "_DEVICE_SECONDS", 0.2)
    assert version.ask_devices() == ([], ["JAX has not found its devices within 0.2 s"])


def test_it_needs_no_jax(tmp_path):
    """An environment in which JAX cannot be imported is the one whose versions matter most."""
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['jax'] = None\n")
    seen = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "tba_jax", "version"]
    done = subprocess.run(command, cwd=tiny_run.ROOT, env=seen, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert "JAX does not start" in done.stdout and "ModuleNotFoundError" in done.stdout
