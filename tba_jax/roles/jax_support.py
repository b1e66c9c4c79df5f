"""The GPUs and TPUs of this machine that JAX lacks the support for, and the command that installs it."""

import contextlib
import importlib.metadata
import os
import re
from pathlib import Path

# Where devices and the driver's files are looked for.
_ROOT = Path("/")
# Devices on the PCI bus that are TPU chips: Google's number as a vendor, and those of v3, v4, v5p, v5e, v6e and 7x.
_GOOGLE, _TPU_CHIPS = "0x1ae0", ("0x0027", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076")
_DRIVERS = {"cuda13": 580, "cuda12": 525}  # the oldest driver that JAX' support for each CUDA works with


def driver_version() -> str:
    """The version of the NVIDIA driver's kernel module, such as "580.65.06"; "" where there is none."""
    with contextlib.suppress(OSError):
        if found := re.search(r"\b(\d{3,}\.\d+(?:\.\d+)?)\b", (_ROOT / "proc/driver/nvidia/version").read_text()):
            return found[1]
    return ""


def gpu_nodes() -> list[str]:
    """The devices in /dev that are NVIDIA GPUs: a container has those that it was started with."""
    return [f"/dev/{path.name}" for path in sorted((_ROOT / "dev").glob("nvidia[0-9]*"))]


def hidden_gpus() -> str:
    """The sentence on GPUs of the machine that this process cannot open; "" where there are none, or JAX is to use the CPU."""
    count = sum(1 for _ in (_ROOT / "proc/driver/nvidia/gpus").glob("*"))
    if not count or gpu_nodes() or os.environ.get("JAX_PLATFORMS", "").startswith("cpu"):
        return ""
    return (
        f"the machine has {count} × GPU (/proc/driver/nvidia/gpus), and this process was given none: there is no /dev/nvidia0. "
        "A container is given them by `docker run --gpus=all`, a Slurm job by --gres=gpu:1"
    )


def tpu_chips() -> int:
    """How many TPU chips this machine has, 0 where this process cannot open them, as in a container that was given none."""
    if not [*(_ROOT / "dev").glob("accel[0-9]*"), *(_ROOT / "dev/vfio").glob("[0-9]*")]:
        return 0
    found = 0
    for vendor in (_ROOT / "sys/bus/pci/devices").glob("*/vendor"):
        numbers = [file.read_text().strip() for file in (vendor, vendor.with_name("device"))]
        found += numbers[0] == _GOOGLE and numbers[1] in _TPU_CHIPS
    return found


def installed() -> dict[str, str]:
    """The packages by which JAX uses accelerators, as far as they are installed -> their versions."""
    found = {}
    for name in ("jax-cuda13-plugin", "jax-cuda12-plugin", "libtpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def gpu_advice() -> str:
    """What to do about GPUs that JAX does not use, as the end of a sentence that has named them."""
    there = [f"{name} {version}" for name, version in installed().items() if "cuda" in name]
    driver = driver_version()
    told = f"; the driver here is {driver}" if driver else ""
    if there:
        needed = next(oldest for name, oldest in _DRIVERS.items() if name in there[0])
        return (
            f"JAX' support for GPUs is installed ({', '.join(there)}) and does not start: it needs jaxlib of the same version "
            f"(here {importlib.metadata.version('jaxlib')}) and a driver from {needed} on{told}; `python -m tba_jax version` "
            "prints what JAX says; or ask for the CPU by JAX_PLATFORMS=cpu"
        )
    return (
        f"JAX' support for GPUs is not installed: {command('cuda13')} installs it (driver {_DRIVERS['cuda13']} or newer, compute "
        f"capability 7.5 or higher), {command('cuda12')} that for older ones (driver {_DRIVERS['cuda12']} or newer){told}; "
        "or ask for the CPU by JAX_PLATFORMS=cpu"
    )


def tpu_advice() -> str:
    """What to do about TPU chips that JAX does not use, as the end of a sentence that has named them."""
    if version := installed().get("libtpu"):
        return (
            f"libtpu {version} is installed and does not start, as where another process holds the chips; "
            "`python -m tba_jax version` prints what JAX says; or ask for the CPU by JAX_PLATFORMS=cpu"
        )
    return f"libtpu is not installed: {command('tpu')} installs it, or ask for the CPU by JAX_PLATFORMS=cpu"


def command(extra: str) -> str:
    """The command that installs JAX' support for an accelerator beside the JAX that is there."""
    return f"`make venv ACCELERATOR={extra}` or `pip install 'jax[{extra}]=={importlib.metadata.version('jax')}'`"


def unused(found: str) -> str:
    """The sentence on accelerators that are here while JAX uses the CPU; "" where there are none, or where they are not wanted.

    Args: found: what JAX finds, "JAX finds 1 × cpu".
    """
    if os.environ.get("JAX_PLATFORMS", "").startswith("cpu"):
        return ""
    wants_gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() not in ("", "-1")
    if wants_gpus and (nodes := gpu_nodes()):
        return f"this machine has {len(nodes)} × GPU ({', '.join(nodes)}), but {found}: {gpu_advice()}"
    if chips := tpu_chips():
        return f"this machine has {chips} × TPU chip, but {found}: {tpu_advice()}"
    return ""
