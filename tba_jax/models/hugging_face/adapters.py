"""Adapters of LoRA runs as folders of PEFT: adapter_config.json and adapter_model.safetensors.

An adapter adds scale · A B to a weight. Checkpoints that hold query, key and value in one tensor have one adapter for the three:
its rank is the sum of their ranks, and the columns of its B that belong to one of them are zero in the rows of the others.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
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
from tba_jax.models.parameters import Params
from tba_jax.models.policy import LoraConfig

CONFIG, WEIGHTS = files.ADAPTER
_WRAPPED = "base_model.model."  # begins the names of modules in the model that PEFT wraps


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
    """Writes a folder that peft.PeftModel.from_pretrained reads.

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
    leaves = {name: np.asarray(leaf).astype(np.float32) for name, leaf in parameters.flatten(adapters).items()}
    modules = _adapted(config, leaves)
    with outputs.folder(Path(folder)) as whole:
        tensors: dict[str, np.ndarray] = {}
        for module, stored in modules.items():
            for layer in range(config.layers) if "{layer}" in module else (None,):
                parts = [_matrices(part, layer, leaves) for part in stored]
                name = f"{_WRAPPED}{module.format(layer=layer)}"
                tensors[f"{name}.lora_A.weight"] = np.concatenate([a for a, _ in parts])
                tensors[f"{name}.lora_B.weight"] = np.concatenate([b for _, b in parts], axis=1)
        for name, matrix in tensors.items():
            with np.errstate(over="ignore"):  # a number that becomes infinite is refused
                tensors[name] = export.finite(np.ascontiguousarray(matrix.astype(jnp.dtype(dtype))), name, "an adapter")
        export.write_tensors(whole / WEIGHTS, tensors)
        values = _config_values(modules, config, lora, base)
        (whole / CONFIG).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
        for write in more:
            write(whole)


def _adapted(config: DecoderConfig, leaves: Mapping[str, Any]) -> dict[str, tuple[Stored, ...]]:
    """The modules of the checkpoint that have an adapter ("{layer}" for its number) -> our weights that their tensors hold."""
    ours = {name.removesuffix("lora_a") + "weight" for name in leaves if name.endswith(".lora_a")}
    found = {
        tensor.removesuffix(".weight"): tuple(part for part in stored if part.path in ours)
        for tensor, stored in ARCHITECTURES[config.architecture].tensors(config).items()
    }
    assert ours == {part.path for stored in found.values() for part in stored}, "every linear map lies in a tensor"
    return {module: stored for module, stored in found.items() if stored}


def _matrices(part: Stored, layer: int | None, leaves: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """A float32[r, inputs] and B float32[outputs, r] of one of our weights as PEFT has them, B with zeros for other parts."""
    lora_a, lora_b = (leaves[part.path.removesuffix("weight") + name] for name in ("lora_a", "lora_b"))
    if layer is not None:
        lora_a, lora_b = lora_a[layer], lora_b[layer]
    letters, stored = part.our_axes.split(), re.findall(r"\w+", part.stored_axes)
    inputs, results = letters[: lora_a.ndim - 1], letters[lora_a.ndim - 1 :]
    order = [inputs.index(axis) for axis in stored if axis in inputs]
    a = lora_a.transpose(len(inputs), *order).reshape(lora_a.shape[-1], -1)

    rank, *sizes = lora_b.shape
    axes = [axis for axis in stored if axis in results or axis.isdigit()]
    b = np.zeros([int(axis) if axis.isdigit() else sizes[results.index(axis)] for axis in axes] + [rank], np.float32)
    place = tuple(part.part if axis.isdigit() else slice(None) for axis in axes)
    b[place] = lora_b.transpose(*(1 + results.index(axis) for axis in axes if axis in results), 0)
    return a, b.reshape(-1, rank)


def _config_values(
    modules: Mapping[str, tuple[Stored, ...]], config: DecoderConfig, lora: LoraConfig, base: str
) -> dict[str, Any]:
    """The content of adapter_config.json. Alphas are summed where ranks are, so that the scale, alpha / rank, stays."""
    # PEFT finds modules by how their names end, here by what follows the number of the layer.
    target = {module: module.rpartition("{layer}.")[2] for module in modules}
    parts = {target[module]: len(stored) for module, stored in modules.items() if len(stored) > 1}
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
        "fan_in_fan_out": config.architecture == "gpt2",  # its linear weights are [in, out]
        "inference_mode": True,
    }
