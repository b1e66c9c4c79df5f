"""Which tokens a response may hold, and which texts can end it."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from tba_jax.text import stop_strings as stop_strings_lib
from tba_jax.text.tokenizers import Tokenizer


def banned_tokens(task: Any, tokenizer: Tokenizer, vocab: int) -> tuple[int, ...]:
    """Ids that no response holds: those of config.task.banned_tokens, special ids other than the end and those whose text is a
    stop string, and rows of the embedding without a token."""
    given = set(task.banned_tokens)
    if beyond := sorted(token for token in given if token >= vocab):
        raise ValueError(f"task.banned_tokens holds {beyond[0]}, which is not below the vocabulary of {vocab} ids")
    if tokenizer.eos_id in given:
        raise ValueError(f"task.banned_tokens holds {tokenizer.eos_id}, the end-of-sequence, without which no response could end")
    special = set(tokenizer.special_ids) - _stopping_ids(task.stop_strings, tokenizer)
    banned = (given | special | set(range(tokenizer.vocab_size, vocab))) - {tokenizer.eos_id}
    if len(banned) >= vocab - 1:
        raise ValueError(f"task.banned_tokens holds {len(given)} ids and leaves no token that a response could be made of")
    return tuple(sorted(banned))


def _stopping_ids(stop_strings: Sequence[str], tokenizer: Tokenizer) -> set[int]:
    """Special ids whose whole text is a stop string."""
    if not stop_strings:
        return set()
    texts, wanted = tokenizer.token_bytes(), {text.encode() for text in stop_strings}
    return {token for token in tokenizer.special_ids if texts[token] in wanted}


# Each byte is a state, which has an entry for each token.
_LONGEST_STOP_STRING = 64


def check_stop_strings(
    stop_strings: Sequence[str],
    tokenizer: Tokenizer,
    vocab: int,
    *,
    setting: str = "task.stop_strings",
    special: bool = True,
) -> None:
    """Raises ValueError where a text of a setting is none that the tokenizer's ids can spell.

    Args: special: whether special ids may help, which a response holds at its end at most.
    """
    if not stop_strings:
        return
    texts, barred = tokenizer.token_bytes(), set() if special else {*tokenizer.special_ids, tokenizer.eos_id}
    for text in stop_strings:
        if len(text) > _LONGEST_STOP_STRING:
            raise ValueError(
                f"{setting} holds a text of {len(text)} characters, {text[:40]!r}…; allowed are {_LONGEST_STOP_STRING}"
            )
        automaton = stop_strings_lib.build(texts, [text], vocab=vocab)
        assert automaton is not None
        spelt = [[token for token in ids if token not in barred] for ids in _encodings(text, tokenizer)]
        if not any(automaton.run(ids) == automaton.accept for ids in spelt):
            raise ValueError(
                f"{setting} holds {text!r}, which no response can: encoded by the tokenizer ({type(tokenizer).__name__}) "
                "it is another text"
            )


def _encodings(text: str, tokenizer: Tokenizer) -> Iterator[list[int]]:
    """Ids of a text alone and, since some tokenizers strip white space from the ends of a text, within others; none where its
    characters have no ids."""
    for whole in (text, f".{text}."):
        with contextlib.suppress(ValueError):  # of an alphabet that lacks a character
            yield tokenizer.encode(whole)
