"""What a process says of itself when it begins: where it runs, on what devices, and by which code."""

import contextlib
import importlib.metadata
import os
import platform
import subprocess
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "tensorstore", "transformers", "numpy")
# Where this package is in a checkout of the project.
_CHECKOUT = Path(__file__).resolve().parents[2]


def told(devices: Sequence[Any]) -> dict[str, Any]:
    """pid, host, devices (text), started (unix seconds), versions {package: version} and code. Args: devices: of the process."""
    names = [device.device_kind for device in devices]
    kinds = " + ".join(f"{names.count(name)} × {name}" for name in dict.fromkeys(names))
    here = {"pid": os.getpid(), "host": platform.node(), "devices": kinds, "started": time.time()}
    return {**here, "versions": versions(), "code": code()}


def versions() -> dict[str, str]:
    """Python and the packages that decide what a run computes, as far as they are installed -> their versions. Imports none."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def code() -> dict[str, str]:
    """The version of this package, and the git commit of the checkout that it is in, "" where it is in none."""
    version = ""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        version = importlib.metadata.version("tba_jax")
    with contextlib.suppress(OSError, ValueError, KeyError):  # of a checkout, beside which an older version may be installed
        version = tomllib.loads((_CHECKOUT / "pyproject.toml").read_text())["project"]["version"]
    return {"version": version, "commit": commit(_CHECKOUT)}


def commit(checkout: Path) -> str:
    """The git commit that a checkout stands at, "" where the folder is none, or git is not installed."""
    if not (checkout / ".git").exists():  # git would look for a repository in the folders above
        return ""
    asked = ["git", "-C", str(checkout), "rev-parse", "--verify", "HEAD"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(asked, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    return ""
