"""Strict import of Hugging Face checkpoints: config.json to DecoderConfig, safetensors to sharded parameters.

What the decoder would compute differently, and every tensor that is not in the table below, is refused by name.
Only safetensors are read: a pickled checkpoint runs code when it is loaded.
"""

import contextlib
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import safetensors
from safetensors import SafetensorError

from tba_jax.models import decoder
from tba_jax.models.decoder import DecoderConfig, Params

# model_type of config.json -> the architectures of it that the decoder computes.
ARCHITECTURES: dict[str, tuple[str, ...]] = {"llama": ("LlamaForCausalLM",)}

# Settings of config.json that change what the model computes -> the values the decoder computes. Absent = the first one.
_COMPUTED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "sliding_window": (None,),
    "partial_rotary_factor": (1.0, None),
    "quantization_config": (None,),
}

# Tensor in the checkpoint -> (our parameter, its axes in the checkpoint, its axes here without the layer axis). Letters of the
# axis table; a linear weight of the checkpoint is [out, in], and "(N H)" is one dimension with the head slowest.
PARAMETERS: dict[str, tuple[str, str, str]] = {
    "model.embed_tokens.weight": ("embedding", "V D", "V D"),
    "model.layers.{layer}.input_layernorm.weight": ("layers.attention_norm", "D", "D"),
    "model.layers.{layer}.self_attn.q_proj.weight": ("layers.query", "(N H) D", "D N H"),
    "model.layers.{layer}.self_attn.k_proj.weight": ("layers.key", "(G H) D", "D G H"),
    "model.layers.{layer}.self_attn.v_proj.weight": ("layers.value", "(G H) D", "D G H"),
    "model.layers.{layer}.self_attn.o_proj.weight": ("layers.out", "D (N H)", "N H D"),
    "model.layers.{layer}.post_attention_layernorm.weight": ("layers.ffn_norm", "D", "D"),
    "model.layers.{layer}.mlp.gate_proj.weight": ("layers.gate", "F D", "D F"),
    "model.layers.{layer}.mlp.up_proj.weight": ("layers.up", "F D", "D F"),
    "model.layers.{layer}.mlp.down_proj.weight": ("layers.down", "D F", "F D"),
    "model.norm.weight": ("final_norm", "D", "D"),
    "lm_head.weight": ("lm_head", "V D", "D V"),
}

_EMBEDDING, _LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"
_IGNORED = re.compile(
    r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq"
)  # a buffer that old versions saved; a function of rope_theta
_DTYPES = ("F32", "F16", "BF16")
_COMPARED_ROWS = 4096  # rows of the vocabulary that are on the host at a time while two embeddings are compared

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"


def resolve_folder(name: Path | str) -> Path:
    """The local folder of a checkpoint: `name` itself, or the snapshot of the hub id `org/name` where no such path exists.

    Raises:
      ValueError: neither a local folder nor a hub id that could be fetched.
    """
    folder = Path(name)
    if folder.is_dir():
        return folder
    if folder.exists():
        raise ValueError(f"model folder {name} is a file; give the folder that holds config.json and {_SINGLE}")
    if not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", str(name)):
        raise ValueError(f"model folder {name} does not exist, and is not a hub id of the form org/name either")
    import huggingface_hub

    try:
        return Path(huggingface_hub.snapshot_download(str(name), allow_patterns=["*.json", "*.safetensors", "*.model", "*.txt"]))
    except (
        OSError,
        ValueError,
    ) as error:  # every failure of the hub's client is one of the two; the user needs the name they gave
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(f"model {name} is not a local folder and could not be fetched from the hub: {reason}") from error


