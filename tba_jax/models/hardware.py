"""What a kind of device computes with: defaults by platform, and stand-ins for a compute dtype or an attention that it lacks."""

import dataclasses
import logging
import re
from typing import Any, TypeVar

from tba_jax.models.config import ModelConfig

AUTO = "auto"

# Setting -> platform of JAX -> default. On GPUs and TPUs none of them is measured yet.
DEFAULTS: dict[str, dict[str, Any]] = {
    # CPUs have no other kernel. cudnn and splash keep no scores; xla stands in for cudnn where that lacks dtype or head size.
    "model.attention": {"cpu": "xla", "gpu": "cudnn", "tpu": "splash"},
    # The least memory. On two CPU cores (2026-11-24), dots and none take .90 and 1.24 of its time, 1.7 and 4.0 of its memory.
    "learner.remat": {"cpu": "full", "gpu": "full", "tpu": "full"},
    # On two CPU cores (2026-11-24), 8, 16, 32 and 64 steps differ by 4 % at most.
    "searchers.decode_chunk": {"cpu": 32, "gpu": 32, "tpu": 32},
}


log = logging.getLogger(__name__)


def value(setting: str, given: Any, platform: str) -> Any:
    """The value of a setting on a platform. Args: given: by the user, "auto" or 0 where the device decides."""
    of_platform = DEFAULTS[setting]
    return of_platform.get(platform, of_platform["gpu"]) if given in (AUTO, 0) else given


C = TypeVar("C", bound=ModelConfig)

# The compute capability of the first NVIDIA GPUs with bfloat16, which cuDNN's flash attention needs too: Ampere's.
_BFLOAT16 = (8, 0)
# Kernel of attention -> the platform that has it, and what that is in words.
_PLATFORMS = {"cudnn": ("gpu", "an NVIDIA GPU"), "splash": ("tpu", "a TPU")}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hardware:
    """A kind of device.

    platform: "cpu", "gpu" or "tpu". kind: its name, such as "Tesla T4". capability: the compute capability of an NVIDIA GPU, such
    as (7, 5); None: it has none.
    """

    platform: str
    kind: str
    capability: tuple[int, int] | None = None


def of(device: Any) -> Hardware:
    """The kind of a jax.Device, or of a device of a topology."""
    found = re.fullmatch(r"(\d+)\.(\d+)", str(getattr(device, "compute_capability", "")))  # AMD's is a name
    capability = (int(found[1]), int(found[2])) if found and device.platform == "gpu" else None
    return Hardware(platform=device.platform, kind=device.device_kind, capability=capability)


def check(model: ModelConfig, hardware: Hardware) -> None:
    """Raises ValueError where model.attention names a kernel of another platform."""
    platform, words = _PLATFORMS.get(model.attention, (hardware.platform, ""))
    if hardware.platform != platform:
        raise ValueError(f"model.attention={model.attention} needs {words}; JAX found {hardware.platform} ({hardware.kind})")


def on_device(model: C, device: Any, *, section: str) -> C:
    """The model as a kind of device computes it; the log says what stands in for a setting that was given.

    Without bfloat16 a model computes in float32, and without cuDNN's flash attention by XLA's. Raises ValueError as `check`.
    Args: device: see `of`; section: of the settings, as in "model".
    """
    hardware, changes = of(device), dict[str, Any]()
    check(model, hardware)
    capability = ".".join(map(str, hardware.capability or ()))
    where = f"{hardware.kind} (compute capability {capability})" if capability else hardware.kind
    if model.compute_dtype == "bfloat16" and hardware.capability is not None and hardware.capability < _BFLOAT16:
        changes["compute_dtype"] = "float32"
        log.warning("%s.compute_dtype=bfloat16: %s has no bfloat16, so float32 is used here", section, where)
    if hardware.platform == "gpu" and (hardware.capability or (0, 0)) < _BFLOAT16 and model.attention in ("auto", "cudnn"):
        changes["attention"] = "xla"
        if model.attention == "cudnn":
            log.warning("%s.attention=cudnn: %s lacks cuDNN's flash attention, so xla is used here", section, where)
    return dataclasses.replace(model, **changes)
