"""The device that is measured, found in processes of their own: the suite's own process takes no memory of it."""

import dataclasses
import functools
import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence

from tba_jax.roles import gpus

# nvidia-smi and a library's first import may take long on a machine that has just started.
_SECONDS = 120.0
_FIND = """
import json, jax
import benchmarks.gpu.measure
device = jax.devices()[0]
stats = device.memory_stats() or {}
print(json.dumps({"platform": device.platform, "kind": device.device_kind, "bytes": stats.get("bytes_limit", 0)}))
"""
_TORCH = """
import json, torch, transformers
print(json.dumps({"version": torch.__version__, "gpu": torch.cuda.is_available()}))
"""
_NAMED = ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "libtpu", "nvidia-cudnn-cu13", "nvidia-cudnn-cu12", "flax")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
    """platform: "gpu", "tpu" or "cpu"; kind: as JAX calls it.

    memory: bytes of an NVIDIA GPU; bytes: those that JAX may take of the device; both 0 where they are not known. driver: of an
    NVIDIA GPU. versions: of libraries, by name. without_torch: why PyTorch is not compared with, "" where it is.
    """

    platform: str
    kind: str
    memory: int = 0
    bytes: int = 0
    driver: str = ""
    versions: dict[str, str] = dataclasses.field(default_factory=dict)
    without_torch: str = ""

    @property
    def torch(self) -> bool:
        return not self.without_torch


def take_one() -> list[str]:
    """Of several NVIDIA GPUs, leaves the first to this process and its children. Returns a sentence that says so, if it did.

    Raises ValueError, see gpus.visible.
    """
    visible = gpus.visible()
    if len(visible) < 2:
        return []
    os.environ |= {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": visible[0].name}
    return [f"GPU {visible[0].name} is measured, one of {len(visible)}."]


def find() -> Device:
    """The first device of JAX.

    Raises:
      ValueError: JAX does not start, or does not use the GPU that the driver lists, or a package is missing; in a sentence.
    """
    visible = gpus.visible()
    done, said = _ask(_FIND)
    if not done:
        asked = os.environ.get("JAX_PLATFORMS")
        of = f" (JAX_PLATFORMS={asked})" if asked else ""
        raise ValueError(f"JAX or the project does not start{of}: {said}")
    if visible and done["platform"] == "cpu":
        raise ValueError(
            f"the driver lists {visible[0].kind}, but JAX finds only the CPU: install JAX' support for GPUs "
            "(pip install 'jax[cuda13]' or 'jax[cuda12]'), or ask for the CPU form by JAX_PLATFORMS=cpu"
        )
    without_torch = _without_torch(done["platform"])
    named = (*_NAMED, *(() if without_torch else ("torch", "transformers")))
    return Device(
        platform=done["platform"],
        kind=done["kind"],
        memory=(visible[0].memory or 0) if visible else 0,
        bytes=done["bytes"],
        driver=driver(),
        versions={name: version for name in named if (version := _version(name))},
        without_torch=without_torch,
    )


def _ask(code: str) -> tuple[dict, str]:
    """What a Python process prints as its last line, a JSON object; {} and its last words where it failed."""
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        return {}, f"no answer within {_SECONDS:.0f} s"
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1]), ""
    return {}, next((line for line in reversed(done.stderr.splitlines()) if line.strip()), f"exit status {done.returncode}")


def _without_torch(platform: str) -> str:
    """Why PyTorch is not compared with, "" where it is."""
    if platform == "tpu":
        return "it is not measured on TPUs"
    if lacks := [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]:
        return f"{' and '.join(lacks)} {'is' if len(lacks) == 1 else 'are'} not installed"
    found, said = _ask(_TORCH)
    if not found:
        return f"it does not start: {said}"
    return "" if platform == "cpu" or found["gpu"] else f"torch {found['version']} finds no GPU"


@functools.cache
def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def warnings(found: Device, visible: Sequence[gpus.Gpu]) -> list[str]:
    """Sentences about what the rows will lack, or what disturbs them."""
    told = []
    if found.without_torch:
        told.append(f"Nothing is compared with PyTorch: {found.without_torch}.")
    if held := gpus.filled(visible):
        told.append(f"The figures are disturbed{held}.")
    return told


def driver() -> str:
    """The driver's version as nvidia-smi gives it, "" where there is none."""
    if shutil.which("nvidia-smi") is None:
        return ""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip().splitlines()[0] if done.returncode == 0 and done.stdout.strip() else ""
