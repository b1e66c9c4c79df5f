"""Stop strings as an automaton over tokens that finds the token that completes one (Aho and Corasick 1975, over UTF-8 bytes).

Also which tokens a response may contain, and which stop strings the tokenizer can spell.
"""

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from tba_jax.text.tokenizers import Tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class StopStrings:
    """next_state: int32[states, V], the state after a token.

    State 0 is that of an empty response. Every other state names the prefix of a stop string with which the text so far ends. The
    token that completes a stop string, at any place in the token's own text, leads to the last state, for good.
    """

    next_state: np.ndarray

    @property
    def accept(self) -> int:
        """The last state: a stop string is complete."""
        return len(self.next_state) - 1

    def run(self, tokens: Iterable[int], state: int = 0) -> int:
        """The state after reading `tokens`, ids below V, in state `state`."""
        for token in tokens:
            state = int(self.next_state[state, token])
        return state


def build(token_bytes: Sequence[bytes | None], stop_strings: Sequence[str], *, vocab: int) -> StopStrings | None:
    """The automaton of the stop strings over the ids of a tokenizer; None if there are no stop strings.

    Args: token_bytes: see HuggingFaceTokenizer; at most `vocab`. Ids without text, and those beyond, lead to state 0.
    """
    if len(token_bytes) > vocab:
        raise ValueError(f"the tokenizer has {len(token_bytes)} ids, the embedding only {vocab}")
    if not stop_strings:
        return None
    by_byte = _by_byte([text.encode() for text in stop_strings])
    accept = len(by_byte) - 1
    texts = [text or b"" for text in token_bytes]
    lengths = np.array([len(text) for text in texts])
    longest_first = np.argsort(-lengths, kind="stable")
    begins = (np.cumsum(lengths) - lengths)[longest_first]
    content = np.frombuffer(b"".join(texts), np.uint8)
    # All tokens advance together, a byte at a time. Sorted by length, the tokens that still have a byte are the first columns.
    state = np.repeat(np.arange(accept + 1, dtype=np.int32)[:, None], len(texts), axis=1)
    for position in range(int(lengths.max(initial=0))):
        active = np.count_nonzero(lengths > position)
        state[:, :active] = by_byte[state[:, :active], content[begins[:active] + position]]
    next_state = np.zeros((accept + 1, vocab), np.int32)
    next_state[:, longest_first] = state
    next_state[:, [i for i, text in enumerate(token_bytes) if text is None]] = 0
    next_state[accept] = accept
    return StopStrings(next_state=next_state)


def _by_byte(stop_strings: Sequence[bytes]) -> np.ndarray:
    """int32[states, 256]: the state after a byte. Every state but the last stands for a proper prefix of a stop string, the
    longest one with which the text so far ends."""
    # A stop string that contains another one is never completed first. No prefix of a remaining one ends with a stop string.
    reached = [text for text in set(stop_strings) if not any(other != text and other in text for other in stop_strings)]
    children: dict[bytes, set[bytes]] = {}
    for text in reached:
        for n in range(len(text)):
            children.setdefault(text[:n], set()).add(text[: n + 1])
    prefixes = sorted(children, key=lambda prefix: (len(prefix), prefix))
    number = {prefix: state for state, prefix in enumerate(prefixes)}
    accept = len(prefixes)
    after = np.zeros((accept + 1, 256), np.int32)
    after[accept] = accept
    # prefix -> state of the longest shorter prefix with which it ends. From there a byte leads that does not extend the prefix.
    fallback = {b"": 0}
    for prefix in prefixes:
        if prefix:
            fallback[prefix] = int(after[fallback[prefix[:-1]], prefix[-1]]) if prefix[:-1] else 0
        after[number[prefix]] = after[fallback[prefix]]
        for child in children[prefix]:
            after[number[prefix], child[-1]] = number.get(child, accept)
    return after


def banned_tokens(task: Any, tokenizer: Tokenizer, vocab: int) -> tuple[int, ...]:
    """Ids that no response contains, ascending: those of config.task.banned_tokens, the rows of the embedding without a token,
    and the special ids but the end of sequence and ids whose text is a stop string.

    Raises ValueError: an id is outside of the vocabulary or ends responses, or no token is left.
    """
    given = set(task.banned_tokens)
    if beyond := sorted(token for token in given if token >= vocab):
        raise ValueError(f"task.banned_tokens holds {beyond[0]}, which is not below the vocabulary of {vocab} ids")
    if tokenizer.eos_id in given:
        raise ValueError(f"task.banned_tokens holds {tokenizer.eos_id}, the end of sequence, without which no response could end")
    special = set(tokenizer.special_ids)
    if task.stop_strings:
        bytes_of, wanted = tokenizer.token_bytes(), {text.encode() for text in task.stop_strings}
        special = {token for token in special if bytes_of[token] not in wanted}
    banned = (given | special | set(range(tokenizer.vocab_size, vocab))) - {tokenizer.eos_id}
    if len(banned) >= vocab - 1:
        raise ValueError(f"task.banned_tokens holds {len(given)} ids and leaves no token for responses: ban fewer ids")
    return tuple(sorted(banned))


# Characters. Each byte is a state of the automaton, with an entry for every token.
_LONGEST_STOP_STRING = 64


def check_stop_strings(
    stop_strings: Sequence[str], tokenizer: Tokenizer, *, setting: str = "task.stop_strings", special: bool = True
) -> None:
    """Raises ValueError if the tokenizer's ids cannot spell one of the texts, or a text is too long.

    Args: setting: the one that holds the texts; special: whether special ids may spell a text, as they may at a response's end.
    """
    if not stop_strings:
        return
    texts, barred = tokenizer.token_bytes(), set() if special else {*tokenizer.special_ids, tokenizer.eos_id}
    for text in stop_strings:
        if len(text) > _LONGEST_STOP_STRING:
            told = f"{setting} holds a text of {len(text)} characters, {text[:40]!r}…"
            raise ValueError(f"{told}; at most {_LONGEST_STOP_STRING} are allowed")
        # Ids without text keep apart what stands at their sides, as a byte does that UTF-8 has not.
        pieces = ([texts[i] for i in ids if i not in barred] for ids in _encodings(text, tokenizer))
        spelt = (b"".join(b"\xff" if piece is None else piece for piece in each) for each in pieces)
        if not any(text.encode() in each for each in spelt):
            why = f"the tokenizer ({type(tokenizer).__name__}) encodes it as another text"
            raise ValueError(f"{setting} holds {text!r}, which no response can contain: {why}")


def _encodings(text: str, tokenizer: Tokenizer) -> Iterator[list[int]]:
    """Ids of a text alone and between two full stops, since some tokenizers strip white space from a text's ends."""
    for whole in (text, f".{text}."):
        with contextlib.suppress(ValueError):  # the alphabet lacks a character
            yield tokenizer.encode(whole)
