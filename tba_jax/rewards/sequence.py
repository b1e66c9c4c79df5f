"""Sequence classifiers and reward models of Hugging Face folders (`…ForSequenceClassification`), with which tasks score."""

import hashlib
import json
import logging
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from tba_jax import sharding
from tba_jax.models import decoder, encoder, hardware, scoring
from tba_jax.models.config import DecoderConfig, EncoderConfig
from tba_jax.models.decoder import Decoder
from tba_jax.models.encoder import Encoder
from tba_jax.models.hugging_face import files
from tba_jax.models.hugging_face import load as load_lib
from tba_jax.rewards import passes
from tba_jax.rewards import passes as forward_lib
from tba_jax.rewards.passes import Forward
from tba_jax.text.special_tokens import Escaper, without_rows
from tba_jax.text.tokenizers import open_transformers

log = logging.getLogger(__name__)

# The number of bytes that a digest reads at the beginning and at the end of each tensor.
_BLOCK_BYTES = 1 << 16
_SMALL_FILES = (
    "config.json",
    "generation_config.json",  # holds the end-of-sequence ids of a victim
    "tokenizer.json",
    "tokenizer_config.json",  # may hold the chat template
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
)

Config = DecoderConfig | EncoderConfig


def read_config(folder: Path | str, *, setting: str, compute_dtype: str) -> Config:
    """The classifier's config in a folder or hub id: a decoder with head="score", or an encoder with head="classification".

    Args: setting: name of the folder's setting, for messages.

    Raises:
      ValueError: the folder cannot be used, or holds another kind of model.
    """
    with load_lib.named(setting, folder):
        config = load_lib.read_config(folder, compute_dtype=compute_dtype)
    if config.head not in ("score", "classification"):
        raise ValueError(
            f"{setting}={str(folder)!r} is not a sequence classifier or reward model (…ForSequenceClassification): its head is "
            f"{config.head!r}"
        )
    return config


def digest(folder: Path | str) -> str:
    """Hex digest of a folder's model: its settings, tokenizer and chat template, and the beginning and end of each tensor."""
    folder = load_lib.resolve_folder(folder)
    found = hashlib.blake2b(digest_size=8)
    for path in (folder / name for name in _SMALL_FILES):
        content = path.read_bytes() if path.is_file() else b""
        found.update(f"{path.name} {len(content)} ".encode() + content)
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            header = file.read(int.from_bytes(file.read(8), "little"))
            found.update(f"{path.name} {len(header)} ".encode() + header)
            begin = file.tell()
            tensors = (tensor["data_offsets"] for name, tensor in json.loads(header).items() if name != "__metadata__")
            for start, stop in sorted(tensors):
                for place in (start, max(start, stop - _BLOCK_BYTES)):
                    file.seek(begin + place)
                    found.update(file.read(min(_BLOCK_BYTES, stop - start)))
    return found.hexdigest()


