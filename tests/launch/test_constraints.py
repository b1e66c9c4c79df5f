"""The constraint files, and pip with them: a folder of tiny wheels is the package index."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from launch.constraints import resolve
from tests.support import tiny_run

FILES = [resolve.constraints_of(version) for version in resolve.VERSIONS]


def pins(file: Path) -> dict[str, str]:
    lines = [line for line in file.read_text().splitlines() if not line.startswith("#")]
    return dict(line.split("==") for line in lines)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_file_pins_what_the_project_asks_for(file):
    found = pins(file)
    for line in resolve.wanted():
        asked = Requirement(line)
        assert found[resolve.canonical(asked.name)] in asked.specifier, line
    assert {found[name] for name in ("jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin")} == {found["jaxlib"]}
    assert found["jaxlib"].startswith(found["jax"].rsplit(".", 1)[0]) and "libtpu" in found and "torch" not in found


def test_a_report_of_pip_becomes_a_file():
    report = {"install": [{"metadata": {"name": "Zoo_keeper.x", "version": "1.0"}}, {"metadata": {"name": "a", "version": "2"}}]}
    assert resolve.text_of("3.12", report).splitlines()[1:] == ["a==2", "zoo-keeper-x==1.0"]


@pytest.fixture
def index(tmp_path, monkeypatch):
    """An index with inner 1.0 and 2.0, and outer 1.0, which needs it."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name, version, needs in (("inner", "1.0", ""), ("inner", "2.0", ""), ("outer", "1.0", "Requires-Dist: inner\n")):
        with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
            info = f"{name}-{version}.dist-info"
            wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}")
            wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{info}/RECORD", "")
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def install(tmp_path: Path, constraints: str, *arguments: str) -> tuple[set[str], subprocess.CompletedProcess[str]]:
    """What make installs with a constraint file, and how it ends."""
    target = tmp_path / "target"
    recipe = f"probe:; @$(call pip_install,{sys.executable},--target={target} {' '.join(arguments)},{constraints})"
    done = subprocess.run(["make", f"--eval={recipe}", "probe"], cwd=tiny_run.ROOT, capture_output=True, text=True, check=False)
    return {path.stem for path in target.glob("*.dist-info")}, done


def test_where_the_index_lacks_a_tested_version_pip_chooses(index, tmp_path):
    (tmp_path / "pins.txt").write_text("inner==1.5\nouter==1.0\n")
    found, done = install(tmp_path, str(tmp_path / "pins.txt"), "outer")
    assert found == {"inner-2.0", "outer-1.0"} and done.returncode == 0 and "chooses all versions" in done.stdout, done.stderr


def test_a_constraint_file_that_is_not_there_is_refused(tmp_path):
    found, done = install(tmp_path, "nowhere.txt", "outer")
    assert not found and done.returncode and "CONSTRAINTS=nowhere.txt is no file" in done.stderr
