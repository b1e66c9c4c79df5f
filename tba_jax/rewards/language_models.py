"""Frozen language models with their own tokenizers: one that replies to texts, such as the victim of red-teaming, and one whose
next token is a verdict (Llama Guard, Inan et al. 2023)."""

import functools
import hashlib
import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from tba_jax.decoding import sampling
from tba_jax.decoding.engine import Engine
from tba_jax.decoding.requests import Request
from tba_jax.models import decoder, parameters, scoring
from tba_jax.models.config import DecoderConfig
from tba_jax.models.decoder import Decoder
from tba_jax.models.hugging_face import load as load_lib
from tba_jax.models.parameters import Params
from tba_jax.programs import Program
from tba_jax.rewards import scorers
from tba_jax.tasks.interface import ModelUse
from tba_jax.text import stop_strings
from tba_jax.text.prompts import PromptTemplate
from tba_jax.text.stop_strings import StopStrings
from tba_jax.text.tokenizers import HuggingFaceTokenizer, has_tokenizer


def read_config(folder: Path | str, *, setting: str, compute_dtype: str) -> DecoderConfig:
    """The config of the language model in a folder or hub id. Raises ValueError naming `setting` if there is no usable one."""
    with load_lib.named(setting, folder):
        return load_lib.read_config(folder, compute_dtype=compute_dtype, head="language_model")


def read(
    folder: Path | str, *, setting: str, compute_dtype: str, date: str = ""
) -> tuple[Path, DecoderConfig, HuggingFaceTokenizer]:
    """Local folder, config and tokenizer. Raises ValueError naming `setting` where they cannot be used.

    Args: date: see HuggingFaceTokenizer.
    """
    config = read_config(folder, setting=setting, compute_dtype=compute_dtype)
    local = load_lib.resolve_folder(folder)
    with load_lib.named(setting, folder):
        return local, config, HuggingFaceTokenizer(local, vocab=config.vocab, date=date)


def _token_bytes(tokenizer: HuggingFaceTokenizer, *, called: str) -> list[bytes | None]:
    try:
        return tokenizer.token_bytes()
    except ValueError as error:
        raise ValueError(f"{called}: its tokenizer must be byte-level or SentencePiece, so that each token has bytes") from error


class TextGenerator:
    """Replies to texts. Several threads may call it at once; a lock lets one call decode at a time.

    A reply is a function of the seed, the text and the number of the reply alone. Each device has all of the weights and decodes
    by itself, so that a call may run beside other programs of the devices.
    """

    def __init__(self, use: ModelUse, mesh: Mesh, *, date: str = "", load: bool = True):
        """Raises ValueError where the folder or a setting cannot be used.

        Args: use: a model of kind "generator"; mesh: (n, 1, 1); date: see HuggingFaceTokenizer; load: False checks `use` and
          loads no weights.
        """
        called, prefix, settings = f"{use.setting}={use.path!r}", use.setting.removesuffix("path"), use.generator
        assert settings is not None, "ModelUse checks it"
        folder, config, tokenizer = read(use.path, setting=use.setting, compute_dtype=use.compute_dtype, date=date)
        if settings.prompt_length + settings.reply_length > config.max_positions:
            raise ValueError(
                f"{prefix}prompt_length={settings.prompt_length} + {prefix}reply_length={settings.reply_length} exceed the "
                f"{config.max_positions} positions of {called}"
            )
        self._settings, self._tokenizer, self._lock = settings, tokenizer, threading.Lock()
        self._template = PromptTemplate(
            tokenizer,
            settings.template,
            fields=("attack",),
            limit=settings.prompt_length,
            template_setting=f"{prefix}template",
            limit_setting=f"{prefix}prompt_length",
            system_prompt=settings.system_prompt,
        )
        replies = _replies(folder, tokenizer, config.vocab, called=called)
        if load:
            config = scorers.on_device(config, mesh, setting=use.setting)
            self._engine = _engine(config, mesh, use, **replies)
            shardings = jax.tree.map(lambda x: x.sharding, weights(config, mesh))
            params = load_lib.load_params(folder, config, shardings, dtype=config.compute_dtype)
            self._engine.swap(self._engine.prepare(params, consume=True), 0)

    def __call__(self, texts: Sequence[str], seed: int) -> list[str]:
        """samples · len(texts) replies without special tokens: first all replies to the first text, then all to the second."""
        settings, distinct = self._settings, list(dict.fromkeys(texts))
        prompts = self._template.encode([(text,) for text in distinct])
        sampled = sampling.constant(settings.samples, temperature=settings.temperature, top_p=settings.top_p)
        requests = [
            Request(name=repr(text[:60]), prompt=prompt, keys=_keys(seed, text, settings.samples), sampling=sampled)
            for text, prompt in zip(distinct, prompts, strict=True)
        ]
        with self._lock:
            generations = self._engine.generate(requests)
        replies = {
            text: [self._tokenizer.decode_continuation(prompt, response.tolist()) for response in made.responses]
            for text, prompt, made in zip(distinct, prompts, generations, strict=True)
        }
        return [reply for text in texts for reply in replies[text]]


def _replies(folder: Path, tokenizer: HuggingFaceTokenizer, vocab: int, *, called: str) -> dict[str, Any]:
    """What the decoder has to know of a tokenizer, as arguments of _engine.

    Args: vocab: rows of the model's embedding. Raises ValueError where generation_config.json or the tokenizer is unusable.
    """
    others = _other_ends(folder, tokenizer)
    banned = {*tokenizer.special_ids, *range(tokenizer.vocab_size, vocab)} - {*others, tokenizer.eos_id}
    ends = None
    if others:  # stop strings end a reply at the texts of these tokens, however the reply spells them
        texts = _token_bytes(tokenizer, called=called)
        ends = stop_strings.build(texts, sorted({(texts[token] or b"").decode() for token in others}), vocab=vocab)
    return dict(banned=tuple(sorted(banned)), eos_id=tokenizer.eos_id, pad_id=tokenizer.pad_id, ends=ends)


