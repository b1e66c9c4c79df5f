"""Strict import of Hugging Face checkpoints: config.json to our config, safetensors to sharded parameters.

A setting that our models would compute differently, and a tensor that the architecture does not have, is refused by name.
"""

import contextlib
import dataclasses
import functools
import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
from safetensors import SafetensorError

from tba_jax.models import parameters
from tba_jax.models.hugging_face import files
from tba_jax.models.hugging_face.architectures import ARCHITECTURES, INSTEAD
from tba_jax.models.hugging_face.files import Stored
from tba_jax.models.parameters import Params, ParamSpec

log = logging.getLogger(__name__)

DTYPES: dict[str, np.dtype[Any]] = {"F32": jnp.dtype("float32"), "F16": jnp.dtype("float16"), "BF16": jnp.dtype("bfloat16")}

COMPARED_ROWS = 4096  # rows of the vocabulary that are on the host at a time while two embeddings are compared
_NEW_HEAD = "score."  # a parameter that may be initialised where the checkpoint does not hold it

# What a checkpoint is for that has a head, in the words of a message.
_FOR = {
    "language_model": "generate text",
    "score": "score texts as a reward model",
    "classification": "classify texts",
    "embedding": "embed texts",
}

HUB_TIMEOUT_SECONDS = 10.0  # for the hub's first answer; its libraries would try for minutes
_HTTP_CLIENTS = ("httpx", "httpcore", "requests", "urllib3")

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


class NotFetched(ValueError):
    """What a setting names is neither on this machine nor given by the hub."""


def is_away(error: BaseException) -> bool:
    """Whether an error of the hub's client means that the hub does not answer, or answers that it cannot serve (429, 5xx)."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status is not None:
        return status == 429 or status >= 500
    of_client = any(kind.__module__.startswith(_HTTP_CLIENTS) for kind in type(error).__mro__)
    return of_client or isinstance(error, ConnectionError | TimeoutError)


def unreachable(ask: Callable[[], object], *, called: str) -> BaseException | None:
    """The error by which the hub does not answer `ask`, with a warning that names what is `called`; None where it answers."""
    import huggingface_hub.constants

    if huggingface_hub.constants.HF_HUB_OFFLINE:
        return None
    try:
        ask()
    except Exception as error:  # the errors depend on the version of the hub's HTTP client
        if not is_away(error):
            raise
        log.warning("the hub cannot be reached (%s); %s is taken from its cache, if it is there", type(error).__name__, called)
        return error
    return None


@contextlib.contextmanager
def offline() -> Iterator[None]:
    """The libraries of the hub read their caches only, and try no connection."""
    import datasets
    import huggingface_hub.constants

    before = huggingface_hub.constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    huggingface_hub.constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        huggingface_hub.constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before


@contextlib.contextmanager
def named(setting: str, path: Path | str) -> Iterator[None]:
    """Lets the sentence of a ValueError begin with the setting that named the checkpoint."""
    try:
        yield
    except ValueError as error:
        if str(error).startswith(f"{setting}="):
            raise
        advice = f"; a local folder needs no hub: --config.{setting}=FOLDER" if isinstance(error, NotFetched) else ""
        advice += " (with make: MODEL=FOLDER)" if advice and setting == "model.path" else ""
        raise ValueError(f"{setting}={str(path)!r}: {error}{advice}") from error


def resolve_folder(name: Path | str, *, weights: bool = True) -> Path:
    """The local folder of a checkpoint: `name` itself, or the snapshot of the hub id `org/name` where no such path exists.

    Args: weights: False: of a snapshot, config and tokenizer are enough. Raises ValueError: neither can be had.
    """
    folder = Path(name)
    if folder.is_dir():
        return folder
    if folder.exists():
        raise ValueError(f"model folder {name} is a file; give the folder that holds config.json and {SINGLE}")
    if not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", str(name)):
        raise ValueError(f"model folder {name} does not exist, and is not a hub id of the form org/name either")
    import huggingface_hub

    patterns = ["*.json", *(["*.safetensors"] if weights else []), "*.model", "*.txt", "README.md"]  # the last tells the licence
    away: BaseException | None = None
    try:
        ask = functools.partial(huggingface_hub.HfApi().model_info, str(name), timeout=HUB_TIMEOUT_SECONDS)
        away = unreachable(ask, called=f"model {name}")
        cached = (huggingface_hub.try_to_load_from_cache(str(name), file) for file in (INDEX, SINGLE))
        if weights and away is None and not any(isinstance(path, str) for path in cached):
            log.info("downloading the weights of %s from the hub, which may take minutes", name)
        return Path(huggingface_hub.snapshot_download(str(name), allow_patterns=patterns, local_files_only=away is not None))
    except (OSError, ValueError) as error:  # every failure of the hub's client is one of the two
        unreached = isinstance(error, huggingface_hub.errors.LocalEntryNotFoundError)
        cause = away if unreached and away else error
        reason = str(cause).strip().splitlines()[0] if str(cause).strip() else type(cause).__name__
        told = "it is not in the hub's cache, and the hub cannot be reached" if unreached else "the hub did not give it"
        raise NotFetched(f"there is no local folder {name}, and {told}: {reason.removeprefix('Got: ')}") from error


def holds_weights(name: Path | str) -> bool:
    """Whether the weights of a checkpoint are on this machine: in its local folder, or in the hub's cache. See resolve_folder."""
    folder = resolve_folder(name, weights=False)
    return (folder / SINGLE).is_file() or (folder / INDEX).is_file()