class SequenceClassifier:
    """Logits of texts. Every device of the mesh has all of the weights; texts are split over the devices.

    No device waits for another, so a call may run beside any other program of the same devices. Several threads may call at once;
    a lock lets one pass run at a time.

    The model's own tokenizer encodes the texts, with the special tokens that it adds (BERT's and RoBERTa's do, GPT-NeoX's adds
    none). A text that spells special tokens is read as text: see text.special_tokens. If a text is longer than the model's
    positions, a decoder, which reads the score off the last token, drops the text's beginning, and an encoder drops its end. A
    warning says so once.
    """

    def __init__(
        self,
        folder: Path | str,
        mesh: Mesh,
        *,
        setting: str,
        compute_dtype: str = "float32",
        batch_rows: int = 16,
        ends: bool = False,
        load: bool = True,
    ):
        """Args:
          folder: a Hugging Face folder or hub id; setting: name of its setting, for messages.
          mesh: gives the devices; how it arranges them does not matter.
          compute_dtype: "float32" or "bfloat16", of weights and activations. batch_rows: texts of one pass on one device.
          ends: whether `scores` will be called with `ended`. load: False checks all arguments and loads no weights.

        Raises:
          ValueError: the folder cannot be used.
        """
        self._config = config = read_config(folder, setting=setting, compute_dtype=compute_dtype)
        self._called = called = f"{setting}={str(folder)!r}"
        with load_lib.named(setting, folder):
            folder = load_lib.resolve_folder(folder)
            self.labels = _labels(folder, config)
            self._tokenizer, self._eos_id = open_transformers(folder)
            without_rows(self._tokenizer.backend_tokenizer, config.vocab, eos_id=self._eos_id if ends else None)
        if ends and self._eos_id is None:
            raise ValueError(f"{called}: its tokenizer has no end-of-sequence token, which the task appends to finished texts")
        if not load:
            return
        self._limit = most_tokens(config)
        self._tokenizer.truncation_side = "right"
        names, ids = self._tokenizer.all_special_tokens, self._tokenizer.all_special_ids
        self._escaped = Escaper(self._tokenizer.backend_tokenizer, names=names, ids=ids)
        self._rows = batch_rows * mesh.size
        devices = sharding.make_mesh((mesh.size, 1, 1), setting=setting, devices=list(mesh.devices.flat))
        config = hardware.on_device(config, mesh.devices.flat[0], section=setting.rpartition(".")[0])
        self._forward = forward(config, devices)
        self._params = load_lib.load_params(folder, config, self._forward.shardings, dtype=config.compute_dtype)
        self._lock, self._warned = threading.Lock(), False

    def label(self, name: str) -> int:
        """See tasks.interface.SequenceScorer."""
        if name not in self.labels:
            raise ValueError(f"{self._called} has no label {name!r}: its labels are {', '.join(map(repr, self.labels))}")
        return self.labels.index(name)

    def scores(self, texts: Sequence[str], *, ended: Sequence[bool] | np.ndarray | None = None) -> np.ndarray:
        """See tasks.interface.SequenceScorer.

        Raises:
          ValueError: a text has no tokens, or `ended` needs an end-of-sequence token that the tokenizer lacks.
        """
        encoded = self._encode(texts, [False] * len(texts) if ended is None else ended)
        if not encoded:
            return np.zeros((0, len(self.labels)), np.float32)
        with self._lock:
            result = passes.in_passes(encoded, self._pass, rows=self._rows, limit=self._limit)
        broken = ~np.isfinite(result).all(axis=1)
        if broken.any():
            text = texts[int(broken.argmax())]
            raise FloatingPointError(
                f"{self._called} gave {broken.sum()} of {len(texts)} texts a score that is not finite; the first "
                f"ends in {text[-60:]!r}"
            )
        return result

    def _encode(self, texts: Sequence[str], ended: Sequence[bool] | np.ndarray) -> list[list[int]]:
        """Token ids of each text, cut to the model's positions."""
        if self._eos_id is None and any(ended):
            raise ValueError(f"the tokenizer of {self._called} has no end-of-sequence token to append to finished texts")
        if not texts:
            return []
        escaped = self._escaped(texts)
        with self._lock:  # a call of a transformers tokenizer sets the truncation of concurrent calls
            given: list[list[int]] = self._tokenizer(escaped, verbose=False)["input_ids"]
            if isinstance(self._config, EncoderConfig) and max(map(len, given)) > self._limit:
                self._warn()
                given = self._tokenizer(escaped, truncation=True, max_length=self._limit, verbose=False)["input_ids"]
        encoded = [
            [*ids, self._eos_id] if end and self._eos_id is not None else ids for ids, end in zip(given, ended, strict=True)
        ]
        for text, ids in zip(texts, encoded, strict=True):
            if not ids:
                raise ValueError(f"{self._called} cannot score {text!r}, which has no tokens")
        if max(map(len, encoded)) > self._limit:
            self._warn()
        return [ids[-self._limit :] for ids in encoded]

    def _warn(self) -> None:
        if not self._warned:
            log.warning("texts for %s exceed its %d positions and are cut", self._called, self._limit)
        self._warned = True

    def _pass(self, tokens: np.ndarray, length: np.ndarray) -> np.ndarray:
        return self._forward(self._params, tokens, length)


def most_tokens(config: Config) -> int:
    """The tokens of the longest text that a model takes."""
    return config.position_limit if isinstance(config, EncoderConfig) else config.max_positions


def forward(config: Config, mesh: Mesh) -> Forward:
    """The pass of a classifier over rows of a mesh (n, 1, 1), whose devices compute them from end to end."""
    definition: Any = encoder.define(config) if isinstance(config, EncoderConfig) else decoder.define(config)
    return forward_lib.make(definition, _score, mesh, dtype=config.compute_dtype)


def _score(model: Encoder | Decoder, tokens: jax.Array, length: jax.Array) -> jax.Array:
    if isinstance(model, Encoder):
        return model.classify(tokens, jnp.arange(tokens.shape[1])[None, :] < length[:, None])
    return scoring.sequence_scores(model, tokens, length, remat="none")


def _labels(folder: Path, config: Config) -> tuple[str, ...]:
    """Names of the logits. As in transformers, logit i is called LABEL_i if config.json does not name it."""
    if isinstance(config, EncoderConfig):
        return config.labels
    named: dict[str, Any] = files.read_settings(folder / "config.json").table("id2label")
    return tuple(str(named.get(str(i), f"LABEL_{i}")) for i in range(config.labels))
