"""Prints the versions, devices and settings of this environment that a bug report needs.

python -m tba_jax version [--json]

A process of its own asks JAX for its devices: a driver that fails or hangs is reported with the rest. The only
environment variables that are printed are those that steer JAX and its libraries.
"""

import json
import os
import platform
import subprocess
import sys
from typing import Any

from absl import flags

from tba_jax.commands import command_line
from tba_jax.outputs import visible
from tba_jax.roles import gpus
from tba_jax.run import processes
from tba_jax.schemas import flatten
from tba_jax.telemetry import status

_PREFIXES = ("JAX_", "XLA_", "TPU_", "LIBTPU_", "NCCL_", "CUDA_", "NVIDIA_", "TF_CPP_")
_NAMES = ("LD_LIBRARY_PATH", "OMP_NUM_THREADS", "HF_HUB_OFFLINE", "GLIBC_TUNABLES")
_DEVICE_SECONDS, _MOST_LINES = 120, 12  # JAX may take a minute on a large machine; lines of what it says
_ASK = "import json, jax; print(json.dumps([f'{each.platform}: {each.device_kind}' for each in jax.devices()]))"


def add_flags(values: flags.FlagValues) -> None:
    flags.DEFINE_bool("json", False, "print one JSON object", flag_values=values)


def run(given: command_line.Given) -> int:
    told = gather()
    print(json.dumps(told, indent=2) if given.json else visible(describe(told)))
    return 0


def gather() -> dict[str, Any]:
    """All that is printed, by name."""
    devices, said = ask_devices()
    return {
        "tba_jax": status.code(),
        "versions": status.versions() | gpus.installed(),
        "python": sys.executable,
        "system": platform.platform(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(processes.memory() / (1 << 30), 1),
        "devices": devices,
        "jax_says": said,
        "nvidia_driver": gpus.driver_version(),
        "gpu_nodes": gpus.gpu_nodes(),
        "tpu_chips": gpus.tpu_chips(),
        "environment": {
            name: value for name, value in sorted(os.environ.items()) if name.startswith(_PREFIXES) or name in _NAMES
        },
    }


def ask_devices() -> tuple[list[str], list[str]]:
    """The devices that JAX finds, [] where it does not start, and the last lines that it wrote to stderr."""
    its_own = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # memory that a run beside it may need
    told: dict[str, Any] = dict(env=its_own, capture_output=True, text=True, errors="replace", timeout=_DEVICE_SECONDS)
    try:
        done = subprocess.run([sys.executable, "-c", _ASK], check=False, **told)
    except subprocess.TimeoutExpired:
        return [], [f"JAX has not found its devices within {_DEVICE_SECONDS} s"]
    lines = done.stderr.strip().splitlines()[-_MOST_LINES:]
    if done.returncode:
        return [], [*lines, f"the process that asks JAX for its devices ended with code {done.returncode}"]
    devices: list[str] = json.loads(done.stdout.splitlines()[-1])
    return devices, lines


def describe(told: dict[str, Any]) -> str:
    """The text that is printed: a line for each fact, then what JAX says."""
    facts = {name: str(value) for name, value in flatten(told | {"devices": ", ".join(told["devices"])}).items()}
    facts["tba_jax.commit"] = facts["tba_jax.commit"] or "none, not in a git checkout"
    facts["devices"] = facts["devices"] or "none: JAX does not start, see below"
    said = facts.pop("jax_says") and told["jax_says"]
    width = max(map(len, facts))
    lines = [f"{name:{width}}  {value}".rstrip() for name, value in facts.items()]
    return "\n".join([*lines, *(["", "JAX says:", *(f"  {line}" for line in said)] if said else [])])
