"""Which packages here are too old for tba_jax, and their replacement: for colab/tba_jax.ipynb, before it imports any of them.

This module imports nothing that requirements.txt lists.
"""

import dataclasses
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

# Extra of pyproject.toml -> the package that gives JAX this kind of device. It must be as new as jax.
ACCELERATORS = {"cuda12": "jax-cuda12-plugin", "cuda13": "jax-cuda13-plugin", "tpu": "libtpu"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Unmet:
    """A package that is not as a requirement asks. installed: its version, "" where it is not installed."""

    package: str
    installed: str
    bounds: str = ""

    def __str__(self) -> str:
        if not self.installed:
            return f"{self.package} is missing: it is installed now"
        return f"{self.package} {self.installed} is here and {self.bounds} is needed: it is replaced now"


def listed(root: Path, *extras: str) -> list[str]:
    """The lines of requirements.txt, then those of the extras. Args: root: of the repository."""
    lines = [line.partition("#")[0].strip() for line in (root / "requirements.txt").read_text(encoding="utf-8").splitlines()]
    optional = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    return [*filter(None, lines), *(line for extra in extras for line in optional[extra])]


def installed() -> dict[str, str]:
    """Canonical name -> version of every package that this Python can import."""
    importlib.invalidate_caches()
    found: dict[str, str] = {}
    for each in importlib.metadata.distributions():
        if each.metadata["Name"]:  # a removal that was cut short leaves a folder without
            found.setdefault(canonicalize_name(each.metadata["Name"]), each.version)
    return found


def unmet(lines: Iterable[str], versions: Mapping[str, str]) -> list[Unmet]:
    """The requirements that the versions do not meet, in their order. Args: versions: canonical name -> version."""
    found = []
    for requirement in map(Requirement, lines):
        version = versions.get(canonicalize_name(requirement.name), "")
        wanted = requirement.marker is None or requirement.marker.evaluate()
        if wanted and not (version and requirement.specifier.contains(version, prereleases=True)):
            found.append(Unmet(package=requirement.name, installed=version, bounds=str(requirement.specifier)))
    return found


def accelerator(versions: Mapping[str, str], *, gpu: bool, tpu: bool) -> str:
    """The extra that gives JAX the device of this machine, "" for a CPU. Of a GPU it is that of the CUDA that is installed."""
    if gpu:
        return next((extra for extra in ("cuda13", "cuda12") if ACCELERATORS[extra] in versions), "cuda12")
    return "tpu" if tpu else ""


def has_gpu() -> bool:
    """Whether the driver lists an NVIDIA GPU."""
    try:
        asked = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return asked.returncode == 0 and "GPU " in asked.stdout


def has_tpu() -> bool:
    """Whether this machine has the device files of a TPU."""
    return any(Path("/dev").glob("accel[0-9]*")) or any(Path("/dev/vfio").glob("[0-9]*"))


def bring_up_to_date(root: Path, *extras: str) -> None:
    """Installs what requirements.txt and the extras need and this Python lacks, and says of each package what and why.

    A package that is new enough stays as it is, unless one that is replaced needs another version of it.

    Raises:
      RuntimeError: the installation failed, or this process has imported a package that was replaced.
    """
    before = installed()
    extra = accelerator(before, gpu=has_gpu(), tpu=has_tpu())
    lines = [*listed(root, *extras), *([ACCELERATORS[extra]] if extra else [])]
    found = unmet(lines, before)
    for each in found:
        print(each, flush=True)
    if not found:
        print("All packages are new enough: nothing is installed.")
        return
    lines = [*listed(root, *extras), *([f"jax[{extra}]"] if extra else [])]
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *lines]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"pip could not install them: {done.stderr.strip()[-2000:]}")
    for line in conflicts(done.stderr):
        print(f"pip says of another package: {line}")
    _drop_plugins_of_another_jax(extra)
    after = installed()
    print("Installed:", ", ".join(f"{name} {after[name]}" for name in sorted(after) if after[name] != before.get(name)))
    if stale := imported([name for name, version in before.items() if after.get(name) != version]):
        raise RuntimeError(
            f"this session had imported {', '.join(stale)} before: restart it (on Colab: Runtime, Restart session), and run "
            "all cells again; nothing is installed twice"
        )


def conflicts(told: str) -> list[str]:
    """The lines of pip's stderr about installed packages that ask for other versions of what it has installed."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", told)  # pip colours its lines
    return [line.strip() for line in plain.splitlines() if "which is incompatible" in line]


def _drop_plugins_of_another_jax(extra: str) -> None:
    """Removes JAX' CUDA packages where no GPU is here and pip has replaced the jax that they belong to: JAX would try them."""
    versions = installed()
    plugins = [name for name in versions if name.startswith("jax-cuda") and versions[name] != versions["jaxlib"]]
    if extra or not plugins:
        return
    print(f"{', '.join(sorted(plugins))} belong to another jax, and no GPU is here: they are removed")
    subprocess.run([sys.executable, "-m", "pip", "uninstall", "--quiet", "--yes", *plugins], capture_output=True, check=True)


def imported(packages: Iterable[str]) -> list[str]:
    """Those of the packages of which this process has imported a module."""
    # A module without a file is a name that packages share, such as google: to import it is to import none of them.
    modules = {name for name, module in list(sys.modules.items()) if "." not in name and getattr(module, "__file__", None)}
    of_modules = importlib.metadata.packages_distributions()
    here = {canonicalize_name(package) for module in modules for package in of_modules.get(module, ())}
    return sorted(here.intersection(packages))
