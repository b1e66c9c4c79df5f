"""Sentence embeddings of responses, by an encoder from a Hugging Face folder."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from tokenizers import Tokenizer

from tba_jax.models import encoder
from tba_jax.models.config import EncoderConfig
from tba_jax.models.encoder import Encoder
from tba_jax.models.hugging_face import load
from tba_jax.rewards import passes
from tba_jax.rewards import passes as forward_lib
from tba_jax.rewards.passes import Forward
from tba_jax.text.special_tokens import Escaper, without_rows

# Texts in one forward pass of the encoder, which bounds its memory.
_ROWS = 32


def read_config(folder: Path | str, *, setting: str = "task.embedding_path") -> EncoderConfig:
    """The config of the sentence encoder in a folder or hub id. setting: the name of the folder's setting, for messages.

    Raises:
      ValueError: the folder has no sentence encoder or no tokenizer.json.
    """
    with load.named(setting, folder):
        config = load.read_config(folder, compute_dtype="float32")
        folder = load.resolve_folder(folder, weights=False)
    if not isinstance(config, EncoderConfig) or config.head != "embedding":
        raise ValueError(f"{setting}={str(folder)!r} is not a sentence encoder (BERT or RoBERTa without a head)")
    if not (folder / "tokenizer.json").is_file():
        raise ValueError(f"{setting}={str(folder)!r} has no tokenizer.json")
    return config


def describe(folder: Path | str, *, fetch: bool = True) -> dict[str, Any]:
    """The contract's entry of an encoder: width of its embeddings, digest of weights and tokenizer. Raises as `read_config`.

    Args: fetch: whether the weights of a hub id are fetched.
    """
    config, folder = read_config(folder), load.resolve_folder(folder, weights=fetch)
    digest = hashlib.blake2b(digest_size=8)
    for path in (folder / "tokenizer.json", *sorted(folder.glob("*.safetensors"))):
        digest.update(path.read_bytes())
    return {"width": config.width, "weights": digest.hexdigest()}


class ResponseEmbedder:
    """Embeds texts. Every device of the mesh has all of the encoder's weights; texts are split over the devices."""

    def __init__(self, folder: Path | str, mesh: Mesh, *, setting: str = "task.embedding_path"):
        """Args: see read_config. Raises ValueError naming the setting if the folder cannot be used."""
        config, folder = read_config(folder, setting=setting), load.resolve_folder(folder)
        self._config, self._rows, self._forward = config, rows_of_pass(mesh), forward(config, mesh)
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._tokenizer.no_padding()
        self._escaped = Escaper(self._tokenizer)
        self._tokenizer.enable_truncation(config.position_limit)
        with load.named(setting, folder):
            without_rows(self._tokenizer, config.vocab)
        self._params = load.load_params(folder, config, self._forward.shardings)

    def __call__(self, texts: Sequence[str]) -> np.ndarray:
        """float32[len(texts), E]: vectors of length 1, 0 for a text without tokens. Texts are cut at the encoder's positions.

        A text that spells special tokens is read as text: see text.special_tokens.
        """
        encoded = [encoding.ids for encoding in self._tokenizer.encode_batch(self._escaped(texts))]
        if not encoded:
            return np.zeros((0, self._config.width), np.float32)
        return passes.in_passes(encoded, self._pass, rows=self._rows, limit=self._config.position_limit)

    def _pass(self, tokens: np.ndarray, length: np.ndarray) -> np.ndarray:
        return self._forward(self._params, tokens, length)


def rows_of_pass(mesh: Mesh) -> int:
    """Texts of one pass, a multiple of the devices."""
    return -(-_ROWS // mesh.size) * mesh.size


def forward(config: EncoderConfig, mesh: Mesh) -> Forward:
    """The pass of an encoder."""
    return forward_lib.make(encoder.define(config), _embed, mesh, dtype="float32")


def _embed(model: Encoder, tokens: jax.Array, length: jax.Array) -> jax.Array:
    return model.sentence_embeddings(tokens, jnp.arange(tokens.shape[1])[None, :] < length[:, None])