def read_config(folder: Path | str, *, compute_dtype: str) -> DecoderConfig:
    """The DecoderConfig of `folder`/config.json (a local folder or a hub id, see resolve_folder).

    Raises:
      ValueError: no such folder or file, or a setting that the decoder does not compute; names the file, the key and the value.
    """
    path = resolve_folder(folder) / "config.json"
    values = _read_json(path)

    model_type, architectures = values.get("model_type"), values.get("architectures") or []
    supported = ARCHITECTURES.get(str(model_type), ())
    if not supported or (unsupported := [a for a in architectures if a not in supported]):
        found = f"architectures={unsupported}" if supported else f"model_type={model_type!r} with architectures={architectures}"
        known = ", ".join(f"{kind} ({', '.join(names)})" for kind, names in ARCHITECTURES.items())
        raise ValueError(f"{path}: {found} is not supported; supported: {known}")
    for key, allowed in _COMPUTED.items():
        if key in values and values[key] not in allowed:
            raise ValueError(f"{path}: {key}={values[key]!r} is not supported; the decoder computes {key}={allowed[0]!r} only")

    width, heads = _size(path, values, "hidden_size"), _size(path, values, "num_attention_heads")
    if values.get("head_dim") is None and width % heads:
        raise ValueError(
            f"{path}: hidden_size={width} is not divisible by num_attention_heads={heads}, and head_dim is not given"
        )
    return DecoderConfig(
        layers=_size(path, values, "num_hidden_layers"),
        width=width,
        heads=heads,
        kv_heads=_size(path, values, "num_key_value_heads", heads),
        head_size=_size(path, values, "head_dim", width // heads),
        ffn=_size(path, values, "intermediate_size"),
        vocab=_size(path, values, "vocab_size"),
        max_positions=_size(path, values, "max_position_embeddings", 2048),
        rope_theta=_rope_theta(path, values),
        norm_epsilon=float(values.get("rms_norm_eps", 1e-6)),
        tied_embedding=bool(values.get("tie_word_embeddings", False)),
        compute_dtype=compute_dtype,
    )


def check_weights(folder: Path | str, config: DecoderConfig) -> None:
    """Raises ValueError where load_params would, by names, shapes and dtypes in the files' headers; loads no tensor."""
    with contextlib.ExitStack() as stack:
        _open_checked(resolve_folder(folder), config, stack)


def load_params(folder: Path | str, config: DecoderConfig, shardings: Params) -> Params:
    """The checkpoint's parameters, float32, each created in its sharding.

    Every device's shard is read from the file as the slice it is, so that the host holds one parameter (stacked over layers,
    this process' shards of it) at a time, never the checkpoint.

    Args:
      folder: a local folder or a hub id, see resolve_folder.
      config: the shape the tensors must have, see read_config.
      shardings: decoder.param_shardings(config, mesh).

    Raises:
      ValueError: no safetensors; a shard is missing or damaged; a tensor is unknown, missing, in two files, of another shape
        or of a dtype other than float32, float16 and bfloat16; tied embeddings that differ. Names the tensor and the file.
    """
    folder = resolve_folder(folder)
    with contextlib.ExitStack() as stack:
        tensors, sources = _open_checked(folder, config, stack)
        sizes = _axis_sizes(config)
        layers: dict[str, list[str]] = {}  # our parameter -> its tensors, by layer
        axes: dict[str, tuple[str, str]] = {}
        for name, (path, stored_axes, our_axes) in sources.items():
            layers.setdefault(path, []).append(name)
            axes[path] = stored_axes, our_axes

        def load(path: str, spec: decoder.ParamSpec) -> jax.Array:
            def read_shard(index: tuple[slice, ...] | None) -> np.ndarray:
                assert index is not None
                names = layers[path]
                if spec.axes[0] != "layers":
                    return _read_slice(tensors[names[0]], *axes[path], sizes, index)
                return np.stack([_read_slice(tensors[name], *axes[path], sizes, index[1:]) for name in names[index[0]]])

            return jax.make_array_from_callback(spec.shape, sharding_of[path], read_shard)

        sharding_of = {
            ".".join(str(entry.key) for entry in path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(shardings)
        }
        return decoder.map_specs(load, config)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"{path} does not exist; a model folder holds config.json and {_SINGLE} (or shards with {_INDEX})")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds a JSON {type(values).__name__}, expected an object")
    return values


def _size(path: Path, values: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = values.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{path}: {key}={value!r} must be a positive integer")
    return value


def _rope_theta(path: Path, values: Mapping[str, Any]) -> float:
    """rope_theta of either generation of keys; refuses every scaling of the rotary frequencies."""
    theta = values.get("rope_theta")
    for key in ("rope_scaling", "rope_parameters"):
        rope = values.get(key) or {}
        if not isinstance(rope, dict) or rope.get("rope_type", rope.get("type", "default")) != "default":
            raise ValueError(f"{path}: {key}={rope!r} is not supported; the decoder computes rope_type='default' only")
        if rope.get("partial_rotary_factor", 1.0) != 1.0:
            raise ValueError(
                f"{path}: {key}={rope!r} is not supported; the decoder rotates whole heads (partial_rotary_factor=1.0)"
            )
        theta = rope.get("rope_theta", theta)
    return 10_000.0 if theta is None else float(theta)


def _open_tensors(folder: Path, stack: contextlib.ExitStack) -> tuple[dict[str, Any], dict[str, Path]]:
    """Lazy slices of all tensors of the checkpoint by name, and the file each one is in. Nothing is read but the headers."""
    indexed: dict[str, str] = {}
    if (folder / _SINGLE).is_file():
        paths = [folder / _SINGLE]
    elif (folder / _INDEX).is_file():
        indexed = _read_json(folder / _INDEX).get("weight_map", {})
        paths = [folder / shard for shard in sorted(set(indexed.values()))]
        if missing := [path.name for path in paths if not path.is_file()]:
            raise ValueError(f"{folder / _INDEX} names {missing}, which {folder} does not hold")
    else:
        pickled = sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth"))
        if pickled:
            raise ValueError(
                f"{folder} holds only pickled weights ({pickled[0]}), which run code when loaded; convert them once, where you "
                "trust them: load the folder with transformers and call save_pretrained(folder, safe_serialization=True)"
            )
        raise ValueError(f"{folder} holds no weights: neither {_SINGLE} nor {_INDEX}")

    tensors: dict[str, Any] = {}
    files: dict[str, Path] = {}
    for path in paths:
        try:
            opened = stack.enter_context(safetensors.safe_open(path, framework="numpy"))
        except SafetensorError as error:
            raise ValueError(f"{path} is damaged or not whole ({error}); fetch it again") from error
        for name in opened.keys():  # noqa: SIM118 (the handle is not a mapping)
            if name in tensors:
                raise ValueError(f"tensor {name} is in two files: {files[name]} and {path}")
            tensors[name], files[name] = opened.get_slice(name), path
    if misplaced := sorted(name for name, shard in indexed.items() if name not in files or files[name].name != shard):
        raise ValueError(f"{folder / _INDEX} names tensors that are not in their files: {_some(misplaced, indexed)}")
    return tensors, files


def _open_checked(
    folder: Path, config: DecoderConfig, stack: contextlib.ExitStack
) -> tuple[dict[str, Any], dict[str, tuple[str, str, str]]]:
    """All tensors of the checkpoint, and those to read with their entries of PARAMETERS, once every check has passed."""
    tensors, files = _open_tensors(folder, stack)
    sources = _sources(folder, set(tensors), config)
    sizes = _axis_sizes(config)
    for name, (_, stored_axes, _) in sources.items():
        shape = [math.prod(sizes[a] for a in group) for group in _groups(stored_axes)]
        _check_tensor(name, tensors[name], shape, files[name])
    if config.tied_embedding and {_EMBEDDING, _LM_HEAD} <= set(tensors):
        _check_tied(tensors, files)
    return tensors, sources


def _sources(folder: Path, present: set[str], config: DecoderConfig) -> dict[str, tuple[str, str, str]]:
    """The tensors to read, in the order of their layers -> entry of PARAMETERS.

    Raises:
      ValueError: names the tensors that are missing or unknown.
    """
    expected: dict[str, tuple[str, str, str]] = {}
    for pattern, entry in PARAMETERS.items():
        for layer in range(config.layers if "{layer}" in pattern else 1):
            expected[pattern.format(layer=layer)] = entry
    if config.tied_embedding:
        del expected[_LM_HEAD]
        if _EMBEDDING not in present and _LM_HEAD in present:  # savers keep either of the two names of one tensor
            expected = {(_LM_HEAD if name == _EMBEDDING else name): entry for name, entry in expected.items()}
    redundant = {_LM_HEAD} if config.tied_embedding else set()
    if missing := [name for name in expected if name not in present]:
        raise ValueError(f"{folder}: {len(missing)} of {len(expected)} tensors are missing from the weights: {_some(missing)}")
    if unknown := sorted(name for name in present - set(expected) - redundant if not _IGNORED.fullmatch(name)):
        raise ValueError(f"{folder}: {len(unknown)} tensors of the weights are unknown to the decoder: {_some(unknown)}")
    return expected


def _some(names: list[str], files: Mapping[str, str] | None = None) -> str:
    shown = [f"{name} ({files[name]})" if files else name for name in names[:6]]
    return ", ".join(shown) + (f" and {len(names) - 6} more" if len(names) > 6 else "")


def _axis_sizes(config: DecoderConfig) -> dict[str, int]:
    c = config
    return {"V": c.vocab, "D": c.width, "N": c.heads, "G": c.kv_heads, "H": c.head_size, "F": c.ffn}


def _groups(axes: str) -> list[list[str]]:
    """The axes of each stored dimension: "(N H) D" -> [["N", "H"], ["D"]]."""
    return [group.split() for group in re.findall(r"\(([^)]*)\)|(\w)", axes) for group in group if group]


def _check_tensor(name: str, tensor: Any, shape: list[int], path: Path) -> None:
    if tensor.get_shape() != shape:
        raise ValueError(f"{path}: {name} has shape {tensor.get_shape()}, config.json makes it {shape}")
    if tensor.get_dtype() not in _DTYPES:
        raise ValueError(f"{path}: {name} is stored as {tensor.get_dtype()}; supported: {', '.join(_DTYPES)}")


def _check_tied(tensors: Mapping[str, Any], files: Mapping[str, Path]) -> None:
    """A redundant lm_head must equal the embedding: the file says one thing, tie_word_embeddings the other."""
    embedding, lm_head = tensors[_EMBEDDING], tensors[_LM_HEAD]
    _check_tensor(_LM_HEAD, lm_head, embedding.get_shape(), files[_LM_HEAD])
    V = embedding.get_shape()[0]
    for start in range(0, V, _COMPARED_ROWS):
        rows = slice(start, min(start + _COMPARED_ROWS, V))
        if not np.array_equal(embedding[rows].astype(np.float32), lm_head[rows].astype(np.float32)):
            raise ValueError(
                f"{files[_LM_HEAD]}: {_LM_HEAD} differs from {_EMBEDDING}, but config.json says tie_word_embeddings=true; "
                "set it to false to load both"
            )


def _read_slice(tensor: Any, stored_axes: str, our_axes: str, sizes: Mapping[str, int], index: tuple[slice, ...]) -> np.ndarray:
    """float32 block `index` (in our axes) of a stored tensor; reads no more than the block where heads are whole."""
    ours = our_axes.split()
    bounds = {axis: part.indices(sizes[axis])[:2] for axis, part in zip(ours, index, strict=True)}
    groups = _groups(stored_axes)
    stored_index, shape, inner = [], [], []
    for slowest, *rest in groups:
        start, stop = bounds[slowest]
        stride = math.prod(sizes[axis] for axis in rest)
        stored_index.append(slice(start * stride, stop * stride))
        shape += [stop - start, *(sizes[axis] for axis in rest)]
        inner += [slice(None), *(slice(*bounds[axis]) for axis in rest)]
    block = tensor[tuple(stored_index)].reshape(shape)[tuple(inner)]
    flat = [axis for group in groups for axis in group]
    return np.ascontiguousarray(block.transpose([flat.index(axis) for axis in ours]), np.float32)
