"""Low-rank adapters (LoRA, Hu et al., 2021): W + (alpha / rank) · A B on chosen linear maps, with W frozen."""

import dataclasses
import fnmatch
import functools
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from tba_jax.models import parameters
from tba_jax.models.parameters import Params, ParamSpec, Specs


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """rank; alpha: the update is scaled by alpha / rank; targets: patterns (`*`, `?`) of the names of linear maps, as
    "layers.query" or "layers.*"."""

    rank: int
    alpha: float
    targets: tuple[str, ...]

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


def adapter_specs(specs: Specs, lora: LoraConfig) -> Specs:
    """The adapters' parameters: lora_a [layers, inputs, rank], random; lora_b [layers, rank, outputs], zero.

    Raises:
      ValueError: a pattern of lora.targets matches no linear map; names those there are.
    """
    linears = {name.removesuffix(".weight"): spec for name, spec in parameters.flatten(specs).items() if spec.inputs}
    for pattern in lora.targets:
        if not any(fnmatch.fnmatchcase(name, str(pattern)) for name in linears):
            raise ValueError(
                f"lora.targets: {pattern!r} matches no linear map of the model; there are {sorted(linears)} "
                """(several are given as '("layers.query", "layers.value")')"""
            )
    adapters: dict[str, ParamSpec] = {}
    for name, spec in linears.items():
        if not any(fnmatch.fnmatchcase(name, pattern) for pattern in lora.targets):
            continue
        stacked = 1 if spec.axes[0] == "layers" else 0
        split = stacked + spec.inputs
        fan_in, fan_out = math.prod(spec.shape[stacked:split]), math.prod(spec.shape[split:])
        if lora.rank > min(fan_in, fan_out):
            raise ValueError(
                f"lora.rank={lora.rank} is more than {name} can have, which maps {fan_in} to {fan_out} numbers: "
                "lower it, or leave the map out of lora.targets"
            )
        adapters[f"{name}.lora_a"] = ParamSpec(
            shape=(*spec.shape[:split], lora.rank), axes=(*spec.axes[:split], "rank"), init_std=1 / math.sqrt(fan_in)
        )
        adapters[f"{name}.lora_b"] = ParamSpec(
            shape=(*spec.shape[:stacked], lora.rank, *spec.shape[split:]),
            axes=(*spec.axes[:stacked], "rank", *spec.axes[split:]),
        )
    return parameters.unflatten(adapters)


def attach(base: Params, adapters: Params, lora: LoraConfig) -> Params:
    """Parameters with the adapters beside their weights (layers.linear), so that no update is ever as large as W."""
    scaled = {
        name: leaf * lora.scale if name.endswith(".lora_b") else leaf for name, leaf in parameters.flatten(adapters).items()
    }
    return parameters.merge(base, parameters.unflatten(scaled))


def merge(base: Params, adapters: Params, lora: LoraConfig) -> Params:
    """Parameters with W + (alpha / rank) · A B in W's place, in float32; the others as they are."""
    return _replace_weights(merge_weight, base, adapters, lora)


def merge_lazily(base: Params, adapters: Params, lora: LoraConfig) -> Params:
    """As `merge`, for arrays on the host or in storage: a layer is merged when it is read."""
    return _replace_weights(MergedWeight, base, adapters, lora)


def _replace_weights(make: Callable[[Any, Any, Any, float], Any], base: Params, adapters: Params, lora: LoraConfig) -> Params:
    """`base` with make(weight, lora_a, lora_b, scale) in place of every weight that has an adapter."""
    merged, flat = parameters.flatten(base), parameters.flatten(adapters)
    for name in [name.removesuffix(".lora_a") for name in flat if name.endswith(".lora_a")]:
        weight = merged[f"{name}.weight"]
        merged[f"{name}.weight"] = make(weight, flat[f"{name}.lora_a"], flat[f"{name}.lora_b"], lora.scale)
    return parameters.unflatten(merged)


def merge_weight(weight: Any, lora_a: Any, lora_b: Any, scale: float) -> Any:
    """weight + scale · lora_a lora_b in float32, for one layer or a stack; arrays of JAX or of NumPy."""
    on_host = all(isinstance(part, np.ndarray) for part in (weight, lora_a, lora_b))
    matmul = np.matmul if on_host else functools.partial(jnp.matmul, precision="highest")
    stack = () if lora_a.ndim + lora_b.ndim - 2 == weight.ndim else weight.shape[:1]
    rank = lora_a.shape[-1]
    update = matmul(lora_a.reshape(*stack, -1, rank), lora_b.reshape(*stack, rank, -1))
    return weight.astype(np.float32) + scale * update.reshape(weight.shape)


class MergedWeight:
    """A stacked weight with its adapter, merged one layer at a time as it is read: exports never hold the whole stack."""

    def __init__(self, weight: Any, lora_a: Any, lora_b: Any, scale: float):
        self._parts, self._scale = (weight, lora_a, lora_b), scale
        self.shape = weight.shape

    def __getitem__(self, layer: int) -> np.ndarray:
        weight, lora_a, lora_b = (np.asarray(part[layer]).astype(np.float32) for part in self._parts)
        return merge_weight(weight, lora_a, lora_b, self._scale)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        weight, lora_a, lora_b = (np.asarray(part).astype(np.float32) for part in self._parts)
        return merge_weight(weight, lora_a, lora_b, self._scale).astype(dtype or np.float32)
