"""The constraint files, and what make installs by them; a script stands for the interpreter."""

import subprocess

import pytest
from packaging.requirements import Requirement

from launch.constraints import resolve
from tests.support import tiny_run


@pytest.mark.parametrize("file", [resolve.constraints_of(version) for version in resolve.VERSIONS], ids=lambda file: file.stem)
def test_a_file_pins_what_the_project_asks_for(file):
    lines = [line for line in file.read_text().splitlines() if not line.startswith("#")]
    found = dict(line.split("==") for line in lines)
    for line in resolve.wanted():
        asked = Requirement(line)
        assert found[resolve.canonical(asked.name)] in asked.specifier, line
    assert {found[name] for name in ("jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin")} == {found["jaxlib"]}
    assert "libtpu" in found and "torch" not in found


def test_where_the_index_lacks_a_tested_version_pip_chooses(tmp_path):
    python, told, pip = tmp_path / "python", tmp_path / "told", "-m pip install --quiet --disable-pip-version-check"
    python.write_text(f'#!/bin/sh\necho "$*" >> {told}\ncase "$*" in *" -c "*) ! grep -q 1.5 "$7";; esac\n')
    python.chmod(0o755)
    for version in ("1.0", "1.5"):
        (tmp_path / version).write_text(f"inner=={version}\n")
    calls = "; ".join(f"$(call pip_install,{python},outer,{tmp_path}/{name})" for name in ("1.0", "1.5", "nowhere"))
    command = ["make", f"--eval=probe:; @{calls}", "probe"]
    done = subprocess.run(command, cwd=tiny_run.ROOT, capture_output=True, text=True, check=False)
    expected = [f"{pip} -c {tmp_path}/1.0 outer", f"{pip} -c {tmp_path}/1.5 outer", f"{pip} outer"]
    assert told.read_text().splitlines() == expected, done.stderr
    assert done.stdout.count("chooses all versions") == 1
    assert done.returncode and f"CONSTRAINTS={tmp_path}/nowhere is no file" in done.stderr
