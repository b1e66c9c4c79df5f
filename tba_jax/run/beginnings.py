"""What the first event of a process says: where it runs, on what devices, and by which code."""

import importlib.metadata
import os
import platform
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "tensorstore", "transformers", "numpy")
# Where this package is in a checkout of the project.
_CHECKOUT = Path(__file__).resolve().parents[2]
_HEX = frozenset("0123456789abcdef")


def told(devices: Sequence[Any]) -> dict[str, Any]:
    """The fields of the event "start", see run/events.py. Args: devices: of the process."""
    names = [device.device_kind for device in devices]
    kinds = [f"{names.count(name)} × {name}" for name in dict.fromkeys(names)]
    return {
        "pid": os.getpid(),
        "host": platform.node(),
        "devices": " + ".join(kinds),
        "versions": versions(),
        "code": code(),
    }


def versions() -> dict[str, str]:
    """Python and the packages that decide what a run computes, as far as they are installed -> their versions. Imports none."""
    found = ((package, _version(package)) for package in _PACKAGES)
    return {"python": platform.python_version()} | {package: version for package, version in found if version}


def code() -> dict[str, str]:
    """The version of this package, and the git commit of the checkout that it is in, "" where it is in none."""
    written = _written(_CHECKOUT / "pyproject.toml")  # of a checkout, beside which an older version may be installed
    return {"version": written or _version("tba_jax"), "commit": commit(_CHECKOUT)}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _written(file: Path) -> str:
    """The version in a pyproject.toml, "" where there is none."""
    try:
        version: str = tomllib.loads(file.read_text())["project"]["version"]
    except (OSError, ValueError, KeyError):
        return ""
    return version


def commit(checkout: Path) -> str:
    """The git commit that a checkout stands at, "" where the folder is none; changes that are not committed do not show."""
    try:
        folder = _git_folder(checkout)
        head = (folder / "HEAD").read_text().strip()
        if not head.startswith("ref: "):
            return head if _HEX.issuperset(head) else ""
        name = head.removeprefix("ref: ")
        common = folder / "commondir"  # a worktree has its branches in the folder of the first checkout
        shared = (folder / common.read_text().strip()).resolve() if common.exists() else folder
        return next(filter(None, (_loose(folder / name), _loose(shared / name), _packed(shared, name))), "")
    except (OSError, UnicodeDecodeError):
        return ""


def _git_folder(checkout: Path) -> Path:
    """Raises OSError where there is none."""
    there = checkout / ".git"
    return there if there.is_dir() else checkout / there.read_text().strip().removeprefix("gitdir: ")


def _loose(file: Path) -> str:
    return file.read_text().strip() if file.is_file() else ""


def _packed(folder: Path, name: str) -> str:
    """A branch in packed-refs, whose lines are "<commit> <name>"."""
    file = folder / "packed-refs"
    lines = file.read_text().splitlines() if file.is_file() else []
    return next((line.split()[0] for line in lines if line.endswith(f" {name}")), "")
