"""The constraint files, and pip with them: a folder of tiny wheels is the package index."""

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from launch.constraints import install, pythons, resolve
from tests.support import tiny_run

FILES = [pythons.constraints_of(version) for version in pythons.VERSIONS]


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


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_file_has_names_and_versions_and_no_index(file):
    first, *lines = file.read_text().splitlines()
    assert first.startswith(f"# The tested packages of Python {file.stem.removeprefix('python')}, ")
    assert lines == sorted(lines, key=lambda line: line.partition("==")[0])
    assert all(re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*==[\w.!]+", line) for line in lines)


def test_the_image_and_the_clouds_name_a_file_that_is_there():
    for name in ("skypilot.yaml", "skypilot_searchers.yaml"):
        (named,) = re.findall(r"--constraint (\S+)", (tiny_run.ROOT / "launch" / name).read_text())
        assert (tiny_run.ROOT / named).is_file()
    (version,) = re.findall(r"^ARG PYTHON=(.+)$", (tiny_run.ROOT / "launch" / "Dockerfile").read_text(), re.MULTILINE)
    assert pythons.constraints_of(version).is_file()


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


def installed(tmp_path: Path, constraints: str, *arguments: str) -> tuple[set[str], int]:
    """What pip installs with this constraint file, and the exit code."""
    file, target = tmp_path / "pins.txt", tmp_path / "target"
    file.write_text(constraints)
    code = install.main([str(file) if constraints else "", f"--target={target}", *arguments])
    return {path.stem for path in target.glob("*.dist-info")}, code


@pytest.mark.parametrize(
    "constraints, expected, named",
    [
        ("# of a test\ninner==1.0\nouter==1.0\n", {"inner-1.0", "outer-1.0"}, ""),
        ("inner==1.5\nouter==1.0\n", {"inner-2.0", "outer-1.0"}, "inner==1.5"),
        ("inner==1.0\nouter==3.0\n", {"inner-1.0", "outer-1.0"}, "outer==3.0"),
        ("inner==1.5\nouter==3.0\n", {"inner-2.0", "outer-1.0"}, "inner==1.5"),
        ("", {"inner-2.0", "outer-1.0"}, ""),
    ],
)
def test_a_version_that_the_index_lacks_is_named_and_another_is_installed(index, tmp_path, capfd, constraints, expected, named):
    assert installed(tmp_path, constraints, "--quiet", "outer") == (expected, 0)
    said = capfd.readouterr().out
    assert named in said and ("pip chooses" in said) == bool(named)


def test_what_no_index_has_is_pips_to_tell(index, tmp_path, capfd):
    found, code = installed(tmp_path, "inner==1.0\n", "nowhere")
    said = capfd.readouterr()
    assert not found and code == 1 and "nowhere" in said.err and "pip chooses all versions. ERROR: Could not find" in said.out


def test_a_constraint_file_that_is_not_there_is_refused(capsys):
    assert install.main(["nowhere.txt", "outer"]) == 2
    assert "CONSTRAINTS=nowhere.txt is no file" in capsys.readouterr().err


def test_a_python_without_tested_versions_is_told_so(monkeypatch, capsys):
    monkeypatch.setattr(sys, "version_info", (3, 99, 0))
    assert install.file_of("tested") is None and "no tested versions for Python 3.99" in capsys.readouterr().out


@pytest.mark.parametrize("given, asked", [((), '"tested"'), (("CONSTRAINTS=",), '""'), (("CONSTRAINTS=a.txt",), '"a.txt"')])
def test_make_installs_what_is_tested_unless_it_is_told_otherwise(tmp_path, given, asked):
    command = ["make", "-n", "venv", f"VENV={tmp_path / 'venv'}", "ACCELERATOR=cuda12", *given]
    shown = subprocess.run(command, cwd=tiny_run.ROOT, capture_output=True, text=True, check=True).stdout
    assert shown.count(f"-m launch.constraints.install {asked} -r ") == 2
