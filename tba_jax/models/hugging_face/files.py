"""The language in which architectures.py describes checkpoints: tensors by their axes, config.json by its settings."""

import dataclasses
import json
import math
import re
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from tba_jax.models.parameters import Definition

ADAPTER = ("adapter_config.json", "adapter_model.safetensors")  # files that PEFT writes

# A part of a tensor's name that a wrapper of the model adds -> the wrapper.
WRAPPERS = {
    **dict.fromkeys(("base_model", "base_layer", "lora_A", "lora_B"), "PEFT"),
    "_orig_mod": "torch.compile",
    "module": "DistributedDataParallel",
}
_MERGE = "load the model with peft, call merge_and_unload(), and save_pretrained(FOLDER) of what that returns"

COPIED_BYTES = 512 << 10  # of a tensor that are copied at a time: a transposed copy of this much stays in the processor's cache


@dataclasses.dataclass(frozen=True)
class Stored:
    """How one of our parameters lies in a tensor of the checkpoint. Letters of the axis table, with C labels and S positions.

    path: ours, "layers.attention.query.weight".
    stored_axes: "(N 3 H) D": the checkpoint's dimensions; "(...)" is one dimension, slowest first; a number is a fixed axis.
    our_axes: "D N H": ours, without the layer axis.
    part: index of our parameter on the fixed axis.
    """

    path: str
    stored_axes: str
    our_axes: str
    part: int = 0

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The tensor's shape. sizes: letter -> size."""
        groups = re.findall(r"\([^)]*\)|\w+", self.stored_axes)
        return tuple(math.prod(_size(axis, sizes) for axis in group.strip("()").split()) for group in groups)

    def view(self, tensor: Any, sizes: Mapping[str, int]) -> Any:
        """Our parameter as a view of the tensor, in our axes: reading it reads the tensor, writing it writes the tensor.

        Args: tensor: an array of the host, or of the devices, of which the result is computed.
        """
        axes = re.findall(r"\w+", self.stored_axes)
        assert not isinstance(tensor, np.ndarray) or tensor.flags.c_contiguous, "reshape would copy it"
        split = tensor.reshape([_size(axis, sizes) for axis in axes])
        part = split[tuple(self.part if axis.isdigit() else slice(None) for axis in axes)]
        letters = [axis for axis in axes if not axis.isdigit()]
        return part.transpose([letters.index(axis) for axis in self.our_axes.split()])


def _size(axis: str, sizes: Mapping[str, int]) -> int:
    return int(axis) if axis.isdigit() else sizes[axis]


def copy(target: np.ndarray, source: np.ndarray) -> None:
    """target[...] = source, converted to the target's dtype, in blocks along the axis that is slowest in the source's memory."""
    axis = int(np.argmax([stride if size > 1 else 0 for size, stride in zip(source.shape, source.strides, strict=True)]))
    rows = max(1, COPIED_BYTES // (source.nbytes // source.shape[axis]))
    for start in range(0, source.shape[axis], rows):
        block = (*(slice(None),) * axis, slice(start, start + rows))
        # Converted in the source's order, then transposed: four times as fast as both at once.
        target[block] = source[block].astype(target.dtype)


class Settings:
    """The keys of a config.json. Every error names the file, the key and the value."""

    def __init__(self, path: Path, values: Mapping[str, Any]):
        self.path, self.values = path, values

    def refuse(self, key: str, computed: str) -> NoReturn:
        raise ValueError(f"{self.path}: {key}={self.values.get(key)!r} is not supported; the model code computes {computed} only")

    def size(self, key: str, absent: int | None = None, null: int | None = None) -> int:
        """A positive integer; `absent` if the key is not given, `null` if its value is null (default: `absent`)."""
        value = self.values.get(key, absent)
        if value is None:
            value = absent if null is None else null
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{self.path}: {key}={self.values.get(key)!r} must be a positive integer")
        return value

    def number(self, key: str, absent: float) -> float:
        value = self.values.get(key)
        value = absent if value is None else value
        # JSON as Python reads it has NaN, Infinity, and integers that no float can hold.
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= sys.float_info.max:
            raise ValueError(f"{self.path}: {key}={value!r} must be a positive number, and finite")
        return float(value)

    def flag(self, key: str, absent: bool) -> bool:
        value = self.values.get(key)
        value = absent if value is None else value
        if not isinstance(value, bool):
            raise ValueError(f"{self.path}: {key}={value!r} must be true or false")
        return value

    def choice(self, key: str, choices: Mapping[str, str], absent: str) -> str:
        """Our name of a named option."""
        value = self.values.get(key, absent)
        if not isinstance(value, str) or value not in choices:
            self.refuse(key, " or ".join(f"{key}={name!r}" for name in choices))
        return choices[value]

    def only(self, key: str, *computed: Any) -> None:
        """Refuses every value that is not in `computed`. An absent key has the value computed[0]; 1 is not true."""
        value = self.values.get(key, computed[0])
        if not any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in computed):
            self.refuse(key, f"{key}={computed[0]!r}")

    def names(self, key: str) -> list[str]:
        """A list of strings; empty if the key is absent or null."""
        value = self.values.get(key)
        value = [] if value is None else value
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise ValueError(f"{self.path}: {key}={value!r} must be a list of names")
        return value

    def table(self, key: str) -> dict[str, Any]:
        """An object; empty if the key is absent or null."""
        value = self.values.get(key)
        value = {} if value is None else value
        if not isinstance(value, dict):
            raise ValueError(f"{self.path}: {key}={value!r} must be an object")
        return value

    def labels(self) -> int:
        """Outputs of a classification head: num_labels, or as many as id2label names, or the default of transformers, 2."""
        if self.values.get("num_labels") is not None:
            return self.size("num_labels")
        return len(self.table("id2label")) or 2


