"""Which tokens a response may contain, and which stop strings the tokenizer can spell."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from tba_jax.text import stop_strings as stop_strings_lib
from tba_jax.text.tokenizers import Tokenizer


def banned_tokens(task: Any, tokenizer: Tokenizer, vocab: int) -> tuple[int, ...]:
    """Ids that no response contains, ascending.

    They are the ids of config.task.banned_tokens, the rows of the embedding without a token, and the special ids other than the
    end of sequence and other than ids whose text is a stop string.

    Raises:
      ValueError: an id is outside of the vocabulary or ends responses, or no token is left.
    """
    given = set(task.banned_tokens)
    if beyond := sorted(token for token in given if token >= vocab):
        raise ValueError(f"task.banned_tokens holds {beyond[0]}, which is not below the vocabulary of {vocab} ids")
    if tokenizer.eos_id in given:
        raise ValueError(
            f"task.banned_tokens holds {tokenizer.eos_id}, the end-of-sequence token, without which no response could end"
        )
    special = set(tokenizer.special_ids) - _stopping_ids(task.stop_strings, tokenizer)
    banned = (given | special | set(range(tokenizer.vocab_size, vocab))) - {tokenizer.eos_id}
    if len(banned) >= vocab - 1:
        raise ValueError(f"task.banned_tokens holds {len(given)} ids and leaves no token for responses: ban fewer ids")
    return tuple(sorted(banned))


def _stopping_ids(stop_strings: Sequence[str], tokenizer: Tokenizer) -> set[int]:
    """Special ids whose whole text is a stop string."""
    if not stop_strings:
        return set()
    texts, wanted = tokenizer.token_bytes(), {text.encode() for text in stop_strings}
    return {token for token in tokenizer.special_ids if texts[token] in wanted}


# Characters. Each byte of a stop string is a state of the automaton, and each state has an entry for every token.
_LONGEST_STOP_STRING = 64


def check_stop_strings(
    stop_strings: Sequence[str],
    tokenizer: Tokenizer,
    vocab: int,
    *,
    setting: str = "task.stop_strings",
    special: bool = True,
) -> None:
    """Raises ValueError if the tokenizer's ids cannot spell one of the texts, or a text is too long.

    Args: setting: the one that holds the texts; special: whether special ids may spell a text, as they may at a response's end.
    """
    if not stop_strings:
        return
    texts, barred = tokenizer.token_bytes(), set() if special else {*tokenizer.special_ids, tokenizer.eos_id}
    for text in stop_strings:
        if len(text) > _LONGEST_STOP_STRING:
            raise ValueError(
                f"{setting} holds a text of {len(text)} characters, {text[:40]!r}…; at most {_LONGEST_STOP_STRING} are allowed"
            )
        automaton = stop_strings_lib.build(texts, [text], vocab=vocab)
        assert automaton is not None
        spelt = [[token for token in ids if token not in barred] for ids in _encodings(text, tokenizer)]
        if not any(automaton.run(ids) == automaton.accept for ids in spelt):
            raise ValueError(
                f"{setting} holds {text!r}, which no response can contain: the tokenizer ({type(tokenizer).__name__}) encodes "
                "it as another text"
            )


def _encodings(text: str, tokenizer: Tokenizer) -> Iterator[list[int]]:
    """Ids of a text alone and of the text between two full stops, since some tokenizers strip white space from a text's ends.

    Yields nothing if the tokenizer's alphabet lacks a character of the text.
    """
    for whole in (text, f".{text}."):
        with contextlib.suppress(ValueError):  # the alphabet lacks a character
            yield tokenizer.encode(whole)
