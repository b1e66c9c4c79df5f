"""The language in which architectures.py and encoders.py describe checkpoints: tensors by their axes, config.json by its keys."""

import dataclasses
import json
import math
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from tba_jax.models.config import ACTIVATION_NAMES, ACTIVATIONS
from tba_jax.models.parameters import Definition

ADAPTER = ("adapter_config.json", "adapter_model.safetensors")  # files that PEFT writes

COPIED_BYTES = 512 << 10  # of a tensor that are copied at a time: a transposed copy of this much stays in the processor's cache


@dataclasses.dataclass(frozen=True)
class Stored:
    """How one of our parameters lies in a tensor of the checkpoint. Letters of the axis table, with C labels and S positions.

    path: ours, "layers.attention.query.weight". our_axes: "D N H": ours, without the layer axis, and without the axis of experts
    where each expert has a tensor of its own.
    stored_axes: "(N 3 H) D": the checkpoint's dimensions; "(...)" is one dimension, slowest first; a number is a fixed axis, on
    which `part` is the index of our parameter.
    """

    path: str
    stored_axes: str
    our_axes: str
    part: int = 0

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The tensor's shape. sizes: letter -> size."""
        groups = re.findall(r"\([^)]*\)|\w+", self.stored_axes)
        return tuple(math.prod(_size(axis, sizes) for axis in group.strip("()").split()) for group in groups)

    def view(self, tensor: np.ndarray, sizes: Mapping[str, int]) -> np.ndarray:
        """Our parameter as a view of the tensor, in our axes: reading it reads the tensor, writing it writes the tensor."""
        axes = re.findall(r"\w+", self.stored_axes)
        assert tensor.flags.c_contiguous, "reshape would copy it"
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


# Name of a tensor, with "{layer}" and "{expert}" for numbers -> our parameters that it holds.
Tensors = dict[str, tuple[Stored, ...]]


def linear(name: str, path: str, axes: tuple[str, str, str], bias: bool) -> Tensors:
    """The weight of a linear map and its bias. axes: stored_axes and our_axes of the weight, stored_axes of the bias."""
    stored_axes, our_axes, bias_axes = axes
    tensors: Tensors = {f"{name}.weight": (Stored(f"{path}.weight", stored_axes, our_axes),)}
    return tensors | ({f"{name}.bias": (Stored(f"{path}.bias", bias_axes, bias_axes.strip("()")),)} if bias else {})


def norm(name: str, path: str, axis: str = "D", *, bias: bool = False) -> Tensors:
    """The scale of a norm, and the bias of a layer norm."""
    tensors: Tensors = {f"{name}.weight": (Stored(f"{path}.scale", axis, axis.strip("()")),)}
    return tensors | ({f"{name}.bias": (Stored(f"{path}.bias", axis, axis.strip("()")),)} if bias else {})


def head(kind: str, tied: bool, lm_head: str) -> Tensors:
    """The head of a decoder. kind: its config's `head`; lm_head: the name of the language model's head."""
    if kind == "score":
        return {"score.weight": (Stored("score.weight", "C D", "D C"),)}
    return {} if tied else {lm_head: (Stored("lm_head.weight", "V D", "D V"),)}


def fused(name: str, axes: tuple[str, str], bias_axes: str, bias: bool) -> Tensors:
    """Query, key and value in one tensor, in this order on its axis of 3. axes: stored_axes and our_axes of the weight."""

    def parts(kind: str, stored_axes: str, our_axes: str) -> Tensors:
        paths = [f"layers.attention.{part}.{kind}" for part in ("query", "key", "value")]
        return {f"{name}.{kind}": tuple(Stored(path, stored_axes, our_axes, part) for part, path in enumerate(paths))}

    return parts("weight", *axes) | (parts("bias", bias_axes, "N H") if bias else {})


