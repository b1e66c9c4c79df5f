"""The GPUs and TPUs of this machine: what the driver says, what JAX finds, how to install what JAX lacks; and where roles run."""

import contextlib
import dataclasses
import importlib.metadata
import math
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

# Where devices and the driver's files are looked for.
_ROOT = Path("/")
# nvidia-smi may take seconds on a machine with many GPUs.
_DRIVER_SECONDS = 60
# The share of a GPU's memory that JAX may take for all roles on it together, and that it takes for one process by default.
_LARGEST_SHARE, DEFAULT_SHARE = 0.95, 0.75
# What a process holds of a GPU beside JAX' memory, about: its CUDA context, and buffers of NCCL and other libraries.
CONTEXT_BYTES = 3 << 28
# Devices on the PCI bus that are TPU chips: Google's number as a vendor, and those of v3, v4, v5p, v5e, v6e and 7x.
_GOOGLE, _TPU_CHIPS = "0x1ae0", ("0x0027", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076")
_DRIVERS = {"cuda13": 580, "cuda12": 525}  # the oldest driver that JAX' support for each CUDA works with
# Kind of a role -> the section of the config with its mesh, its task_devices and its memory_fraction.
_SECTIONS = {"trainer": "learner", "searcher": "searchers", "evaluator": "evaluation"}

_ON_CPU = "ask for the CPU by JAX_PLATFORMS=cpu"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpu:
    """A CUDA device. name: as in CUDA_VISIBLE_DEVICES. kind: what the driver calls it, as jax.Device.device_kind. memory, free:
    bytes, all of them and those that no process holds now; None: not known."""

    name: str
    kind: str = "GPU"
    memory: int | None = None
    free: int | None = None

    def usable_share(self, roles: int) -> float:
        """The share of the memory that so many roles may take together."""
        if self.memory is None:
            return _LARGEST_SHARE
        free = self.memory if self.free is None else self.free
        return max(0.0, min(_LARGEST_SHARE, (free - roles * CONTEXT_BYTES) / self.memory))


def filled(gpus: Sequence[Gpu]) -> str:
    """The end of a sentence about GPUs of which other processes hold a good part, and what to do; "" where there is none."""
    held = [
        f"{(gpu.memory - gpu.free) / (1 << 30):.1f} of the {gpu.memory / (1 << 30):.1f} GiB of GPU {gpu.name}"
        for gpu in gpus
        if gpu.memory is not None and gpu.free is not None and gpu.free < _LARGEST_SHARE * gpu.memory
    ]
    return f"; other processes hold {', '.join(held)}: end them, or name other GPUs by CUDA_VISIBLE_DEVICES" if held else ""


def visible() -> tuple[Gpu, ...]:
    """The GPUs that this process may use: those of CUDA_VISIBLE_DEVICES, or all; () where JAX_PLATFORMS asks for no GPU.
    Raises ValueError: CUDA_VISIBLE_DEVICES has a number that the driver does not list, or the driver does not answer."""
    if os.environ.get("JAX_PLATFORMS", "").startswith(("cpu", "tpu")):
        return ()
    listed, asked = _listed_by_driver(), os.environ.get("CUDA_VISIBLE_DEVICES")
    if asked is None:
        return tuple(gpu for _, gpu in listed)
    names, numbers = [name.strip() for name in asked.split(",")], [gpu.name for _, gpu in listed]
    if numbers and (unknown := [name for name in names if name.isdecimal() and name not in numbers]):
        there = f"the driver lists {', '.join(numbers)}"
        raise ValueError(f"CUDA_VISIBLE_DEVICES={','.join(names)} names GPU {', '.join(unknown)}; {there}")

    def known(name: str) -> Gpu:
        same = (gpu for uuid, gpu in listed if gpu.name == name or (name.startswith("GPU-") and uuid.startswith(name)))
        return dataclasses.replace(next(same, Gpu(name=name)), name=name)

    return tuple(known(name) for name in names if name not in ("", "-1"))


def _listed_by_driver() -> list[tuple[str, Gpu]]:
    """(UUID, GPU by its number) of each GPU of this machine, [] without a driver."""
    if shutil.which("nvidia-smi") is None:
        return []
    asked = ["nvidia-smi", "--query-gpu=index,uuid,name,memory.total,memory.free", "--format=csv,noheader,nounits"]
    try:
        listed = subprocess.run(asked, capture_output=True, text=True, check=False, timeout=_DRIVER_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise ValueError(f"nvidia-smi has not answered for {_DRIVER_SECONDS} s: the driver of the GPUs hangs") from error
    found = []
    for line in listed.stdout.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == 5 and fields[0].isdecimal():
            memory, free = (int(size) << 20 if size.isdecimal() else None for size in fields[3:])
            found.append((fields[1], Gpu(name=fields[0], kind=fields[2], memory=memory, free=free)))
    return found


def check_free() -> None:
    """Raises ValueError where others hold so much of this process' GPUs that the share is not free which JAX takes when it first
    looks for devices. Without XLA_PYTHON_CLIENT_PREALLOCATE, JAX takes memory as it needs it, and nothing is checked."""
    if os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE", "true").lower() in ("false", "0"):
        return
    asked = os.environ.get("XLA_CLIENT_MEM_FRACTION") or os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION")
    share = float(asked or DEFAULT_SHARE)
    for gpu in visible():
        if gpu.memory is not None and gpu.free is not None and gpu.free < gpu.memory * share:
            free, wanted, there = (size / (1 << 30) for size in (gpu.free, gpu.memory * share, gpu.memory))
            raise ValueError(
                f"GPU {gpu.name} has {free:.1f} GiB free, and this role takes {wanted:.1f} GiB, {share:.0%} of its {there:.1f}"
                f"{filled([gpu])}, or set a lower XLA_CLIENT_MEM_FRACTION"
            )


def jax_devices() -> list[Any]:
    """The devices of this process.
    Raises ValueError: JAX does not use all the GPUs that the process was given, or computes on the CPU beside GPUs or TPUs."""
    import jax

    given, platforms = visible(), os.environ.get("JAX_PLATFORMS", "")
    names = f"this process may use {len(given)} × GPU ({', '.join(gpu.name for gpu in given)})"
    try:
        found = jax.devices()
    except (RuntimeError, AssertionError) as error:  # JAX_PLATFORMS names a platform that JAX cannot use
        told = f"JAX finds no device of JAX_PLATFORMS={platforms}"
        if given:
            raise ValueError(f"{names}, but {told}: {_gpu_advice()}") from error
        reason = f" ({' '.join(str(error).split())[:300]})" if str(error) else ""
        other = f"{told}{reason}: name there a platform that this machine has, such as cpu"
        raise ValueError(unused(told) or other) from error
    told, platform = f"JAX finds {len(found)} × {found[0].device_kind}", found[0].platform
    if given and platform == "cpu":
        raise ValueError(f"{names}, but {told}: {_gpu_advice()}")
    if given and platform != "tpu" and len(found) < len(given):
        raise ValueError(f"{names}, but {told}: name by CUDA_VISIBLE_DEVICES those that it finds, or {_ON_CPU}")
    if platform == "cpu" and (sentence := unused(told)):
        raise ValueError(sentence)
    return found


def unused(found: str) -> str:
    """The sentence on accelerators that are here while JAX uses the CPU; "" where there are none, or where they are not wanted.

    Args: found: what JAX finds, "JAX finds 1 × cpu".
    """
    if os.environ.get("JAX_PLATFORMS", "").startswith("cpu"):
        return ""
    wants_gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() not in ("", "-1")
    if wants_gpus and (nodes := gpu_nodes()):
        return f"this machine has {len(nodes)} × GPU ({', '.join(nodes)}), but {found}: {_gpu_advice()}"
    if chips := tpu_chips():
        return f"this machine has {chips} × TPU chip, but {found}: {_tpu_advice()}"
    return ""


def _gpu_advice() -> str:
    """What to do about GPUs that JAX does not use, as the end of a sentence that has named them."""
    there = [f"{name} {version}" for name, version in installed().items() if "cuda" in name]
    told = f"; the driver here is {driver}" if (driver := driver_version()) else ""
    if there:
        needed = next(oldest for name, oldest in _DRIVERS.items() if name in there[0])
        return (
            f"JAX' support for GPUs is installed ({', '.join(there)}) and does not start: it needs jaxlib of the same version "
            f"(here {importlib.metadata.version('jaxlib')}) and a driver from {needed} on{told}; `python -m tba_jax version` "
            f"prints what JAX says; or {_ON_CPU}"
        )
    return (
        f"JAX' support for GPUs is not installed: {_command('cuda13')} installs it (driver {_DRIVERS['cuda13']} or newer, "
        f"compute capability 7.5 or higher), {_command('cuda12')} that for older ones (driver {_DRIVERS['cuda12']} or "
        f"newer){told}; or {_ON_CPU}"
    )


def _tpu_advice() -> str:
    """What to do about TPU chips that JAX does not use, as the end of a sentence that has named them."""
    if version := installed().get("libtpu"):
        return (
            f"libtpu {version} is installed and does not start, as where another process holds the chips; "
            f"`python -m tba_jax version` prints what JAX says; or {_ON_CPU}"
        )
    return f"libtpu is not installed: {_command('tpu')} installs it, or {_ON_CPU}"


def _command(extra: str) -> str:
    """The command that installs JAX' support for an accelerator beside the JAX that is there."""
    return f"`make venv ACCELERATOR={extra}` or `pip install 'jax[{extra}]=={importlib.metadata.version('jax')}'`"


def installed() -> dict[str, str]:
    """The packages by which JAX uses accelerators, as far as they are installed -> their versions."""
    found = {}
    for name in ("jax-cuda13-plugin", "jax-cuda12-plugin", "libtpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


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
    vendors = (_ROOT / "sys/bus/pci/devices").glob("*/vendor")
    numbers = [[file.read_text().strip() for file in (vendor, vendor.with_name("device"))] for vendor in vendors]
    return sum(vendor == _GOOGLE and device in _TPU_CHIPS for vendor, device in numbers)


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where a role runs. cpus: core numbers. gpus: CUDA device names. memory_fraction: share of the memory of each GPU, 0: JAX'
    default. processes: into which the role is divided, see `split`."""

    cpus: tuple[int, ...]
    gpus: tuple[str, ...] = ()
    memory_fraction: float = 0.0
    processes: int = 1


def available_cpus() -> tuple[int, ...]:
    """The cores that this process may run on."""
    return tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else tuple(range(os.cpu_count() or 1))


def split(placed: Placement) -> list[Placement]:
    """Where each process of a role runs: its cores and GPUs in equal runs; where there are fewer cores, processes share them.
    Raises ValueError where the GPUs of the role do not divide over its processes."""
    count, names = placed.processes, ",".join(placed.gpus)
    if len(placed.gpus) % count:
        raise ValueError(f"trainer.processes={count} does not divide the {len(placed.gpus)} GPUs of the trainer ({names})")
    gpus, cpus = len(placed.gpus) // count, len(placed.cpus)

    def cores(number: int) -> tuple[int, ...]:
        own = placed.cpus[number * cpus // count : (number + 1) * cpus // count]
        return own or placed.cpus[number % max(cpus, 1) :][:1]

    return [
        dataclasses.replace(placed, processes=1, cpus=cores(number), gpus=placed.gpus[number * gpus : (number + 1) * gpus])
        for number in range(count)
    ]


def place(
    config: Any, *, cpus: Sequence[int], gpus: Sequence[Gpu], check: Callable[[int], object] = lambda devices: None
) -> dict[str, Placement]:
    """Role name -> placement: trainer, searcher-0 …, and evaluator if there is one.

    Cores: the trainer gets half, the searchers share the other half, and the evaluator uses the searchers'. GPUs: searchers and
    evaluator take turns on the last GPUs, each on as many as the largest of their meshes makes up; the trainer gets the most of
    the others that its mesh fits. Where the GPUs are too few for that, all roles are on the same ones.

    Args: check: raises ValueError where the trainer's mesh does not fit so many GPUs.

    Raises: ValueError: the mesh of a role does not fit the GPUs, or they do not divide over trainer.processes; names the numbers.
    """
    searchers = [f"searcher-{i}" for i in range(config.searchers.count)]
    half = max(1, len(cpus) // 2)
    search = tuple(cpus[half:]) or tuple(cpus[:half])
    cores = {"trainer": tuple(cpus[:half]), "evaluator": search}
    cores |= {name: search[i :: len(searchers)] or (search[i % len(search)],) for i, name in enumerate(searchers)}
    names = ["trainer", *searchers, *(["evaluator"] if config.evaluation.enabled else [])]
    on = _deal(config, names, gpus, check) if gpus else {}
    found = {
        name: Placement(
            cores[name],
            tuple(gpu.name for gpu in on.get(name, ())),
            memory_fraction=_memory_fraction(config, name, on) if name in on else 0.0,
            processes=config.trainer.processes if name == "trainer" else 1,
        )
        for name in names
    }
    split(found["trainer"])  # which refuses GPUs that do not divide over its processes
    return found


def _fewest(config: Any, name: str) -> int:
    """GPUs that the mesh and the task_devices of a role make up at least."""
    section = config[_SECTIONS[name.split("-")[0]]]
    return math.prod(max(size, 1) for size in section.mesh.values()) + int(section.get("task_devices", 0))


def _deal(config: Any, names: Sequence[str], gpus: Sequence[Gpu], check: Callable[[int], object]) -> dict[str, tuple[Gpu, ...]]:
    """Role name -> its GPUs. Args, Raises: see `place`; names: the trainer first."""
    for name in names:
        if (fewest := _fewest(config, name)) > len(gpus):
            section = _SECTIONS[name.split("-")[0]]
            also = "" if name == "trainer" else f" and {section}.task_devices"
            raise ValueError(f"{section}.mesh{also} make up {fewest} GPUs for {name}; there are {len(gpus)}")
    trainer, *others = names
    least, block = _fewest(config, trainer), max((_fewest(config, name) for name in others), default=1)
    blocks = min(len(others), (len(gpus) - least) // block)
    own = len(gpus) - blocks * block  # all of them where no block is left
    area = gpus[own:] if blocks else gpus
    blocks = max(blocks, len(area) // block)
    on = {trainer: tuple(gpus[: _of_trainer(own, least, check)])}
    for i, name in enumerate(others):
        its = area[i % blocks * block :][:block]
        on[name] = tuple(its[block - _fewest(config, name) :])
    return on


def _of_trainer(room: int, least: int, check: Callable[[int], object]) -> int:
    """The largest number of GPUs up to `room` that the trainer's mesh fits. Raises the ValueError about the least."""
    for count in range(room, least, -1):
        with contextlib.suppress(ValueError):
            check(count)
            return count
    check(least)
    return least


def _memory_fraction(config: Any, name: str, on: Mapping[str, Sequence[Gpu]]) -> float:
    """A role's memory_fraction where it shares a GPU. Where that is 0, a trainer takes half of what such roles leave, and the
    others equal parts of the rest. Raises ValueError where the fractions of the roles on a GPU exceed what may be taken."""

    def fixed(role: str) -> float:
        return float(config[_SECTIONS[role.split("-")[0]]].memory_fraction)

    shares = []
    for gpu in on[name]:
        roles = [role for role, its in on.items() if gpu in its]
        usable, given = gpu.usable_share(len(roles)), sum(map(fixed, roles)) if len(roles) > 1 else 0.0
        if given > usable or usable <= 0:
            settings = ", ".join(f"{_SECTIONS[role.split('-')[0]]}.memory_fraction={fixed(role)} of {role}" for role in roles)
            raise ValueError(f"GPU {gpu.name}: {usable:.2f} of its memory may be taken, too little for {settings}{filled([gpu])}")
        open_roles = [role for role in roles if not (given and fixed(role))]
        weights = {role: max(len(open_roles) - 1, 1) if role == "trainer" else 1 for role in open_roles}
        share = (usable - given) * weights[name] / sum(weights.values()) if name in weights else fixed(name)
        shares.append(share)
    return math.floor(min(shares) * 1000 + 1e-6) / 1000
