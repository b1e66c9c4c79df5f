"""Writes the constraint files: the versions that pip chooses today, for each Python of this machine that tba_jax is tested with.

python -m launch.constraints.resolve [VERSION …]      from the root of the checkout; `make constraints` calls it

A file has every package of requirements.txt and of all extras but `parity` and `verifiers`, which have environments of their
own. One file serves the CPU and all accelerators, because pip resolves them to one set: the packages of CUDA 12, of CUDA 13 and
of TPUs have different names, and all go with the same JAX. A constraint of a package that nobody asks for installs nothing.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

# The Pythons that tba_jax is tested with.
VERSIONS = ("3.11", "3.12", "3.13")
FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent.parent
# PyTorch comes in builds whose own packages of CUDA contradict those of JAX. verifiers wants an mcp below 2, and would hold back
# what the extra open-env brings.
LEFT_OUT = ("parity", "verifiers")


def constraints_of(version: str) -> Path:
    """The constraint file of a Python, "3.12" for any 3.12.x; it need not be there."""
    return FOLDER / f"python{version}.txt"


def find(version: str) -> str:
    """The path of an interpreter of this version that can make environments, "" where the machine has none.

    It is looked for on the PATH and among the versions of pyenv. A command may be there and fail: pyenv leaves such ones behind.
    """
    named = shutil.which(f"python{version}")
    versions = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = [*([named] if named else []), *map(str, sorted(versions.glob(f"{version}.*/bin/python")))]
    program = "import sys, venv, ensurepip; print(*sys.version_info[:2], sep='.')"
    for candidate in candidates:
        done = subprocess.run([candidate, "-c", program], capture_output=True, text=True, check=False)
        if done.returncode == 0 and done.stdout.strip() == version:
            return candidate
    return ""


def wanted(root: Path = ROOT) -> list[str]:
    """What pip is asked for: the lines of requirements.txt, and those of the extras."""
    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    of_extras = {one for name, listed in extras.items() if name not in LEFT_OUT for one in listed}
    lines = (line.partition("#")[0].strip() for line in (root / "requirements.txt").read_text().splitlines())
    return [*filter(None, lines), *sorted(of_extras)]


def text_of(version: str, report: dict[str, Any]) -> str:
    """The constraint file. Args: version: of Python, "3.12"; report: pip's, as --report writes it."""
    found = {canonical(one["metadata"]["name"]): one["metadata"]["version"] for one in report["install"]}
    head = f"# The tested packages of Python {version}, for the CPU and every accelerator. Written by `make constraints`.\n"
    return head + "".join(f"{name}=={found[name]}\n" for name in sorted(found))


def canonical(name: str) -> str:
    """The name of a package as indexes spell it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def resolve(python: str, requirements: Iterable[str]) -> dict[str, Any]:
    """pip's report on what it would install into an empty environment."""
    with tempfile.TemporaryDirectory() as folder:
        asked, report = Path(folder) / "wanted.txt", Path(folder) / "report.json"
        asked.write_text("\n".join(requirements))
        options = ["--dry-run", "--ignore-installed", "--quiet", "--disable-pip-version-check"]
        command = [python, "-m", "pip", "install", *options, f"--report={report}", "-r", str(asked)]
        subprocess.run(command, check=True)
        told: dict[str, Any] = json.loads(report.read_text())
    return told


def main(versions: Sequence[str]) -> int:
    for version in versions or VERSIONS:
        python, file = find(version), constraints_of(version)
        if not python:
            print(f"Python {version} is not on this machine: {file.name} stays as it is")
            continue
        file.write_text(text_of(version, resolve(python, wanted())))
        print(f"{file.relative_to(ROOT)}: {len(file.read_text().splitlines()) - 1} packages")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
