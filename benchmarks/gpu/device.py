"""The device that is measured, found in a process of its own: the suite's own process takes no memory of it."""

import dataclasses
import importlib.util
import json
import shutil
import subprocess
import sys

_FIND = """
import json, jax
device = jax.devices()[0]
stats = device.memory_stats() or {}
print(json.dumps({"platform": device.platform, "kind": device.device_kind, "bytes": stats.get("bytes_limit", 0),
  "jax": jax.__version__, "jaxlib": jax.lib.__version__}))
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
    """platform: "gpu", "tpu" or "cpu"; kind: as JAX calls it; bytes: that JAX may take of it, 0 where it does not say.

    driver: of an NVIDIA GPU. versions: of libraries, by name. torch: whether PyTorch is there to be compared with.
    """

    platform: str
    kind: str
    bytes: int
    driver: str
    versions: dict[str, str]
    torch: bool


def find() -> Device:
    """The first device of JAX. Raises RuntimeError: JAX does not start; with what it said."""
    done = subprocess.run([sys.executable, "-c", _FIND], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"JAX found no device: {done.stderr.strip().splitlines()[-1:]}")
    told = json.loads(done.stdout.splitlines()[-1])
    has_torch = all(importlib.util.find_spec(name) for name in ("torch", "transformers"))
    versions = {name: told[name] for name in ("jax", "jaxlib")} | (_torch_version() if has_torch else {})
    return Device(
        platform=told["platform"],
        kind=told["kind"],
        bytes=told["bytes"],
        driver=driver(),
        versions=versions,
        torch=has_torch,
    )


def _torch_version() -> dict[str, str]:
    import importlib.metadata

    return {name: importlib.metadata.version(name) for name in ("torch", "transformers")}


def driver() -> str:
    """The driver's version as nvidia-smi gives it, "" where there is none."""
    if shutil.which("nvidia-smi") is None:
        return ""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.strip().splitlines()[0] if done.returncode == 0 and done.stdout.strip() else ""
