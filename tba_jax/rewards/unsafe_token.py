"""A causal language model as a classifier (Llama Guard, Inan et al. 2023): the probability that it calls an exchange unsafe."""

import functools
import threading
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from tba_jax import sharding
from tba_jax.models import decoder, hardware
from tba_jax.models.config import DecoderConfig
from tba_jax.models.decoder import Decoder
from tba_jax.models.hugging_face import load as load_lib
from tba_jax.rewards import language_model, passes
from tba_jax.rewards import passes as forward_lib
from tba_jax.rewards.passes import Forward
from tba_jax.tasks.interface import UnsafeTokenSettings
from tba_jax.text.prompts import PromptTemplate


class UnsafeTokenScorer:
    """Log-probabilities of a verdict. Every device of the mesh has all of the weights; exchanges are split over the devices.

    Several threads may call it at once; a lock lets one pass run at a time.
    """

    def __init__(
        self, folder: Path | str, mesh: Mesh, settings: UnsafeTokenSettings, *, prefix: str, date: str = "", load: bool = True
    ):
        """
        Args:
          folder: a Hugging Face folder or hub id with a language model and its tokenizer.
          mesh: gives the devices; how it arranges them does not matter. No device waits for another, so a call may run beside any
            other program of the same devices.
          prefix: beginning of the settings' names in messages, such as "task.red_team.classifier_".
          date: see HuggingFaceTokenizer.
          load: False checks all arguments and loads no weights.

        Raises:
          ValueError: the folder or a setting cannot be used.
        """
        called = f"{prefix}path={str(folder)!r}"
        folder, config, tokenizer = language_model.read(
            folder, setting=f"{prefix}path", compute_dtype=settings.compute_dtype, date=date
        )
        if settings.length > config.max_positions:
            raise ValueError(f"{prefix}length={settings.length} exceeds the {config.max_positions} positions of {called}")
        texts = language_model.token_bytes(tokenizer, called=called)
        verdicts = [token for token, text in enumerate(texts) if text == settings.token.encode()]
        if len(verdicts) != 1:
            raise ValueError(
                f"{prefix}label={settings.token!r} must be the text of one token of {called}, but {len(verdicts)} tokens have "
                "this text; a space before a word is part of its token"
            )
        self._template = PromptTemplate(
            tokenizer,
            settings.template,
            fields=("attack", "reply"),
            limit=settings.length,
            template_setting=f"{prefix}template",
            limit_setting=f"{prefix}length",
            ending=settings.ending,
        )
        self._length, self._rows, self._pad_id = settings.length, settings.batch_rows * mesh.size, tokenizer.pad_id
        self._lock = threading.Lock()
        if load:
            devices = sharding.make_mesh((mesh.size, 1, 1), setting=called, devices=list(mesh.devices.flat))
            config = hardware.on_device(config, mesh.devices.flat[0], section=prefix.rpartition(".")[0])
            self._forward = forward(config, devices, token=verdicts[0])
            self._params = load_lib.load_params(folder, config, self._forward.shardings, dtype=config.compute_dtype)

    def __call__(self, attacks: Sequence[str], replies: Sequence[str]) -> np.ndarray:
        """float32[n], nats: log-probability, over the whole vocabulary, of the verdict on reply i to attack i."""
        encoded = self._template.encode(list(zip(attacks, replies, strict=True)))
        if not encoded:
            return np.zeros(0, np.float32)
        with self._lock:
            return passes.in_passes(encoded, self._pass, rows=self._rows, limit=self._length, pad_id=self._pad_id)

    def _pass(self, tokens: np.ndarray, length: np.ndarray) -> np.ndarray:
        return self._forward(self._params, tokens, length)


def forward(config: DecoderConfig, mesh: Mesh, *, token: int) -> Forward:
    """The pass over rows of a mesh (n, 1, 1), whose devices compute them from end to end. Args: token: id of the verdict."""
    score = functools.partial(verdict_logprobs, token=token)
    return forward_lib.make(decoder.define(config), score, mesh, dtype=config.compute_dtype)


def verdict_logprobs(model: Decoder, tokens: jax.Array, length: jax.Array, *, token: int) -> jax.Array:
    """float32[B], nats: log π(token | a row's tokens), at temperature 1.

    Args: tokens: int32[B, T], right-padded; length: int32[B], at least 1.
    """
    last = jnp.take_along_axis(model(tokens), (length - 1)[:, None, None], axis=1)[:, 0]
    return jax.nn.log_softmax(model.head()(last), axis=-1)[:, token]
