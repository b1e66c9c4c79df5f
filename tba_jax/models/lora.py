"""Low-rank adapters (LoRA, Hu et al., 2021): the choice of linear maps, and merging of arrays that are not on devices.

The linear map itself, layers.Einsum, says what an adapter computes.
"""

import dataclasses
import fnmatch
import math
from typing import Any

import numpy as np
from flax import nnx

from tba_jax.models import parameters
from tba_jax.models.layers import linear_maps
from tba_jax.models.parameters import Params


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """rank; alpha: the update is scaled by alpha / rank; targets: patterns (`*`, `?`) of the names of linear maps, as
    "layers.attention.query" or "layers.*"."""

    rank: int
    alpha: float
    targets: tuple[str, ...]

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


def adapt(model: nnx.Module, lora: LoraConfig, rngs: nnx.Rngs) -> None:
    """Adds adapters to the linear maps that lora.targets name.

    Raises:
      ValueError: a pattern of lora.targets matches no linear map, or a map is too small for the rank; names the setting.
    """
    linears = dict(linear_maps(model))
    for pattern in lora.targets:
        if not any(fnmatch.fnmatchcase(name, str(pattern)) for name in linears):
            raise ValueError(
                f"lora.targets: {pattern!r} matches no linear map of the model; there are {sorted(linears)} "
                """(several are given as '("layers.attention.query", "layers.attention.value")')"""
            )
    for name, linear in sorted(linears.items()):
        if not any(fnmatch.fnmatchcase(name, pattern) for pattern in lora.targets):
            continue
        sizes = linear.sizes()
        fan_in, fan_out = (math.prod(sizes[letter] for letter in letters) for letters in (linear.inputs, linear.outputs))
        if lora.rank > min(fan_in, fan_out):
            raise ValueError(
                f"lora.rank={lora.rank} is more than {name} can have, which maps {fan_in} to {fan_out} numbers: "
                "lower it, or leave the map out of lora.targets"
            )
        linear.adapt(lora.rank, lora.scale, rngs)


def merge_lazily(base: Params, adapters: Params, lora: LoraConfig) -> Params:
    """`base`, in which every weight that has an adapter is replaced by weight + scale · A B, computed when it is read.

    Args: base, adapters: arrays on the host or in storage.
    """
    merged, flat = parameters.flatten(base), parameters.flatten(adapters)
    for name in [name.removesuffix(".lora_a") for name in flat if name.endswith(".lora_a")]:
        weight = merged[f"{name}.weight"]
        merged[f"{name}.weight"] = MergedWeight(weight, flat[f"{name}.lora_a"], flat[f"{name}.lora_b"], lora.scale)
    return parameters.unflatten(merged)


class MergedWeight:
    """A stacked weight with its adapter, merged one layer at a time as it is read: exports never hold the whole stack."""

    def __init__(self, weight: Any, lora_a: Any, lora_b: Any, scale: float):
        self._parts, self._scale = (weight, lora_a, lora_b), scale
        self.shape = weight.shape

    def __getitem__(self, layer: int) -> np.ndarray:
        return self._merged(*(np.asarray(part[layer]) for part in self._parts))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self._merged(*(np.asarray(part) for part in self._parts)).astype(dtype or np.float32)

    def _merged(self, weight: np.ndarray, lora_a: np.ndarray, lora_b: np.ndarray) -> np.ndarray:
        """weight + scale · A B in float32, for one layer or for the stack."""
        weight, lora_a, lora_b = (part.astype(np.float32) for part in (weight, lora_a, lora_b))
        stack = () if lora_a.ndim + lora_b.ndim - 2 == weight.ndim else weight.shape[:1]
        rank = lora_a.shape[-1]
        update = np.matmul(lora_a.reshape(*stack, -1, rank), lora_b.reshape(*stack, rank, -1))
        return weight + self._scale * update.reshape(weight.shape)
