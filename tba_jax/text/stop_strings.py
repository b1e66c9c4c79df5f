"""Stop strings as an automaton over tokens: which token of a response completes one (Aho and Corasick 1975, over UTF-8 bytes)."""

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class StopStrings:
    """next_state: int32[states, V], the state after a token. State 0 is that of an empty response, the others say how much of
    a stop string the text so far ends with; the last is reached by the token that completes one, wherever in its text that
    is, and never left."""

    next_state: np.ndarray

    @property
    def accept(self) -> int:
        """The last state: a stop string is complete."""
        return len(self.next_state) - 1

    def run(self, tokens: Iterable[int], state: int = 0) -> int:
        """The state after `tokens`, ids below V, from `state` on."""
        for token in tokens:
            state = int(self.next_state[state, token])
        return state


def build(token_bytes: Sequence[bytes | None], stop_strings: Sequence[str], *, vocab: int) -> StopStrings | None:
    """The automaton of stop strings, UTF-8 texts, over the ids of a tokenizer.

    Args:
      token_bytes: see Tokenizer.token_bytes; ids without text, and those from its length to V, lead to state 0.
      vocab: V.

    Returns:
      None where there are no stop strings.

    Raises:
      ValueError: a stop string is empty, or there are more texts than ids.
    """
    if not all(stop_strings):
        raise ValueError(f"task.stop_strings={tuple(stop_strings)} must hold texts of at least one character")
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
    # All tokens advance together, a byte at a time, by contiguous columns: the tokens that have such a byte.
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
    """int32[states, 256]: the state after a byte. A state but the last is a proper prefix of a stop string: the longest that
    the text so far ends with."""
    # A stop string within which another is complete is never reached. Of the others no prefix ends with a whole one.
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
    # The longest shorter prefix that a prefix ends with: what holds where the next byte does not go on.
    fallback = {b"": 0}
    for prefix in prefixes:
        if len(prefix) == 1:
            fallback[prefix] = 0
        elif prefix:
            fallback[prefix] = int(after[fallback[prefix[:-1]], prefix[-1]])
        after[number[prefix]] = after[fallback[prefix]]
        for child in children[prefix]:
            after[number[prefix], child[-1]] = number.get(child, accept)
    return after