def read_config(folder: Path | str, *, compute_dtype: str, attention: str = "auto", head: str | None = None) -> Any:
    """Reads config.json of a folder (see resolve_folder) as a DecoderConfig or an EncoderConfig.

    Args: head: "language_model" or "score"; None: that of the checkpoint's class. With "score" (one label), a language model
      becomes a reward model whose head load_params initialises.

    Raises ValueError: no such folder or file, or a setting that is not computed; names the file, the key and the value.
    """
    settings = files.read_settings(resolve_folder(folder, weights=False) / "config.json")
    return config_of(settings, compute_dtype=compute_dtype, attention=attention, head=head)


def config_of(settings: files.Settings, *, compute_dtype: str, attention: str = "auto", head: str | None = None) -> Any:
    """See read_config."""
    model_type, classes = settings.values.get("model_type"), settings.names("architectures")
    architecture = ARCHITECTURES.get(str(model_type))
    if architecture is None:
        instead = INSTEAD.get(str(model_type), f"supported: {', '.join(ARCHITECTURES)}")
        raise ValueError(f"{settings.path}: model_type={model_type!r} with architectures={classes} is not supported; {instead}")
    if unsupported := [name for name in classes if name not in architecture.heads]:
        raise ValueError(
            f"{settings.path}: architectures={unsupported} is not supported; of {model_type}: {', '.join(architecture.heads)}"
        )
    stored_head = architecture.heads[classes[0] if classes else next(iter(architecture.heads))]
    head = stored_head if head is None else head
    if head not in architecture.heads.values():
        able = ", ".join(name for name, known in ARCHITECTURES.items() if head in known.heads.values())
        raise ValueError(f"{settings.path}: model_type={model_type!r} cannot {_FOR[head]}; model types that can: {able}")
    if head == "language_model" and stored_head != "language_model":
        raise ValueError(f"{settings.path}: architectures={classes} cannot {_FOR[head]}: it has no language model's head")
    fields = architecture.read(settings)
    if head == "score":
        fields["labels"] = settings.labels() if stored_head == "score" else 1
    fields |= {"architecture": model_type, "head": head, "compute_dtype": compute_dtype, "attention": attention}
    try:
        return architecture.config(**fields)
    except ValueError as error:
        raise ValueError(f"{settings.path}: {error}") from error


def check_weights(folder: Path | str, config: Any, *, new_heads: bool = False) -> None:
    """Raises what load_params would of names, shapes and dtypes. Args: new_heads: whether load_params will be given `fresh`."""
    _open_checked(resolve_folder(folder), config, new_heads)


