"""What a bug report is told of an environment; test_command_line.py has one in which JAX is broken."""

import json
import os

import jax

from tba_jax import __main__ as commands
from tba_jax.commands import version


def test_the_text_and_json_have_versions_devices_and_variables(monkeypatch, capsys):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=3")
    monkeypatch.setenv("HF_TOKEN", "a secret")
    told = version.gather()
    monkeypatch.setattr(version, "gather", lambda: told)
    assert commands.main(["version", "--json"]) == 0
    text = capsys.readouterr().out
    assert json.loads(text) == told and "secret" not in text and told["versions"]["jax"] == jax.__version__
    assert told["environment"]["XLA_FLAGS"] == os.environ["XLA_FLAGS"]
    assert commands.main(["version"]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if len(line.split()) > 1)
    assert lines["versions.jax"] == jax.__version__ and lines["devices"] == "cpu: cpu, cpu: cpu, cpu: cpu"
    monkeypatch.setattr(version, "_ASK", "import time; time.sleep(60)")
    monkeypatch.setattr(version, "_DEVICE_SECONDS", 0.2)
    assert version.ask_devices() == ([], ["JAX has not found its devices within 0.2 s"])
