"""Replies of a frozen language model, such as the victim of red-teaming, sampled with its own tokenizer and prompt template."""

import dataclasses
import hashlib
import json
import threading
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from tba_jax import sharding
from tba_jax.decoding import sampling
from tba_jax.decoding.engine import Engine
from tba_jax.decoding.requests import Request
from tba_jax.models import decoder, hardware, parameters, scoring
from tba_jax.models.config import DecoderConfig
from tba_jax.models.hugging_face import load as load_lib
from tba_jax.models.parameters import Params
from tba_jax.programs import Program
from tba_jax.rewards import language_model
from tba_jax.tasks.interface import GeneratorSettings
from tba_jax.text import stop_strings
from tba_jax.text.prompts import PromptTemplate
from tba_jax.text.stop_strings import StopStrings
from tba_jax.text.tokenizers import HuggingFaceTokenizer, has_tokenizer


class TextGenerator:
    """Replies to texts. Several threads may call it at once; a lock lets one call decode at a time.

    A reply depends only on the seed, the text and the number of the reply, not on other texts or earlier calls.
    """

    def __init__(
        self, folder: Path | str, mesh: Mesh, settings: GeneratorSettings, *, prefix: str, date: str = "", load: bool = True
    ):
        """
        Args:
          folder: a Hugging Face folder or hub id with a language model and its tokenizer.
          mesh: gives the devices; how it arranges them does not matter. Each device holds a whole copy of the model and decodes
            by itself, so a call may run beside any other program of the same devices.
          prefix: beginning of the settings' names in messages, such as "task.red_team.victim_".
          date: see HuggingFaceTokenizer.
          load: False checks all arguments and loads no weights.

        Raises:
          ValueError: the folder or a setting cannot be used.
        """
        called = f"{prefix}path={str(folder)!r}"
        folder, config, tokenizer = language_model.read(
            folder, setting=f"{prefix}path", compute_dtype=settings.compute_dtype, date=date
        )
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
            devices = sharding.make_mesh((mesh.size, 1, 1), setting=called, devices=list(mesh.devices.flat))
            config = hardware.on_device(config, mesh.devices.flat[0], section=prefix.rpartition(".")[0])
            self._engine = _engine(config, devices, settings, replies, called=called)
            shardings = jax.tree.map(lambda x: x.sharding, weights(config, devices))
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Replies:
    """What the decoder has to know of a tokenizer. banned: ids that no reply contains; ends: texts that end a reply."""

    banned: tuple[int, ...] = ()
    eos_id: int = 0
    pad_id: int = 0
    ends: StopStrings | None = None


def _replies(folder: Path, tokenizer: HuggingFaceTokenizer, vocab: int, *, called: str) -> _Replies:
    """Args: vocab: rows of the model's embedding. Raises ValueError where generation_config.json or the tokenizer is unusable."""
    extra_ends = _extra_ends(folder, tokenizer)
    banned = {*tokenizer.special_ids, *range(tokenizer.vocab_size, vocab)} - {*extra_ends, tokenizer.eos_id}
    ends = _end_strings(extra_ends, tokenizer, vocab, called=called)
    return _Replies(banned=tuple(sorted(banned)), eos_id=tokenizer.eos_id, pad_id=tokenizer.pad_id, ends=ends)


def _engine(config: DecoderConfig, mesh: Mesh, settings: GeneratorSettings, replies: _Replies, *, called: str) -> Engine:
    """The decoder without weights. Args: mesh: (n, 1, 1). Raises ValueError where slots or lengths do not suit."""
    try:
        return Engine(
            config,
            # Scoring at the sampling temperature saves the decoder a second pass over the logits.
            scoring.ResponseSpace(temperature=settings.temperature or 1.0, banned_tokens=replies.banned, eos_id=replies.eos_id),
            mesh,
            slots=settings.slots,
            samples=settings.samples,
            prompt_length=settings.prompt_length,
            response_length=settings.reply_length,
            pad_id=replies.pad_id,
            stop_strings=replies.ends,
        )
    except ValueError as error:
        raise ValueError(f"{called}: {error}") from error


def programs(folder: Path | str, mesh: Mesh, settings: GeneratorSettings, *, setting: str) -> dict[str, Program]:
    """Name -> the programs of a TextGenerator, see Lane.programs; made from the model's config and, where there is one, its
    tokenizer: without, no id is banned and no text but the end of sequence ends a reply.

    Args: mesh: (n, 1, 1). setting: name of the folder's setting, for messages. Raises ValueError: as TextGenerator.
    """
    config = language_model.read_config(folder, setting=setting, compute_dtype=settings.compute_dtype)
    local, called = load_lib.resolve_folder(folder, weights=False), f"{setting}={str(folder)!r}"
    replies = _Replies()
    if has_tokenizer(local):
        replies = _replies(local, HuggingFaceTokenizer(local, vocab=config.vocab), config.vocab, called=called)
    config = hardware.on_device(config, mesh.devices.flat[0], section=setting.rpartition(".")[0])
    return _engine(config, mesh, settings, replies, called=called).programs(weights(config, mesh))


def weights(config: DecoderConfig, mesh: Mesh) -> Params:
    """The weights as they are loaded, as jax.ShapeDtypeStruct. Args: mesh: (n, 1, 1)."""
    return parameters.sharded_shapes(decoder.define(config).specs, mesh, dtype=config.compute_dtype)


def _keys(seed: int, text: str, samples: int) -> np.ndarray:
    """uint32[samples, 2]: a random key for each reply, see requests.Request."""
    digests = (hashlib.blake2b(f"{seed} {k} {text}".encode("utf-8", "surrogatepass"), digest_size=8) for k in range(samples))
    return np.array([np.frombuffer(digest.digest(), "<u4") for digest in digests], np.uint32)


def _extra_ends(folder: Path, tokenizer: HuggingFaceTokenizer) -> list[int]:
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


def _end_strings(tokens: Sequence[int], tokenizer: HuggingFaceTokenizer, vocab: int, *, called: str) -> StopStrings | None:
    """Stop strings that end a reply at these tokens' texts, however the reply spells them; None if there are no tokens."""
    if not tokens:
        return None
    texts = language_model.token_bytes(tokenizer, called=called)
    return stop_strings.build(texts, sorted({(texts[token] or b"").decode() for token in tokens}), vocab=vocab)
