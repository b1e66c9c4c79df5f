"""What a bug report is told of an environment."""

import json
import os
import subprocess
import sys

import jax

from tba_jax import __main__ as commands
from tba_jax.commands import version
from tba_jax.telemetry import status
from tests.support import tiny_run


def test_the_text_and_json_have_versions_devices_and_variables(monkeypatch, capsys):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=3")
    monkeypatch.setenv("HF_TOKEN", "a secret")
    told = version.gather()
    monkeypatch.setattr(version, "gather", lambda: told)
    assert commands.main(["version", "--json"]) == 0
    printed = capsys.readouterr().out
    assert json.loads(printed) == told and "a secret" not in printed
    assert told["tba_jax"] == status.code() and told["devices"] == ["cpu: cpu"] * 3 and told["jax_says"] == []
    assert told["versions"]["jax"] == jax.__version__ and told["environment"]["XLA_FLAGS"] == os.environ["XLA_FLAGS"]
    assert commands.main(["version"]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if len(line.split()) > 1)
    assert lines["versions.jax"] == jax.__version__ and lines["devices"] == "cpu: cpu, cpu: cpu, cpu: cpu"


def test_a_driver_that_hangs_or_ends_the_process_is_told_of(monkeypatch):
    monkeypatch.setattr(version, "_ASK", "import os, signal; os.kill(os.getpid(), signal.SIGABRT)")
    assert version.ask_devices() == ([], ["the process that asks JAX for its devices ended with code -6"])
    monkeypatch.setattr(version, "_ASK", "import time; time.sleep(60)")
    monkeypatch.setattr(version, "_DEVICE_SECONDS", 0.2)
    assert version.ask_devices() == ([], ["JAX has not found its devices within 0.2 s"])


def test_it_needs_no_jax(tmp_path):
    """An environment in which JAX cannot be imported is the one whose versions matter most."""
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['jax'] = None\n")
    seen = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "tba_jax", "version"]
    done = subprocess.run(command, cwd=tiny_run.ROOT, env=seen, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert "none: JAX does not start, see below" in done.stdout
    assert "ModuleNotFoundError" in done.stdout.partition("JAX says:")[2]
