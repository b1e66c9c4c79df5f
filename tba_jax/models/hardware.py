"""What devices compute: defaults by platform, stand-ins for a compute dtype or an attention that a device lacks, and FLOPs.

FLOPs of a decoder follow from its shape: two for each weight and token of a matrix product, and those of attention. Norms,
activations and softmax are left out; so are positions that a causal mask hides.
"""

import dataclasses
import logging
import re
from typing import Any, TypeVar

import numpy as np

from tba_jax.models.config import DecoderConfig, ModelConfig

AUTO = "auto"

# Setting -> platform of JAX -> default. On GPUs and TPUs none of them is measured yet.
DEFAULTS: dict[str, dict[str, Any]] = {
    # cudnn and splash keep no scores; xla stands in for cudnn where that lacks dtype or head size.
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
    """A kind of device, such as platform "gpu", kind "Tesla T4" and the compute capability (7, 5) that NVIDIA GPUs have."""

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
    """The model as a kind of device computes it: without bfloat16 in float32, without cuDNN's flash attention by XLA's. The log
    says what stands in for a setting that was given. Raises ValueError as `check`. Args: section: of the settings, as in
    "model"."""
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


def passes(*, adapters: bool, held_reference: bool) -> int:
    """How often an update computes what a forward pass does.

    Args: adapters: whether only these are trained; held_reference: whether the update scores the rows by a reference first.
    """
    # Forward, and backward towards activations and weights; weights that stay need no gradient.
    return (2 if adapters else 3) + held_reference


def layer_weights(model: DecoderConfig) -> int:
    """The weights of all layers that each token is multiplied with."""
    D, N, G, H, F = model.width, model.heads, model.kv_heads, model.head_size, model.ffn
    of_experts = model.experts_per_token * D * F * 3 + D * model.experts
    return model.layers * (D * H * (2 * N + 2 * G) + (of_experts if model.experts else D * F * (3 if model.gated else 2)))


def head_weights(model: DecoderConfig) -> int:
    """The weights of the map to the vocabulary."""
    return model.width * model.vocab


def attention_flops(model: DecoderConfig, positions: int | np.ndarray) -> int:
    """FLOPs of the attention of the first `positions` tokens of a row, each to itself and to those before it, in all layers.

    Args: positions: of one row, or int64[…] of several, whose FLOPs are added up.
    """
    total = 0
    for local in set(model.local_layers):
        window = model.window if local else 0
        near = np.minimum(positions, window) if window else np.asarray(positions)
        pairs = near * (near + 1) // 2 + (positions - near) * window  # Σ min(t, window) over t = 1 … positions
        total += model.local_layers.count(local) * int(pairs.sum())
    return 4 * model.heads * model.head_size * total


def forward_flops(model: DecoderConfig, *, positions: int, logits: int) -> int:
    """FLOPs of one row: `positions` tokens through all layers, `logits` of them to the vocabulary."""
    return 2 * layer_weights(model) * positions + 2 * head_weights(model) * logits + attention_flops(model, positions)
