"""The Pythons that tba_jax is tested with, and where this machine has them."""

import os
import shutil
import subprocess
from pathlib import Path

VERSIONS = ("3.11", "3.12", "3.13")
FOLDER = Path(__file__).resolve().parent


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
