"""Export to folders of transformers (weights, config.json, tokenizer), and of adapters alone to folders of PEFT.

architectures.py says what the tensors are called and how they lie. An adapter adds scale · A B to a weight. Checkpoints that hold
query, key and value in one tensor have one adapter for the three: its rank is the sum of their ranks, and the columns of its B
that belong to one of them are zero in the rows of the others.
"""

import codecs
import dataclasses
import functools
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import safetensors.numpy

from tba_jax import outputs
from tba_jax.models import parameters
from tba_jax.models.config import FREE_FIELDS, DecoderConfig
from tba_jax.models.hugging_face import files, load
from tba_jax.models.hugging_face.architectures import ARCHITECTURES
from tba_jax.models.hugging_face.files import Settings, Stored
from tba_jax.models.parameters import Params
from tba_jax.models.policy import LoraConfig

DTYPES = tuple(map(str, load.DTYPES.values()))
ADAPTER_CONFIG, ADAPTER_WEIGHTS = files.ADAPTER
_WRAPPED = "base_model.model."  # begins the names of modules in the model that PEFT wraps
_HEAD = "lm_head"  # transformers 5 calls the head so in every model, also where checkpoints say embed_out

_NAMES = (
    "tokenizer.json tokenizer_config.json tokenizer.model special_tokens_map.json added_tokens.json vocab.json vocab.txt "
    "merges.txt spiece.model sentencepiece.bpe.model chat_template.jinja chat_template.json"
)
_TOKENIZER_FILES = _NAMES.split()


def save(
    folder: Path | str,
    config: Any,
    params: Params,
    *,
    dtype: str,
    source: Path | None = None,
    token_ids: Mapping[str, int | None] | None = None,
    more: Sequence[Callable[[Path], None]] = (),
    max_shard_bytes: int = 1 << 30,
) -> None:
    """Writes a folder from which transformers computes the same. One file's tensors at a time are on the host.

    Args:
      folder: created, with its parents, once it is whole; it must not exist, or be empty.
      params: of which np.asarray gives every leaf and every leaf[layer]: jax.Array, np.ndarray and tensorstore.TensorStore will
        do. Adapters must be merged, and integer weights restored.
      dtype: of the weights in the file, "float32", "float16" or "bfloat16".
      source: the folder that the model came from, whose config.json (but for class and dtype) and generation_config.json stay.
      token_ids: further keys of config.json, as {"pad_token_id": 0}: a class with a score head needs one for padded batches.
      more: functions that write further files into the folder that they are called with, before that has its final name.
      max_shard_bytes: of the weights in one file; more are written as shards with an index.

    Raises ValueError: names the folder, the parameter or the field of the config that cannot be written.
    """
    folder = Path(folder)
    _check_dtype(dtype)
    values = _config_values(folder, config, dtype, source) | dict(token_ids or {})
    leaves = _checked_leaves(config, params)
    with outputs.folder(folder) as whole:
        _write_weights(whole, config, leaves, dtype, max_shard_bytes)
        (whole / "config.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
        if source is not None and (Path(source) / "generation_config.json").is_file():
            _copy(Path(source) / "generation_config.json", whole / "generation_config.json")
        for write in more:
            write(whole)


def _check_dtype(dtype: str) -> None:
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r} of the export is not one of {', '.join(DTYPES)}")


def _config_values(folder: Path, config: Any, dtype: str, source: Path | None) -> dict[str, Any]:
    """The content of config.json, once reading it is known to give `config` again."""
    architecture = ARCHITECTURES[config.architecture]
    path = (folder if source is None else Path(source)) / "config.json"
    values = architecture.write(config) if source is None else files.read_json(path)
    classes = [name for name, head in architecture.heads.items() if head == config.head]
    if not set(Settings(path, values).names("architectures")) & set(classes):
        values["architectures"] = classes[:1]
    values["torch_dtype" if "torch_dtype" in values else "dtype"] = dtype
    if config.head == "score" and Settings(path, values).labels() != config.labels:
        values.pop("num_labels", None)
        values["id2label"] = {str(i): f"LABEL_{i}" for i in range(config.labels)}
        values["label2id"] = {f"LABEL_{i}": i for i in range(config.labels)}
    read = load.config_of(Settings(path, values), compute_dtype=config.compute_dtype)
    expected, found = dataclasses.asdict(config), dataclasses.asdict(read)
    if differing := [key for key in expected if key not in FREE_FIELDS and expected[key] != found[key]]:
        what = "cannot be said in a config.json of" if source is None else f"differ from {path} of"
        shown = ", ".join(f"{key}={expected[key]!r} (it gives {found[key]!r})" for key in differing)
        raise ValueError(f"{folder}: settings of the model that {what} model_type={config.architecture!r}: {shown}")
    return values


