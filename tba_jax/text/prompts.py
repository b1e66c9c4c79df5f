"""Encodes queries: their prompts, in a chat template or alone, as token ids, cached on disk, without those that are too long."""

import contextlib
import hashlib
import json
import logging
import os
import uuid
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np

from tba_jax.tasks.interface import EncodedQuery, Query
from tba_jax.text.tokenizers import Tokenizer

log = logging.getLogger(__name__)

# Prompts of fewer characters are encoded faster than a cache file is read.
CACHED_CHARACTERS = 1 << 20


class EncodedQueries(Sequence[EncodedQuery]):
    """Queries whose token ids share one array, so that hundreds of thousands of queries take little memory; a slice is a list."""

    def __init__(self, queries: Sequence[Query], tokens: np.ndarray, ends: np.ndarray):
        """Args: tokens: int32[n], ids of all prompts in a row; ends: int64[len(queries)], the end of each prompt in `tokens`."""
        self._queries, self._tokens, self._ends = queries, tokens, ends

    def __len__(self) -> int:
        return len(self._queries)

    @overload
    def __getitem__(self, index: int) -> EncodedQuery: ...
    @overload
    def __getitem__(self, index: slice) -> list[EncodedQuery]: ...
    def __getitem__(self, index: int | slice) -> EncodedQuery | list[EncodedQuery]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        query, i = self._queries[index], int(index) % len(self)
        begin = int(self._ends[i - 1]) if i else 0
        return EncodedQuery(query=query, prompt=tuple(self._tokens[begin : int(self._ends[i])].tolist()))

    @property
    def lengths(self) -> np.ndarray:
        """int64[len(self)]: tokens of each prompt."""
        return np.diff(self._ends, prepend=0)

    def select(self, chosen: np.ndarray) -> "EncodedQueries":
        """The queries for which `chosen`, bool[len(self)], is true."""
        lengths = self.lengths
        queries = [query for query, keep in zip(self._queries, chosen, strict=True) if keep]
        return EncodedQueries(queries, self._tokens[np.repeat(chosen, lengths)], np.cumsum(lengths[chosen]))


def template(tokenizer: Tokenizer, *, chat_template: bool, system_prompt: str) -> dict[str, str]:
    """The contract's entry of a chat template: its text around a prompt, and a digest of its source; {} if it is not used.

    Raises:
      ValueError: the tokenizer has no chat template, or its template refuses these messages or leaves the prompt out.
    """
    if not chat_template:
        if system_prompt:
            raise ValueError(f"task.system_prompt={system_prompt[:60]!r} is part of a chat template: set task.chat_template=True")
        return {}
    text, other = tokenizer.chat(["{prompt}", "{another prompt}"], system_prompt)
    if text == other:
        raise ValueError("task.chat_template: the tokenizer's template leaves the prompt out")
    return {"text": text, "source": hashlib.blake2b(tokenizer.chat_template.encode(), digest_size=8).hexdigest()}


def texts(prompts: Sequence[str], tokenizer: Tokenizer, *, chat_template: bool, system_prompt: str) -> list[str]:
    """What the policy reads of prompts: in the chat template, in which none can end its turn, or as they are.

    Without a chat template a prompt may spell special tokens.
    """
    return tokenizer.chat(tokenizer.escaped(prompts), system_prompt) if chat_template else list(prompts)


# (query, whether a prompt fits) -> the query with as much of its prompt as fits, None if no part of it does.
Shorten = Callable[[Query, Callable[[str], bool]], Query | None]