def load_params(
    folder: Path | str, config: Any, shardings: Params, *, fresh: jax.Array | None = None, dtype: str = "float32"
) -> Params:
    """The checkpoint's parameters, each created in its sharding: files are mapped, and every device's shard is filled layer by
    layer from its slices of them, so that the host holds no more than the shards of this process.

    Args:
      folder: a local folder or a hub id, see resolve_folder.
      shardings: of the config's parameters, see Definition.shardings.
      fresh: a random key, from which a score head is initialised if the checkpoint does not hold one; None: an error.
      dtype: of the parameters that are read; a new head is float32.

    Raises ValueError, which names tensor and file: no safetensors; a shard is missing or damaged; a tensor is unknown, missing,
    in two files, of another shape or dtype, or not finite; tied embeddings that differ.
    """
    definition = ARCHITECTURES[config.architecture].define(config)
    specs, sharding_of = parameters.flatten(definition.specs), parameters.flatten(shardings)
    sources = _open_checked(resolve_folder(folder), config, fresh is not None)
    read = functools.partial(_load, sizes=config.sizes, dtype=dtype)
    loaded = {path: read(of_path, specs[path], sharding_of[path]) for path, of_path in sources.items()}
    if new := [path for path in specs if path not in sources]:
        assert all(path.startswith(_NEW_HEAD) for path in new), "the architecture has a tensor for every other parameter"

        def init(key: jax.Array) -> dict[str, jax.Array]:
            drawn = parameters.flatten(definition.init(key))
            return {path: drawn[path] for path in new}

        loaded |= jax.jit(init, out_shardings={path: sharding_of[path] for path in new})(fresh)
    return parameters.unflatten({path: loaded[path] for path in specs})


@dataclasses.dataclass(frozen=True)
class _Tensor:
    name: str
    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int  # bytes from the beginning of the file

    def map(self) -> np.ndarray:
        """The tensor as a memory map: the system reads a page when it is touched, and may drop it again."""
        return np.asarray(np.memmap(self.path, DTYPES[self.dtype], mode="r", offset=self.offset, shape=self.shape))


# One of our parameters (of one layer, and of one expert): the tensor that holds it, and how.
_Source = tuple[_Tensor, Stored]


def _load(
    sources: Sequence[_Source], spec: ParamSpec, sharding: jax.sharding.Sharding, *, sizes: Mapping[str, int], dtype: str
) -> jax.Array:
    """One of our parameters in its sharding, of which every device's shard is read by itself."""

    def read_shard(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None
        bounds = [part.indices(size) for part, size in zip(index, spec.shape, strict=True)]
        shard = parameters.aligned_empty(tuple(stop - start for start, stop, _ in bounds), dtype)
        stacked = len(spec.shape) - len(sources[0][1].our_axes.split())  # axes along which each tensor is one entry
        numbers = np.arange(len(sources)).reshape(spec.shape[:stacked])[index[:stacked]]
        for place, number in np.ndenumerate(numbers):
            _fill(shard[place], sources[int(number)], sizes, index[stacked:])
        return shard

    return jax.make_array_from_callback(spec.shape, sharding, read_shard)


def _fill(target: np.ndarray, source: _Source, sizes: Mapping[str, int], index: tuple[slice, ...]) -> None:
    """Copies a slice of one of our parameters out of its file, in the target's dtype."""
    tensor, stored = source
    files.copy(target, stored.view(tensor.map(), sizes)[index])
    if target.size and not np.isfinite([target.min(), target.max()]).all():
        raise ValueError(f"{tensor.path}: {tensor.name} holds numbers that are not finite")


def _open_file(path: Path) -> list[_Tensor]:
    """All tensors of a safetensors file, from its header."""
    try:
        with safetensors.safe_open(path, framework="numpy"):  # checks the header against the file's size
            pass
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or not whole ({error}); fetch it again") from error
    with path.open("rb") as file:
        header_size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(header_size))
    begin = 8 + header_size
    return [
        _Tensor(name, path, entry["dtype"], tuple(entry["shape"]), begin + entry["data_offsets"][0])
        for name, entry in header.items()
        if name != "__metadata__"
    ]


def _open_folder(folder: Path) -> dict[str, _Tensor]:
    """All tensors of the checkpoint by name. Nothing is read but the headers."""
    indexed: dict[str, str] = {}
    if (folder / SINGLE).is_file():
        paths = [folder / SINGLE]
    elif (folder / INDEX).is_file():
        indexed = files.read_settings(folder / INDEX).table("weight_map")
        if not indexed:
            raise ValueError(f"{folder / INDEX}: weight_map names no file")
        if outside := [name for name in indexed.values() if not isinstance(name, str) or Path(name).name != name]:
            raise ValueError(f"{folder / INDEX}: weight_map names {outside[0]!r}, which must be a file of this folder")
        paths = [folder / shard for shard in sorted(set(indexed.values()))]
        if missing := [path.name for path in paths if not path.is_file()]:
            raise ValueError(f"{folder / INDEX} names {missing}, which {folder} does not hold")
    else:
        files.check_no_adapter(folder)
        pickled = sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth"))
        if pickled:
            raise ValueError(
                f"{folder} holds only pickled weights ({pickled[0]}), which run code when loaded; convert them once, where you "
                "trust them: load the folder with transformers and call save_pretrained(folder, safe_serialization=True)"
            )
        raise ValueError(f"{folder} holds no weights: neither {SINGLE} nor {INDEX}")

    tensors: dict[str, _Tensor] = {}
    for path in paths:
        for tensor in _open_file(path):
            if tensor.name in tensors:
                raise ValueError(f"tensor {tensor.name} is in two files: {tensors[tensor.name].path} and {path}")
            tensors[tensor.name] = tensor
    return tensors


