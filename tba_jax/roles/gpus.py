"""The NVIDIA GPUs of this machine, by what the driver says: nothing here makes a process take memory of one."""

import dataclasses
import os
import shutil
import subprocess
from collections.abc import Sequence
from typing import Any

from tba_jax.roles import jax_support

# nvidia-smi may take seconds on a machine with many GPUs.
_DRIVER_SECONDS = 60
# The share of a GPU's memory that JAX may take for all roles on it together.
_LARGEST_SHARE = 0.95
# The share that JAX takes of a GPU for one process where nobody asks for another one.
DEFAULT_SHARE = 0.75
# What a process holds of a GPU beside JAX' memory, about: its CUDA context, and buffers of NCCL and other libraries.
CONTEXT_BYTES = 3 << 28


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

    Raises:
      ValueError: CUDA_VISIBLE_DEVICES has a number that the driver does not list, or the driver does not answer.
    """
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

    Raises:
      ValueError: JAX does not use all the GPUs that the process was given, or computes on the CPU beside GPUs or TPUs.
    """
    import jax

    given, platforms = visible(), os.environ.get("JAX_PLATFORMS", "")
    names = f"this process may use {len(given)} × GPU ({', '.join(gpu.name for gpu in given)})"
    try:
        found = jax.devices()
    except (RuntimeError, AssertionError) as error:  # JAX_PLATFORMS names a platform that JAX cannot use
        told = f"JAX finds no device of JAX_PLATFORMS={platforms}"
        if given:
            raise ValueError(f"{names}, but {told}: {jax_support.gpu_advice()}") from error
        reason = f" ({' '.join(str(error).split())[:300]})" if str(error) else ""
        other = f"{told}{reason}: name there a platform that this machine has, such as cpu"
        raise ValueError(jax_support.unused(told) or other) from error
    told, platform = f"JAX finds {len(found)} × {found[0].device_kind}", found[0].platform
    if given and platform == "cpu":
        raise ValueError(f"{names}, but {told}: {jax_support.gpu_advice()}")
    if given and platform != "tpu" and len(found) < len(given):
        advice = "name by CUDA_VISIBLE_DEVICES those that it finds, or ask for the CPU by JAX_PLATFORMS=cpu"
        raise ValueError(f"{names}, but {told}: {advice}")
    if platform == "cpu" and (sentence := jax_support.unused(told)):
        raise ValueError(sentence)
    return found
