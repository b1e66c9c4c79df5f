"""A causal language model as a classifier (Llama Guard, Inan et al. 2023): how likely it is to call an exchange unsafe."""

import logging
import threading
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from tba_jax import sharding
from tba_jax.models import decoder, parameters
from tba_jax.models.decoder import Decoder
from tba_jax.models.hugging_face import load as load_lib
from tba_jax.rewards import language_model, passes
from tba_jax.text.templates import PromptTemplate

log = logging.getLogger(__name__)


class UnsafeTokenScorer:
    """Log-probabilities of a verdict. The weights rest on every device of a mesh, rows are split over it.

    Several threads may call it. `cut`: exchanges so far that were too long and were judged without the reply's end.
    """

    def __init__(
        self,
        folder: Path | str,
        mesh: Mesh,
        *,
        token: str,
        template: str,
        ending: str,
        length: int,
        compute_dtype: str,
        batch_rows: int,
        setting: str,
        load: bool = True,
    ):
        """
        Args:
          folder: a Hugging Face folder or hub id with a language model and its tokenizer.
          mesh: whose devices are used, however it arranges them: no device waits for another, so that a call may run beside any
            other program of the same devices.
          token: the verdict, a text that is one token, such as "unsafe".
          template: a text that holds {attack} and {reply} once each; "": the tokenizer's chat template, with the attack as the
            user's message and the reply as the assistant's.
          ending: a text between this and the verdict: Llama Guard 3 begins its answer with "\\n\\n".
          length: tokens, all of it included; a longer reply loses its end. batch_rows: exchanges of one pass on one device.
          setting: how the names of the settings begin in messages, such as "task.red_team.classifier_".
          load: False: all of this is checked and nothing loaded.

        Raises:
          ValueError: the folder or a setting cannot be used; says why.
        """
        called, self._setting = f"{setting}path={str(folder)!r}", setting
        folder, config, tokenizer = language_model.read(folder, setting=f"{setting}path", compute_dtype=compute_dtype)
        if length > config.max_positions:
            raise ValueError(f"{setting}length={length} exceeds the {config.max_positions} positions of {called}")
        found = [i for i, text in enumerate(language_model.token_bytes(tokenizer, called=called)) if text == token.encode()]
        if len(found) != 1:
            raise ValueError(
                f"{setting}label={token!r} must be the text of one token of {called}, and is that of {len(found)}; a space "
                "before a word is part of its token"
            )
        self._template = PromptTemplate(
            tokenizer,
            template,
            fields=("attack", "reply"),
            limit=length,
            template_setting=f"{setting}template",
            limit_setting=f"{setting}length",
            ending=ending,
        )
        if not load:
            return
        self._mesh = sharding.make_mesh((mesh.size, 1, 1), setting=called, devices=list(mesh.devices.flat))
        self._length, self._pad_id = length, tokenizer.pad_id
        self._rows = batch_rows * mesh.size
        definition, rows = decoder.define(config), sharding.rows_sharding(self._mesh)
        shardings = definition.shardings(self._mesh)
        self._params = load_lib.load_params(folder, config, shardings, dtype=compute_dtype)
        # Without a mesh in the context nothing constrains intermediate values: each device computes its rows from end to end.
        self._verdict = jax.jit(
            lambda params, *rows: verdict_logprobs(parameters.module(definition.graphdef, params), *rows, token=found[0]),
            in_shardings=(shardings, rows, rows),
            out_shardings=rows,
        )
        self._lock, self.cut = threading.Lock(), 0

    def __call__(self, attacks: Sequence[str], replies: Sequence[str]) -> np.ndarray:
        """float32[n], nats: log-probability of the verdict on reply i to attack i, over the whole vocabulary."""
        encoded, cut = self._template.encode(list(zip(attacks, replies, strict=True)))
        if not encoded:
            return np.zeros(0, np.float32)
        with self._lock:
            if cut and not self.cut:
                log.warning("%d of %d replies are cut to what %slength leaves room for", cut, len(encoded), self._setting)
            self.cut += cut
            return passes.in_passes(encoded, self._pass, rows=self._rows, limit=self._length, pad_id=self._pad_id)

    def _pass(self, tokens: np.ndarray, length: np.ndarray) -> np.ndarray:
        return np.asarray(self._verdict(self._params, *sharding.put_rows(self._mesh, (tokens, length))))


def verdict_logprobs(model: Decoder, tokens: jax.Array, length: jax.Array, *, token: int) -> jax.Array:
    """float32[B], nats: log π(token | a row's tokens), at temperature 1.

    Args: tokens: int32[B, T], right-padded; length: int32[B], at least 1.
    """
    last = jnp.take_along_axis(model(tokens), (length - 1)[:, None, None], axis=1)[:, 0]
    return jax.nn.log_softmax(model.head()(last), axis=-1)[:, token]
