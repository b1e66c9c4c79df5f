"""What a model computes with on a kind of device that lacks the compute dtype or the attention which was asked for."""

import dataclasses
import logging
import re
from typing import Any, TypeVar

from tba_jax.models.config import ModelConfig

log = logging.getLogger(__name__)

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

    @property
    def bfloat16(self) -> bool:
        """Whether the device computes in bfloat16; that of others than NVIDIA's GPUs is taken for granted."""
        return self.capability is None or self.capability >= _BFLOAT16

    @property
    def cudnn(self) -> bool:
        """Whether the device has cuDNN's flash attention."""
        return self.platform == "gpu" and self.capability is not None and self.capability >= _BFLOAT16


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


def suited(model: C, hardware: Hardware, *, section: str) -> tuple[C, list[str]]:
    """The model as these devices compute it, and a sentence for each setting that another value stands in for.

    Without bfloat16 a model computes in float32, and without cuDNN's flash attention by XLA's.

    Args: section: of the settings, as in "model".

    Raises:
      ValueError: see `check`.
    """
    check(model, hardware)
    changes: dict[str, Any] = {}
    sentences = []
    capability = ".".join(map(str, hardware.capability or ()))
    where = f"{hardware.kind} (compute capability {capability})" if capability else hardware.kind
    if model.compute_dtype == "bfloat16" and not hardware.bfloat16:
        changes["compute_dtype"] = "float32"
        sentences.append(f"{section}.compute_dtype=bfloat16: {where} has no bfloat16, so float32 is used here")
    if hardware.platform == "gpu" and not hardware.cudnn and model.attention in ("auto", "cudnn"):
        changes["attention"] = "xla"
        if model.attention == "cudnn":
            sentences.append(f"{section}.attention=cudnn: {where} lacks cuDNN's flash attention, so xla is used here")
    return dataclasses.replace(model, **changes), sentences


def on_device(model: C, device: Any, *, section: str) -> C:
    """`suited` for a device; the log says what is used in place of what was asked for."""
    found, sentences = suited(model, of(device), section=section)
    for sentence in sentences:
        log.warning(sentence)
    return found