def _other_ends(folder: Path, tokenizer: HuggingFaceTokenizer) -> list[int]:
    """End-of-sequence ids of generation_config.json besides the tokenizer's own one: chat models have several."""
    path = folder / "generation_config.json"
    try:
        ends = json.loads(path.read_bytes()).get("eos_token_id")
    except FileNotFoundError:
        return []
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    ends = ends if isinstance(ends, list) else [] if ends is None else [ends]
    if wrong := [end for end in ends if type(end) is not int or not 0 <= end < tokenizer.vocab_size]:
        raise ValueError(f"{path}: eos_token_id holds {wrong[0]!r}, but the tokenizer's ids are 0 to {tokenizer.vocab_size - 1}")
    return [end for end in ends if end != tokenizer.eos_id]


def _engine(
    config: DecoderConfig,
    mesh: Mesh,
    use: ModelUse,
    *,
    banned: tuple[int, ...] = (),
    eos_id: int = 0,
    pad_id: int = 0,
    ends: StopStrings | None = None,
) -> Engine:
    """The decoder without weights. Raises ValueError where slots or lengths do not suit.

    Args: mesh: (n, 1, 1); banned: ids that no reply contains; ends: texts that end a reply.
    """
    settings = use.generator
    assert settings is not None, "ModelUse checks it"
    # Scoring at the sampling temperature saves the decoder a second pass over the logits.
    space = scoring.ResponseSpace(temperature=settings.temperature or 1.0, banned_tokens=banned, eos_id=eos_id)
    with load_lib.named(use.setting, use.path):
        return Engine(
            config,
            space,
            mesh,
            slots=use.rows,
            samples=settings.samples,
            prompt_length=settings.prompt_length,
            response_length=settings.reply_length,
            pad_id=pad_id,
            stop_strings=ends,
        )


def programs(use: ModelUse, mesh: Mesh) -> dict[str, Program]:
    """Name -> the programs of a TextGenerator, see Lane.programs, which need no weights, nor a tokenizer.

    Args: mesh: (n, 1, 1). Raises ValueError: as TextGenerator.
    """
    config = read_config(use.path, setting=use.setting, compute_dtype=use.compute_dtype)
    folder, replies = load_lib.resolve_folder(use.path, weights=False), {}
    if has_tokenizer(folder):
        tokenizer = HuggingFaceTokenizer(folder, vocab=config.vocab)
        replies = _replies(folder, tokenizer, config.vocab, called=f"{use.setting}={use.path!r}")
    config = scorers.on_device(config, mesh, setting=use.setting)
    return _engine(config, mesh, use, **replies).programs(weights(config, mesh))


def weights(config: DecoderConfig, mesh: Mesh) -> Params:
    """The weights as they are loaded, as jax.ShapeDtypeStruct. Args: mesh: (n, 1, 1)."""
    return parameters.sharded_shapes(decoder.define(config).specs, mesh, dtype=config.compute_dtype)


def _keys(seed: int, text: str, samples: int) -> np.ndarray:
    """uint32[samples, 2]: a random key for each reply, see requests.Request."""
    digests = (hashlib.blake2b(f"{seed} {k} {text}".encode("utf-8", "surrogatepass"), digest_size=8) for k in range(samples))
    return np.array([np.frombuffer(digest.digest(), "<u4") for digest in digests], np.uint32)


class UnsafeTokenScorer:
    """Log-probabilities of a verdict. Every device has all of the weights; exchanges are split over the devices, none of which
    waits for another. Several threads may call it at once."""

    def __init__(self, use: ModelUse, mesh: Mesh, *, date: str = "", load: bool = True):
        """Args: use: a model of kind "unsafe_token"; others and errors: see TextGenerator."""
        called, prefix, settings = f"{use.setting}={use.path!r}", use.setting.removesuffix("path"), use.judge
        assert settings is not None, "ModelUse checks it"
        folder, config, tokenizer = read(use.path, setting=use.setting, compute_dtype=use.compute_dtype, date=date)
        if settings.length > config.max_positions:
            raise ValueError(f"{prefix}length={settings.length} exceeds the {config.max_positions} positions of {called}")
        texts = _token_bytes(tokenizer, called=called)
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
        if load:
            verdict = functools.partial(verdict_logprobs, token=verdicts[0])
            forward = scorers.Pass(scorers.on_device(config, mesh, setting=use.setting), verdict, mesh)
            shape = dict(rows=use.rows * mesh.size, limit=settings.length, pad_id=tokenizer.pad_id)
            self.model = scorers.Loaded(forward, folder, **shape)

    def __call__(self, attacks: Sequence[str], replies: Sequence[str]) -> np.ndarray:
        """float32[n], nats: log-probability, over the whole vocabulary, of the verdict on reply i to attack i."""
        encoded = self._template.encode(list(zip(attacks, replies, strict=True)))
        return self.model(encoded) if encoded else np.zeros(0, np.float32)


def verdict_logprobs(model: Decoder, tokens: jax.Array, length: jax.Array, *, token: int) -> jax.Array:
    """float32[B], nats: log π(token | a row's tokens), at temperature 1.

    Args: tokens: int32[B, T], right-padded; length: int32[B], at least 1.
    """
    last = jnp.take_along_axis(model(tokens), (length - 1)[:, None, None], axis=1)[:, 0]
    return jax.nn.log_softmax(model.head()(last), axis=-1)[:, token]