class Settings:
    """The keys of a config.json. Every error names the file, the key and the value."""

    def __init__(self, path: Path, values: Mapping[str, Any]):
        self.path, self.values = path, values

    def refuse(self, key: str, computed: str) -> NoReturn:
        raise ValueError(f"{self.path}: {key}={self.values.get(key)!r} is not supported; the model code computes {computed} only")

    def _checked(self, key: str, absent: Any, fits: Callable[[Any], bool], words: str) -> Any:
        value = self.values.get(key)
        value = absent if value is None else value
        if not fits(value):
            raise ValueError(f"{self.path}: {key}={value!r} must be {words}")
        return value

    def size(self, key: str, absent: int | None = None) -> int:
        """A positive integer; `absent` if the key is not given or null, as in the other methods."""
        return self._checked(
            key, absent, lambda v: isinstance(v, int) and not isinstance(v, bool) and v > 0, "a positive integer"
        )

    def number(self, key: str, absent: float) -> float:
        def fits(value: Any) -> bool:  # JSON as Python reads it has NaN, Infinity, and integers that no float can hold
            return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= sys.float_info.max

        return float(self._checked(key, absent, fits, "a positive number, and finite"))

    def flag(self, key: str, absent: bool) -> bool:
        return self._checked(key, absent, lambda value: isinstance(value, bool), "true or false")

    def names(self, key: str) -> list[str]:
        return self._checked(key, [], lambda v: isinstance(v, list) and all(isinstance(x, str) for x in v), "a list of names")

    def table(self, key: str) -> dict[str, Any]:
        return self._checked(key, {}, lambda value: isinstance(value, dict), "an object")

    def activation(self, key: str, absent: str) -> str:
        """Our name of an activation. Null is refused."""
        value = self.values.get(key, absent)
        if not isinstance(value, str) or value not in ACTIVATION_NAMES:
            self.refuse(key, " or ".join(f"{key}={name!r}" for name in ACTIVATION_NAMES))
        return ACTIVATION_NAMES[value]

    def only(self, key: str, *computed: Any) -> None:
        """Refuses every value that is not in `computed`. An absent key has the value computed[0]; 1 is not true."""
        value = self.values.get(key, computed[0])
        if not any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in computed):
            self.refuse(key, f"{key}={computed[0]!r}")

    def labels(self) -> int:
        """Outputs of a classification head: num_labels, or as many as id2label names, or the default of transformers, 2."""
        return self.size("num_labels", len(self.table("id2label")) or 2)

    def head_size(self, width_key: str, heads_key: str) -> int:
        """The width of a head where no key gives it."""
        width, heads = self.size(width_key), self.size(heads_key)
        if width % heads:
            raise ValueError(f"{self.path}: {width_key}={width} is not divisible by {heads_key}={heads}")
        return width // heads


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
        raise ValueError(
            f"{folder} holds {found[0]}, an adapter of PEFT without the model that it belongs to; load the model with peft, call "
            "merge_and_unload(), and save_pretrained(FOLDER) of what that returns"
        )


# Reads a key: (settings, name of the key, value of an absent key) -> value of our field.
Reader = Callable[[Settings, str, Any], Any]


@dataclasses.dataclass(frozen=True)
class Key:
    """A key of config.json, to read and to write. fields: the names of our fields that have its value; read: a method of
    Settings; absent: the value of transformers where the key is not given, or a function of the settings that returns it; None:
    none."""

    fields: str
    read: Reader = Settings.size
    absent: Any = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Architecture:
    """One model_type of Hugging Face checkpoints, for import and export.

    heads: class names that config.json's `architectures` may hold -> the head of our config; export writes the first of each.
    config: makes our config from the fields of `read`, architecture, head, compute_dtype, attention, and labels of a score head.
    define: our config -> the definition of its module. tensors: our config -> its tensors.
    only: keys that change what the model computes -> the values that our code computes, the value of an absent key first.
    fixed: fields of our config that all checkpoints have. keys: the keys of config.json that are fields of our config.
    read_more: (settings, fields so far) -> the fields that are not a key each. write_more: the inverse, config -> keys.
    prefix: begins the names of the base model's tensors; a checkpoint of the base model alone has the names without it.
    lm_head: the tensor that is redundant if embeddings are tied, and that is left out if head="score" is asked for.
    others: our config -> the tensors where a checkpoint has another layout, which is that of the file that has such names.
    ignored: regular expression of the tensors (without the prefix) that are not read, such as buffers that old versions saved.
    """

    heads: Mapping[str, str]
    config: Callable[..., Any]
    define: Callable[[Any], Definition[Any]]
    only: Mapping[str, tuple[Any, ...]]
    fixed: Mapping[str, Any]
    keys: Mapping[str, Key]
    read_more: Callable[[Settings, dict[str, Any]], dict[str, Any]]
    write_more: Callable[[Any], dict[str, Any]]
    tensors: Callable[[Any], Tensors]
    prefix: str
    lm_head: str = ""
    ignored: str = ""
    others: Callable[[Any], Tensors] | None = None

    def named(self, config: Any, tensors: Tensors) -> dict[str, tuple[int | None, int | None, tuple[Stored, ...]]]:
        """Names of the tensors of all layers and experts, in turn -> number of the layer and of the expert, and the content."""
        return {
            pattern.format(layer=layer, expert=expert): (layer, expert, parts)
            for pattern, parts in tensors.items()
            for layer in (range(config.layers) if "{layer}" in pattern else (None,))
            for expert in (range(config.experts) if "{expert}" in pattern else (None,))
        }

    def read(self, settings: Settings) -> dict[str, Any]:
        """Fields of our config. Raises ValueError: a setting is malformed, or is not computed."""
        for name, computed in self.only.items():
            settings.only(name, *computed)
        fields = dict(self.fixed)
        for name, key in self.keys.items():
            is_derived = callable(key.absent) and settings.values.get(name) is None
            value = key.read(settings, name, key.absent(settings) if is_derived else key.absent)
            fields |= dict.fromkeys(key.fields.split(), value)
        return fields | self.read_more(settings, fields)

    def write(self, config: Any) -> dict[str, Any]:
        """Keys of config.json; the exporter adds the keys of the head and of the dtype."""
        values = {name: vars(config)[key.fields.split()[0]] for name, key in self.keys.items()}
        for name, key in self.keys.items():
            if key.read is Settings.activation:
                values[name] = ACTIVATIONS[values[name]][0]
        return {"model_type": config.architecture, **values, **self.write_more(config)}
