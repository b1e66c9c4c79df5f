"""Adapters of LoRA runs as folders of PEFT: adapter_config.json and adapter_model.safetensors.

An adapter adds scale · A B to a weight. Checkpoints that hold query, key and value in one tensor have one adapter for the three:
its rank is the sum of their ranks, and the columns of its B that belong to one of them are zero in the rows of the others.
"""

import dataclasses
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from tba_jax import outputs
from tba_jax.models import parameters
from tba_jax.models.config import DecoderConfig
from tba_jax.models.hugging_face import export, files
from tba_jax.models.hugging_face.architectures import ARCHITECTURES
from tba_jax.models.hugging_face.files import Stored
from tba_jax.models.lora import LoraConfig
from tba_jax.models.parameters import Params

CONFIG, WEIGHTS = files.ADAPTER
# The names of modules in the model that PEFT wraps begin so.
_WRAPPED = "base_model.model."
# model_type of checkpoints whose linear weights are [in, out], which PEFT must be told.
_INPUTS_FIRST = ("gpt2",)


@dataclasses.dataclass(frozen=True)
class _Part:
    """The adapter of one of our weights, for one layer. stored: how the weight lies in the checkpoint's tensor.

    lora_a: float32[inputs ..., r]; lora_b: float32[r, outputs ...].
    """

    stored: Stored
    lora_a: np.ndarray
    lora_b: np.ndarray

    def a(self) -> np.ndarray:
        """float32[r, inputs]: A as PEFT has it, inputs in the order of the checkpoint."""
        ours = self.stored.our_axes.split()[: self.lora_a.ndim - 1]
        order = [ours.index(axis) for axis in self._stored_axes() if axis in ours]
        return self.lora_a.transpose(len(ours), *order).reshape(self.lora_a.shape[-1], -1)

    def b(self) -> np.ndarray:
        """float32[outputs, r]: B as PEFT has it, outputs in the order of the checkpoint; zero where other parts write."""
        ours = self.stored.our_axes.split()[self.lora_a.ndim - 1 :]
        rank, *sizes = self.lora_b.shape
        axes = [axis for axis in self._stored_axes() if axis in ours or axis.isdigit()]
        whole = np.zeros([int(axis) if axis.isdigit() else sizes[ours.index(axis)] for axis in axes] + [rank], np.float32)
        order = [1 + ours.index(axis) for axis in axes if axis in ours]
        place = tuple(self.stored.part if axis.isdigit() else slice(None) for axis in axes)
        whole[place] = self.lora_b.transpose(*order, 0)
        return whole.reshape(-1, rank)

    def _stored_axes(self) -> list[str]:
        return re.findall(r"\w+", self.stored.stored_axes)


def save(
    folder: Path | str,
    config: DecoderConfig,
    adapters: Params,
    lora: LoraConfig,
    *,
    base: str,
    dtype: str,
    more: Sequence[Callable[[Path], None]] = (),
) -> None:
    """Writes a folder that peft.PeftModel.from_pretrained reads. One layer of an adapter at a time is on the host.

    Args:
      folder: created, with its parents; it must not exist, or be empty. After an error it does not exist, or is empty.
      adapters: lora_a [L, inputs ..., r] and lora_b [L, r, outputs ...] of every map that has one; L in the stack of layers only.
      base: the folder or the hub id of the model that the adapters belong to. It is named, not written.
      dtype: of the adapters in the file, "float32", "float16" or "bfloat16".
      more: see export.save.

    Raises:
      ValueError: the folder is in use, the dtype is none of these, or an adapter holds numbers that are not finite in it.
    """
    export.check_dtype(dtype)
    leaves = parameters.flatten(adapters)
    tensors = _adapted(config, leaves)
    made = {
        name: matrix for module in _modules(tensors, config.layers) for name, matrix in _matrices(*module, config, leaves, lora)
    }

    def content(name: str) -> np.ndarray:
        with np.errstate(over="ignore"):  # a number that becomes infinite is refused
            whole = np.ascontiguousarray(made[name].content().astype(jnp.dtype(dtype)))
        return export.finite(whole, name, "an adapter")

    with outputs.folder(Path(folder)) as whole:
        export.write_tensors(whole / WEIGHTS, {name: matrix.shape for name, matrix in made.items()}, content, dtype=dtype)
        values = _config_values(tensors, config, lora, base)
        (whole / CONFIG).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
        for write in more:
            write(whole)