def _checked_leaves(config: Any, params: Params) -> dict[str, Any]:
    """The parameters by dotted name. Raises ValueError where they are not those of the config."""
    leaves, specs = parameters.flatten(params), parameters.flatten(ARCHITECTURES[config.architecture].define(config).specs)
    if unknown := sorted(set(leaves) - set(specs)):
        raise ValueError(f"parameters that a checkpoint has no name for: {', '.join(unknown[:6])}; merge or restore them first")
    if missing := [name for name in specs if name not in leaves]:
        raise ValueError(f"parameters of the model that are not given: {', '.join(missing[:6])}")
    for name, spec in specs.items():
        if tuple(leaves[name].shape) != spec.shape:
            raise ValueError(f"{name} has shape {list(leaves[name].shape)}, the config makes it {list(spec.shape)}")
    return leaves


def _write_weights(folder: Path, config: Any, leaves: Mapping[str, Any], dtype: str, max_shard_bytes: int) -> None:
    import huggingface_hub

    architecture = ARCHITECTURES[config.architecture]
    tensors = architecture.named(config, architecture.tensors(config))
    item = jnp.dtype(dtype).itemsize
    split = huggingface_hub.split_state_dict_into_shards_factory(
        {name: item * math.prod(parts[0].shape(config.sizes)) for name, (*_, parts) in tensors.items()},
        get_storage_size=int,
        filename_pattern=load.SINGLE.replace(".", "{suffix}.", 1),
        max_shard_size=max_shard_bytes,
    )
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / load.INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    @functools.lru_cache(maxsize=1)  # the experts of a layer follow each other
    def read(path: str, layer: int | None) -> np.ndarray:
        return np.asarray(leaves[path] if layer is None else leaves[path][layer])

    for file, names in split.filename_to_tensors.items():
        _write_tensors(folder / file, {name: _content(name, *tensors[name], read, config.sizes, dtype) for name in names})


def _write_tensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """Writes a safetensors file. safetensors' own save_file would let nobody but the user read it."""
    path.write_bytes(safetensors.numpy.save(tensors, metadata={"format": "pt"}))


def _content(
    name: str,
    layer: int | None,
    expert: int | None,
    parts: Sequence[Stored],
    read: Callable[[str, int | None], np.ndarray],
    sizes: Mapping[str, int],
    dtype: str,
) -> np.ndarray:
    """The tensor. Raises ValueError on an integer parameter, and on numbers that are not finite (in `dtype`).

    Args: read: (our path, number of the layer) -> our parameter.
    """
    content = np.empty(parts[0].shape(sizes), jnp.dtype(dtype))
    for part in parts:
        ours = read(part.path, layer)
        ours = ours if expert is None else ours[expert]
        if not jnp.issubdtype(ours.dtype, jnp.floating):
            raise ValueError(f"{part.path} is {ours.dtype}; integer weights must be restored before they are exported")
        with np.errstate(over="ignore"):  # what becomes infinite is refused below
            files.copy(part.view(content, sizes), ours)
    return _finite(content, name, parts[0].path)


def _finite(content: np.ndarray, name: str, path: str) -> np.ndarray:
    """The tensor called `name`. Raises ValueError naming our parameter `path` if a number is not finite."""
    if not np.isfinite(content).all():
        raise ValueError(f"{path} (tensor {name}) holds numbers that are not finite in {content.dtype}")
    return content


