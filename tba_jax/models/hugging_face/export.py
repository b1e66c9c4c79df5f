"""Export to Hugging Face folders: weights, config.json and tokenizer, as transformers reads them.

The folder appears at its name once it is whole (outputs.py). architectures.py says what the tensors are called and how they lie.
"""

import codecs
import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import safetensors.numpy

from tba_jax import outputs
from tba_jax.models import parameters
from tba_jax.models.config import FREE_FIELDS
from tba_jax.models.hugging_face import files, load
from tba_jax.models.hugging_face.architectures import ARCHITECTURES
from tba_jax.models.hugging_face.files import Settings, Stored
from tba_jax.models.parameters import Params

DTYPES = tuple(map(str, load.DTYPES.values()))

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "chat_template.jinja",
    "chat_template.json",
)


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
      folder: created, with its parents; it must not exist, or be empty. After an error it does not exist, or is empty.
      params: np.asarray must give a NumPy array of every leaf and of every leaf[layer]: jax.Array, np.ndarray and
        tensorstore.TensorStore will do. Adapters must be merged, and integer weights restored.
      dtype: of the weights in the file, "float32", "float16" or "bfloat16".
      source: the folder that the model came from. Its config.json is kept except for the class and the dtype, and its
        generation_config.json is copied.
      token_ids: further keys of config.json, as {"pad_token_id": 0}: a class with a score head needs one for padded batches.
      more: functions that write further files into the folder that they are called with, before that has its final name.
      max_shard_bytes: of the weights in one file; more are written as shards with an index.

    Raises:
      ValueError: names the folder, the parameter or the field of the config that cannot be written.
    """
    folder = Path(folder)
    check_dtype(dtype)
    values = _config_values(folder, config, dtype, source) | dict(token_ids or {})
    leaves = _checked_leaves(config, params)
    with outputs.folder(folder) as whole:
        _write_weights(whole, config, leaves, dtype, max_shard_bytes)
        (whole / "config.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
        if source is not None and (Path(source) / "generation_config.json").is_file():
            _copy(Path(source) / "generation_config.json", whole / "generation_config.json")
        for write in more:
            write(whole)


def check_dtype(dtype: str) -> None:
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

    tensors = {  # name -> layer (None outside of the stack), what it holds
        pattern.format(layer=layer): (layer, parts)
        for pattern, parts in ARCHITECTURES[config.architecture].tensors(config).items()
        for layer in (range(config.layers) if "{layer}" in pattern else (None,))
    }
    item = jnp.dtype(dtype).itemsize
    split = huggingface_hub.split_state_dict_into_shards_factory(
        {name: item * math.prod(parts[0].shape(config.sizes)) for name, (_, parts) in tensors.items()},
        get_storage_size=int,
        filename_pattern=load.SINGLE.replace(".", "{suffix}.", 1),
        max_shard_size=max_shard_bytes,
    )
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / load.INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    for file, names in split.filename_to_tensors.items():
        write_tensors(folder / file, {name: _content(name, *tensors[name], leaves, config.sizes, dtype) for name in names})


def write_tensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """Writes a safetensors file. safetensors' own save_file would let nobody but the user read it."""
    path.write_bytes(safetensors.numpy.save(tensors, metadata={"format": "pt"}))


def _content(
    name: str, layer: int | None, parts: Sequence[Stored], leaves: Mapping[str, Any], sizes: Mapping[str, int], dtype: str
) -> np.ndarray:
    """The tensor. Raises ValueError on an integer parameter, and on numbers that are not finite (in `dtype`)."""
    content = np.empty(parts[0].shape(sizes), jnp.dtype(dtype))
    for part in parts:
        leaf = leaves[part.path]
        ours = np.asarray(leaf if layer is None else leaf[layer])
        if not jnp.issubdtype(ours.dtype, jnp.floating):
            raise ValueError(f"{part.path} is {ours.dtype}; integer weights must be restored before they are exported")
        with np.errstate(over="ignore"):  # what becomes infinite is refused below
            files.copy(part.view(content, sizes), ours)
    return finite(content, name, parts[0].path)


def finite(content: np.ndarray, name: str, path: str) -> np.ndarray:
    """The tensor called `name`. Raises ValueError where our parameter `path` has given it numbers that are not finite."""
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