def encode(
    queries: Sequence[Query],
    tokenizer: Tokenizer,
    *,
    chat_template: bool,
    system_prompt: str,
    limit: int,
    long_prompts: str,
    split: str,
    shorten: Shorten | None = None,
) -> tuple[EncodedQueries, int]:
    """The queries whose prompts fit, and the number of queries that were left out.

    Args:
      chat_template, system_prompt: of task; limit: most tokens of a prompt, template included; long_prompts: task.long_prompts;
        split: name of the queries in messages; shorten: shortens a prompt that is too long.

    Raises:
      ValueError: prompts are too long and long_prompts is "refuse", no prompt fits, or one has no token.
    """
    around: dict[str, Any] = dict(chat_template=chat_template, system_prompt=system_prompt)
    queries, read = _distinct(queries, texts([query.prompt for query in queries], tokenizer, **around), split)
    tokens, ends = _encoded(read, tokenizer, begin=not chat_template)
    encoded = EncodedQueries(queries, tokens, ends)
    if not encoded.lengths.all():
        empty = queries[int((encoded.lengths == 0).argmax())]
        raise ValueError(f"the {split} prompt {empty.prompt[:60]!r} has no token: the tokenizer knows none of its characters")
    fits = encoded.lengths <= limit
    if not fits.all() and shorten is not None:

        def fit(prompt: str) -> bool:
            return len(tokenizer.encode_all(texts([prompt], tokenizer, **around), begin=not chat_template)[0]) <= limit

        shorter = [query if short else shorten(query, fit) or query for query, short in zip(queries, fits, strict=True)]
        return encode(shorter, tokenizer, limit=limit, long_prompts=long_prompts, split=split, **around)
    skipped = int(len(queries) - fits.sum())
    if skipped and (long_prompts == "refuse" or skipped == len(queries)):
        advice = "raise it" if long_prompts == "skip" else "raise it, or set task.long_prompts=skip to leave them out"
        raise ValueError(
            f"{skipped} of {len(queries)} {split} prompts are longer than task.prompt_length={limit} tokens "
            f"(longest: {encoded.lengths.max()}); {advice}"
        )
    return (encoded.select(fits) if skipped else encoded), skipped


def _distinct(queries: Sequence[Query], read: Sequence[str], split: str) -> tuple[Sequence[Query], Sequence[str]]:
    """The first query of each text that the policy reads, and these texts.

    Rows name their query by that text alone, so two answers to one text would be mixed.
    """
    first: dict[str, Query] = {}
    for query, text in zip(queries, read, strict=True):
        first.setdefault(text, query)
    if len(first) == len(queries):
        return queries, read
    others = sum(first[text].answer != query.answer for query, text in zip(queries, read, strict=True))
    log.warning(
        "%d of %d %s queries repeat the prompt of an earlier one, %d of them with another answer, and are left out",
        *(len(queries) - len(first), len(queries), split, others),
    )
    return list(first.values()), list(first)


def _encoded(texts: Sequence[str], tokenizer: Tokenizer, *, begin: bool) -> tuple[np.ndarray, np.ndarray]:
    """(tokens, ends) as EncodedQueries takes them, read from the cache if it has them."""
    if sum(map(len, texts)) < CACHED_CHARACTERS:
        return _joined(tokenizer.encode_all(texts, begin=begin))
    name = hashlib.blake2b(json.dumps([tokenizer.fingerprint, begin, *texts]).encode(), digest_size=16).hexdigest()
    path = cache_folder() / f"{name}.npz"
    try:
        with np.load(path, allow_pickle=False) as stored:
            return stored["tokens"], stored["ends"]
    except FileNotFoundError:
        pass
    except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile) as error:  # truncated, or without permission
        log.warning("%s cannot be read (%s): the prompts are encoded again", path, error)
    tokens, ends = _joined(tokenizer.encode_all(texts, begin=begin))
    draft = path.with_name(f".{uuid.uuid4().hex[:8]}.npz")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez(draft, tokens=tokens, ends=ends)
        draft.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            draft.unlink()
        log.warning("%s cannot be written (%s): every process encodes the prompts", path, error)
    return tokens, ends


def cache_folder() -> Path:
    """The folder of encoded prompts, which all runs of this user share. It may be deleted at any time."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "tba_jax" / "prompts"


def _joined(ids: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """(tokens, ends) as EncodedQueries takes them."""
    ends = np.cumsum([len(each) for each in ids], dtype=np.int64)
    tokens = np.empty(int(ends[-1]) if len(ids) else 0, np.int32)
    for each, end in zip(ids, ends, strict=True):
        tokens[end - len(each) : end] = each
    return tokens, ends