def _copy(source: Path, target: Path) -> None:
    """Copies a file without the byte order mark that it may begin with, which readers other than ours refuse."""
    target.write_bytes(source.read_bytes().removeprefix(codecs.BOM_UTF8))


def copy_tokenizer(source: Path | str, folder: Path | str) -> None:
    """Copies the files of a tokenizer. Raises ValueError where there are none."""
    found = [name for name in _TOKENIZER_FILES if (Path(source) / name).is_file()]
    if not found:
        raise ValueError(f"{source} holds no tokenizer: none of {', '.join(_TOKENIZER_FILES)}")
    for name in found:
        _copy(Path(source) / name, Path(folder) / name)


def write_character_tokenizer(folder: Path | str, characters: str, *, pad_id: int, bos_id: int, eos_id: int) -> None:
    """Writes a tokenizer of one id a character, after the special ids 0, 1 and 2; it begins every text with bos_id."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

    # The name of a special token must not be a text: one of its characters is outside the alphabet.
    form = next(form for form in ("<{}>", "<|{}|>", "⟨{}⟩", "\ue000{}\ue001") if set(form) - set("{}") - set(characters))
    names = {form.format(name): i for name, i in (("pad", pad_id), ("bos", bos_id), ("eos", eos_id))}
    pad, bos, eos = names
    vocab = names | {character: i for i, character in enumerate(characters, start=len(names))}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=""))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{bos} $A", pair=None, special_tokens=[(bos, bos_id)])
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    tokenizer.save(str(Path(folder) / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": pad,
        "bos_token": bos,
        "eos_token": eos,
        "clean_up_tokenization_spaces": False,
    }
    (Path(folder) / "tokenizer_config.json").write_text(
        json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
    )


def tokenizer_files(tokenizer: Any, source: Path | None) -> tuple[Callable[[Path], None], dict[str, int]]:
    """A function that writes the tokenizer into a folder, and the token ids for config.json, {} if `source` has its own.

    Args: tokenizer: of characters, where there is no source. source: the folder that the model came from.
    """
    if source:
        return functools.partial(copy_tokenizer, source), {}
    ids = {name: getattr(tokenizer, name) for name in ("pad_id", "bos_id", "eos_id")}
    write = functools.partial(write_character_tokenizer, characters=tokenizer.characters, **ids)
    return write, {name.replace("_id", "_token_id"): token for name, token in ids.items()}


def untied(config: DecoderConfig, params: Params) -> tuple[DecoderConfig, Params]:
    """The same model with a head of its own: vLLM 0.32 takes new weights of a tied head as the embedding's alone."""
    if not config.tied_embedding:
        return config, params
    head = {"lm_head": {"weight": np.asarray(params["embedding"]["weight"]).T}}
    return dataclasses.replace(config, tied_embedding=False), params | head


def save_adapters(
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
      adapters: lora_a [L, inputs ..., r] and lora_b [L, r, outputs ...] of every map that has one; L in the stack of layers only.
      base: the folder or the hub id of the model that the adapters belong to. Others: see `save`.

    Raises ValueError: as `save`, or an adapter holds numbers that are not finite.
    """
    _check_dtype(dtype)
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
                tensors[name] = _finite(np.ascontiguousarray(matrix.astype(jnp.dtype(dtype))), name, "an adapter")
        _write_tensors(whole / ADAPTER_WEIGHTS, tensors)
        values = _adapter_config(modules, config, lora, base)
        (whole / ADAPTER_CONFIG).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
        for write in more:
            write(whole)


def _adapted(config: DecoderConfig, leaves: Mapping[str, Any]) -> dict[str, tuple[Stored, ...]]:
    """The modules of transformers that have an adapter ("{layer}" for its number) -> our weights that their tensors hold."""
    architecture = ARCHITECTURES[config.architecture]
    ours = {name.removesuffix("lora_a") + "weight" for name in leaves if name.endswith(".lora_a")}
    found = {
        _HEAD if tensor == architecture.lm_head else tensor.removesuffix(".weight"): tuple(p for p in stored if p.path in ours)
        for tensor, stored in architecture.tensors(config).items()
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


def _adapter_config(
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