def _open_checked(folder: Path, config: Any, new_heads: bool) -> dict[str, list[_Source]]:
    """Our parameter -> its tensors, by layer and expert, once every check has passed, without new heads."""
    tensors = _open_folder(folder)
    sources: dict[str, list[_Source]] = {}
    for name, parts in _expected(folder, tensors, config, new_heads).items():
        _check_tensor(tensors[name], parts[0].shape(config.sizes))
        for part in parts:
            sources.setdefault(part.path, []).append((tensors[name], part))
    return sources


def _expected(folder: Path, present: Mapping[str, _Tensor], config: Any, new_heads: bool) -> dict[str, tuple[Stored, ...]]:
    """The tensors to read, in the order of layers and experts -> what they hold. Raises ValueError, see load_params."""
    architecture = ARCHITECTURES[config.architecture]
    table = architecture.tensors(config)
    prefix = architecture.prefix if any(name.startswith(architecture.prefix) for name in present) else ""

    def file_name(name: str) -> str:
        return name if prefix else name.removeprefix(architecture.prefix)

    if config.layers > len(present):
        raise ValueError(f"{folder}: config.json says {config.layers} layers, the weights hold {len(present)} tensors in all")
    if architecture.others is not None:
        other = architecture.others(config)
        if any(file_name(name) in present for name in architecture.named(config, {n: other[n] for n in other if n not in table})):
            table = other
    embedding = next((file_name(name) for name, parts in table.items() if parts[0].path == "embedding.weight"), "")
    expected = {file_name(name): parts for name, (_, _, parts) in architecture.named(config, table).items()}
    left_out = set() if architecture.lm_head in expected else {architecture.lm_head}
    if left_out & set(present) and config.tied_embedding:  # savers keep either name of a tied tensor, or both
        if embedding in present:
            _check_tied(present[embedding], present[architecture.lm_head])
        else:
            expected = {(architecture.lm_head if name == embedding else name): parts for name, parts in expected.items()}
    if new_heads:
        expected = {name: parts for name, parts in expected.items() if name in present or not parts[0].path.startswith(_NEW_HEAD)}
    missing = [name for name in expected if name not in present]
    ignored = re.compile(architecture.ignored)
    others = sorted(set(present) - set(expected) - left_out)
    unknown = [name for name in others if not ignored.fullmatch(name.removeprefix(architecture.prefix))]
    held = f"; unknown ones are there: {_some(unknown)}" if unknown else ""
    if missing:
        raise ValueError(
            f"{folder}: {len(missing)} of {len(expected)} tensors are missing from the weights: {_some(missing)}{held}"
        )
    if unknown:
        raise ValueError(f"{folder}: {len(unknown)} tensors of the weights are unknown to the model: {_some(unknown)}")
    return expected


def _some(names: list[str]) -> str:
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")


def _check_tensor(tensor: _Tensor, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape:
        raise ValueError(f"{tensor.path}: {tensor.name} has shape {list(tensor.shape)}, config.json makes it {list(shape)}")
    if tensor.dtype not in DTYPES:
        raise ValueError(f"{tensor.path}: {tensor.name} is stored as {tensor.dtype}; supported: {', '.join(DTYPES)}")


def _check_tied(embedding: _Tensor, lm_head: _Tensor) -> None:
    """A redundant lm_head must equal the embedding: the file says one thing, tie_word_embeddings the other."""
    _check_tensor(lm_head, embedding.shape)
    _check_tensor(embedding, embedding.shape)
    first, second = embedding.map(), lm_head.map()
    for start in range(0, len(first), COMPARED_ROWS):
        rows = slice(start, start + COMPARED_ROWS)
        if not np.array_equal(first[rows].astype(np.float32), second[rows].astype(np.float32)):
            raise ValueError(
                f"{lm_head.path}: {lm_head.name} differs from {embedding.name}, but config.json says tie_word_embeddings=true; "
                "set it to false to load both"
            )