def read_settings(path: Path) -> Settings:
    """Raises ValueError: no such file, or no JSON object."""
    return Settings(path, read_json(path))


def read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        check_no_adapter(path.parent)
        raise ValueError(
            f"{path} does not exist; a model folder holds config.json and model.safetensors (or shards with an index)"
        )
    try:
        values = json.loads(path.read_bytes())  # bytes, which may begin with a byte order mark
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds a JSON {type(values).__name__}, expected an object")
    return values


def check_no_adapter(folder: Path) -> None:
    """Raises ValueError where the folder holds an adapter; to be called where a model's files are missing."""
    if found := [name for name in (*ADAPTER, "adapter_model.bin") if (folder / name).is_file()]:
        raise ValueError(f"{folder} holds {found[0]}, an adapter of PEFT without the model that it belongs to; {_MERGE}")


def check_unwrapped(folder: Path, names: Collection[str]) -> None:
    """Raises ValueError where tensors have the names that a wrapper of the model gives them."""
    for part, wrapper in WRAPPERS.items():
        if found := [name for name in names if part in name.split(".")]:
            strip = f"save the model inside of the wrapper, or remove {part + '.'!r} from the names"
            raise ValueError(
                f"{folder}: {len(found)} of {len(names)} tensors, such as {found[0]}, are named with {part!r}, as in the "
                f"state dict of a model in {wrapper}; {_MERGE if wrapper == 'PEFT' else strip}"
            )


Tensors = dict[str, tuple[Stored, ...]]


def linear(name: str, path: str, axes: tuple[str, str, str], bias: bool) -> Tensors:
    """The weight of a linear map and its bias. axes: stored_axes and our_axes of the weight, stored_axes of the bias."""
    stored_axes, our_axes, bias_axes = axes
    tensors: Tensors = {f"{name}.weight": (Stored(f"{path}.weight", stored_axes, our_axes),)}
    return tensors | ({f"{name}.bias": (Stored(f"{path}.bias", bias_axes, bias_axes.strip("()")),)} if bias else {})


def norm(name: str, path: str, axis: str = "D", *, bias: bool = False) -> Tensors:
    """The scale of a norm, and the bias of a layer norm."""
    tensors: Tensors = {f"{name}.weight": (Stored(f"{path}.scale", axis, axis),)}
    return tensors | ({f"{name}.bias": (Stored(f"{path}.bias", axis, axis),)} if bias else {})


def head(kind: str, tied: bool, lm_head: str) -> Tensors:
    """The head of a decoder. kind: its config's `head`; lm_head: the name of the language model's head."""
    if kind == "score":
        return {"score.weight": (Stored("score.weight", "C D", "D C"),)}
    return {} if tied else {lm_head: (Stored("lm_head.weight", "V D", "D V"),)}


def fused(name: str, stored_axes: str, our_axes: str, kind: str) -> Tensors:
    """Query, key and value in one tensor, in this order on its axis of 3."""
    parts = ("query", "key", "value")
    return {
        name: tuple(Stored(f"layers.attention.{path}.{kind}", stored_axes, our_axes, part) for part, path in enumerate(parts))
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Architecture:
    """One model_type of Hugging Face checkpoints.

    heads: class names that config.json's `architectures` may hold -> the head of our config ("language_model", "score"). Export
      writes the first class of each head.
    config: makes our config from the fields that `read` returns and architecture, head, compute_dtype, attention, and also labels
      if the head is "score".
    read: config.json -> the other fields of our config. It refuses every setting that changes what the model computes and that
      our code does not compute.
    write: our config -> keys of config.json; the exporter adds the keys of the head and of the dtype.
    define: our config -> the definition of its module.
    tensors: our config -> the name of each tensor, with "{layer}" for the number of a layer -> our parameters that it holds.
    prefix: begins the names of the base model's tensors; a checkpoint of the base model alone has the names without it.
    lm_head: the tensor that is redundant if embeddings are tied, and that is left out if head="score" is asked for.
    ignored: regular expression of the tensors (without the prefix) that are not read, such as buffers that old versions saved.
    """

    heads: Mapping[str, str]
    config: Callable[..., Any]
    read: Callable[[Settings], dict[str, Any]]
    write: Callable[[Any], dict[str, Any]]
    define: Callable[[Any], Definition[Any]]
    tensors: Callable[[Any], Tensors]
    prefix: str
    lm_head: str = ""
    ignored: str = ""
