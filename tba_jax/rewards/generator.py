"""Replies of a frozen language model, the victim of red-teaming, to texts: its own tokenizer, template and sampling settings."""

import hashlib
import json
import logging
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jax.sharding import Mesh

from tba_jax import sharding
from tba_jax.decoding import sampling
from tba_jax.decoding.engine import Engine
from tba_jax.decoding.requests import Request
from tba_jax.models import decoder, scoring
from tba_jax.models.hugging_face import load as load_lib
from tba_jax.rewards import language_model
from tba_jax.text import stop_strings
from tba_jax.text.templates import PromptTemplate
from tba_jax.text.tokenizers import HuggingFaceTokenizer

log = logging.getLogger(__name__)


class TextGenerator:
    """Answers texts. Several threads may call it, one after the other is answered.

    What it replies to a text depends on the seed, the text and the number of the reply alone: neither on the other texts of a
    call nor on what was asked before. `cut`: texts so far that were too long and were asked without their end; the first are told
    in the log.
    """

    def __init__(
        self,
        folder: Path | str,
        mesh: Mesh,
        *,
        samples: int,
        template: str,
        system_prompt: str,
        temperature: float,
        top_p: float,
        prompt_length: int,
        reply_length: int,
        slots: int,
        compute_dtype: str,
        setting: str,
        load: bool = True,
    ):
        """
        Args:
          folder: a Hugging Face folder or hub id with a language model and its tokenizer.
          mesh: whose devices are used, however it arranges them: each holds a whole copy of the model and decodes by itself, so
            that a call may run beside any other program of the same devices.
          samples: replies to each text.
          template: a text that holds {attack} once; "": the tokenizer's chat template, with system_prompt as the first message.
          temperature, top_p: of the replies; a temperature of 0 is greedy.
          prompt_length: tokens, what stands around the text included; a longer text loses its end.
          reply_length: tokens, end of sequence included; there a reply is cut.
          slots: replies that are decoded side by side.
          setting: how the names of the settings begin in messages, such as "task.red_team.victim_".
          load: False: all of this is checked and nothing loaded.

        Raises:
          ValueError: the folder or a setting cannot be used; says why.
        """
        called, self._setting = f"{setting}path={str(folder)!r}", setting
        folder, model, tokenizer = language_model.read(folder, setting=f"{setting}path", compute_dtype=compute_dtype)
        self._tokenizer = tokenizer
        if prompt_length + reply_length > model.max_positions:
            raise ValueError(
                f"{setting}prompt_length={prompt_length} + {setting}reply_length={reply_length} exceed the {model.max_positions} "
                f"positions of {called}"
            )
        self._template = PromptTemplate(
            tokenizer,
            template,
            fields=("attack",),
            limit=prompt_length,
            template_setting=f"{setting}template",
            limit_setting=f"{setting}prompt_length",
            system_prompt=system_prompt,
        )
        others = _other_ends(folder, tokenizer)
        ends = {*others, tokenizer.eos_id}
        banned = {*tokenizer.special_ids, *range(tokenizer.vocab_size, model.vocab)} - ends
        # Scored at the temperature that it samples at, the decoder makes one pass over the logits.
        space = scoring.ResponseSpace(
            temperature=temperature or 1.0, banned_tokens=tuple(sorted(banned)), eos_id=tokenizer.eos_id
        )
        ending = _ending_with(others, tokenizer, model.vocab, called=called)
        if not load:
            return
        devices = sharding.make_mesh((mesh.size, 1, 1), setting=called, devices=list(mesh.devices.flat))
        try:
            self._engine = Engine(
                model,
                space,
                devices,
                slots=slots,
                samples=samples,
                prompt_length=prompt_length,
                response_length=reply_length,
                pad_id=tokenizer.pad_id,
                stop_strings=ending,
            )
        except ValueError as error:
            raise ValueError(f"{called}: {error}") from error
        params = load_lib.load_params(folder, model, decoder.define(model).shardings(devices), dtype=compute_dtype)
        self._engine.set_policy(params, 0)
        del params
        self._sampling = sampling.constant(samples, temperature=temperature, top_p=top_p)
        self._samples, self._lock, self.cut = samples, threading.Lock(), 0

    def __call__(self, texts: Sequence[str], seed: int) -> list[str]:
        """`samples` replies to the first text, then those to the second: samples · len(texts) texts without special tokens."""
        asked = list(dict.fromkeys(texts))
        prompts, cut = self._template.encode([(text,) for text in asked])
        requests = [
            Request(name=repr(text[:60]), prompt=prompt, keys=_keys(seed, text, self._samples), sampling=self._sampling)
            for text, prompt in zip(asked, prompts, strict=True)
        ]
        with self._lock:
            if cut and not self.cut:
                log.warning("%d of %d texts are cut to what %sprompt_length leaves room for", cut, len(asked), self._setting)
            self.cut += cut
            generations = self._engine.generate(requests)
        replies = {
            text: [
                self._tokenizer.decode_continuation(prompt, tokens[:length].tolist())
                for tokens, length in zip(made.tokens, made.length, strict=True)
            ]
            for text, prompt, made in zip(asked, prompts, generations, strict=True)
        }
        return [reply for text in texts for reply in replies[text]]


def _keys(seed: int, text: str, samples: int) -> np.ndarray:
    """uint32[samples, 2], see requests.Request."""
    digests = (hashlib.blake2b(f"{seed} {k} {text}".encode("utf-8", "surrogatepass"), digest_size=8) for k in range(samples))
    return np.array([np.frombuffer(digest.digest(), "<u4") for digest in digests], np.uint32)


def _other_ends(folder: Path, tokenizer: HuggingFaceTokenizer) -> list[int]:
    """Ids besides the tokenizer's end of sequence that end a text by generation_config.json: a chat model has several."""
    path = folder / "generation_config.json"
    try:
        ends = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
    except FileNotFoundError:
        return []
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    ends = ends if isinstance(ends, list) else [] if ends is None else [ends]
    if wrong := [end for end in ends if type(end) is not int or not 0 <= end < tokenizer.vocab_size]:
        raise ValueError(f"{path}: eos_token_id holds {wrong[0]!r}, which is none of the tokenizer's {tokenizer.vocab_size} ids")
    return [end for end in ends if end != tokenizer.eos_id]


def _ending_with(
    tokens: Sequence[int], tokenizer: HuggingFaceTokenizer, vocab: int, *, called: str
) -> stop_strings.StopStrings | None:
    """Ends a reply by these tokens; None where there are none. Their texts end it too, however it is spelled."""
    if not tokens:
        return None
    texts = language_model.token_bytes(tokenizer, called=called)
    return stop_strings.build(texts, sorted({(texts[token] or b"").decode() for token in tokens}), vocab=vocab)