@dataclasses.dataclass(frozen=True)
class _Matrix:
    """A or B of a module. content: makes it when it is written, float32 of that shape."""

    shape: tuple[int, int]
    content: Callable[[], np.ndarray]


def _matrices(
    module: str,
    layer: int | None,
    stored: tuple[Stored, ...],
    config: DecoderConfig,
    leaves: Mapping[str, Any],
    lora: LoraConfig,
) -> Iterator[tuple[str, _Matrix]]:
    """(name of the tensor, matrix) of A and B of one module. Args: see _modules."""

    def a() -> np.ndarray:
        return np.concatenate([part.a() for part in _parts(stored, leaves, layer)])

    def b() -> np.ndarray:
        return np.concatenate([part.b() for part in _parts(stored, leaves, layer)], axis=1)

    outputs, inputs = stored[0].shape(config.sizes)[:: -1 if config.architecture in _INPUTS_FIRST else 1]
    rank = lora.rank * len(stored)
    yield f"{_WRAPPED}{module}.lora_A.weight", _Matrix((rank, inputs), a)
    yield f"{_WRAPPED}{module}.lora_B.weight", _Matrix((outputs, rank), b)


def _adapted(config: DecoderConfig, leaves: Mapping[str, Any]) -> dict[str, tuple[Stored, ...]]:
    """The modules of the checkpoint that have an adapter -> our weights with adapters that their tensors hold.

    Names have "{layer}" for the number of a layer.
    """
    ours = {name.removesuffix("lora_a") + "weight" for name in leaves if name.endswith(".lora_a")}
    found = {
        tensor.removesuffix(".weight"): tuple(part for part in stored if part.path in ours)
        for tensor, stored in ARCHITECTURES[config.architecture].tensors(config).items()
    }
    assert ours == {part.path for stored in found.values() for part in stored}, "every linear map lies in a tensor"
    return {module: stored for module, stored in found.items() if stored}


def _modules(tensors: Mapping[str, tuple[Stored, ...]], layers: int) -> Iterator[tuple[str, int | None, tuple[Stored, ...]]]:
    """(name, layer, our weights) of every module that has an adapter."""
    for module, stored in tensors.items():
        if "{layer}" in module:
            yield from ((module.format(layer=layer), layer, stored) for layer in range(layers))
        else:
            yield module, None, stored


def _parts(stored: Sequence[Stored], leaves: Mapping[str, Any], layer: int | None) -> list[_Part]:
    def read(part: Stored, name: str) -> np.ndarray:
        leaf = leaves[part.path.removesuffix("weight") + name]
        return np.asarray(leaf if layer is None else leaf[layer]).astype(np.float32)

    return [_Part(part, read(part, "lora_a"), read(part, "lora_b")) for part in stored]


def _config_values(
    tensors: Mapping[str, tuple[Stored, ...]], config: DecoderConfig, lora: LoraConfig, base: str
) -> dict[str, Any]:
    """The content of adapter_config.json. Alphas are summed where ranks are, so that the scale, alpha / rank, stays."""
    # PEFT finds modules by how their names end, here by what follows the number of the layer.
    target = {module: module.rpartition("{layer}.")[2] for module in tensors}
    parts = {target[module]: len(stored) for module, stored in tensors.items() if len(stored) > 1}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": sorted(target.values()),
        "rank_pattern": {name: lora.rank * number for name, number in parts.items()},
        "alpha_pattern": {name: lora.alpha * number for name, number in parts.items()},
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": config.architecture in _INPUTS_FIRST,
        "inference_mode": True,
    }
