"""The constraint files, and what make installs by them; a script stands for the interpreter."""

import subprocess
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from launch.constraints import resolve
from tests.support import tiny_run

FILES = [resolve.constraints_of(version) for version in resolve.VERSIONS]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_file_pins_what_the_project_asks_for(file):
    lines = [line for line in file.read_text().splitlines() if not line.startswith("#")]
    found = dict(line.split("==") for line in lines)
    for line in resolve.wanted():
        asked = Requirement(line)
        assert found[resolve.canonical(asked.name)] in asked.specifier, line
    assert {found[name] for name in ("jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin")} == {found["jaxlib"]}
    assert found["jaxlib"].startswith(found["jax"].rsplit(".", 1)[0]) and "libtpu" in found and "torch" not in found


def test_a_report_of_pip_becomes_a_file():
    report = {"install": [{"metadata": {"name": "Zoo_keeper.x", "version": "1.0"}}, {"metadata": {"name": "a", "version": "2"}}]}
    assert resolve.text_of("3.12", report).splitlines()[1:] == ["a==2", "zoo-keeper-x==1.0"]


def install(folder: Path, constraints: str) -> tuple[list[str], subprocess.CompletedProcess[str]]:
    """The commands of pip that make runs where the index lacks 1.5, and how it ends."""
    python, told = folder / "python", folder / "told"
    python.write_text(f'#!/bin/sh\necho "$*" >> {told}\ncase "$*" in *" -c "*) ! grep -q 1.5 "$7";; esac\n')
    python.chmod(0o755)
    command = ["make", f"--eval=probe:; @$(call pip_install,{python},outer,{constraints})", "probe"]
    done = subprocess.run(command, cwd=tiny_run.ROOT, capture_output=True, text=True, check=False)
    return told.read_text().splitlines() if told.exists() else [], done


@pytest.mark.parametrize("version", ["1.0", "1.5"])
def test_where_the_index_lacks_a_tested_version_pip_chooses(tmp_path, version):
    pins, pip = tmp_path / "pins.txt", "-m pip install --quiet --disable-pip-version-check"
    pins.write_text(f"inner=={version}\n")
    found, done = install(tmp_path, str(pins))
    assert found == [f"{pip} -c {pins} outer", f"{pip} outer"][: 2 if version == "1.5" else 1], done.stderr
    assert done.returncode == 0 and ("chooses all versions" in done.stdout) == (version == "1.5")


def test_a_constraint_file_that_is_not_there_is_refused(tmp_path):
    found, done = install(tmp_path, "nowhere.txt")
    assert not found and done.returncode and "CONSTRAINTS=nowhere.txt is no file" in done.stderr
