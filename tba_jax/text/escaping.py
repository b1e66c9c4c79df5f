"""Texts that spell special tokens: no content of a prompt may end its turn, or ask for a row that the embedding lacks."""

import json
import re
from collections.abc import Collection, Sequence

import tokenizers


class Escaper:
    """Puts a space after the first character of every special token that a text spells.

    A spelling in other characters, which the normaliser turns into those of a special token, is broken up in the same way, or
    replaced by a space. The id of characters without a token is no special token here.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, *, names: Collection[str] = (), ids: Collection[int] = ()):
        """Args: names, ids: special tokens besides the ones that the tokenizer calls special or puts around a text."""
        # A copy without truncation, behind which nothing would be looked at.
        self._tokenizer = tokenizers.Tokenizer.from_str(tokenizer.to_str())
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        added = {i: token.content for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        around = {*ids, *added, *tokenizer.encode("").ids}
        spelled = {token for i in around if (token := tokenizer.id_to_token(i))}
        self._names = any_of([*names, *added.values(), *spelled])
        self._ids = frozenset(around) - {_unknown(tokenizer)}

    def __call__(self, texts: Sequence[str]) -> list[str]:
        """The texts, of which no part encodes as a special token."""
        escaped = [broken_up(self._names, text) for text in texts]
        left, replace = list(range(len(escaped))), False
        while left:
            encoded = self._tokenizer.encode_batch([escaped[i] for i in left], add_special_tokens=False)
            changed = {i: self._without(escaped[i], each, replace=replace) for i, each in zip(left, encoded, strict=True)}
            left, replace = [i for i, text in changed.items() if text != escaped[i]], True
            for i in left:
                escaped[i] = changed[i]
        return escaped

    def _without(self, text: str, encoded: tokenizers.Encoding, *, replace: bool) -> str:
        """The text with each of its special tokens broken up or replaced by a space."""
        places = [place for id_, place in zip(encoded.ids, encoded.offsets, strict=True) if id_ in self._ids]
        for begin, end in reversed(places):
            if found := text[begin:end].strip():
                text = f"{text[:begin]}{' ' if replace or len(found) == 1 else f'{found[0]} {found[1:]}'}{text[end:]}"
        return text


def without_rows(tokenizer: tokenizers.Tokenizer, vocab: int, *, eos_id: int | None = None) -> list[str]:
    """The special tokens whose ids have no row in a model's embedding of `vocab` rows: no text may encode as one of them.

    Raises ValueError: a token of texts has no row, or the end of sequence `eos_id`, or a token that the tokenizer adds to texts.
    """
    added = tokenizer.get_added_tokens_decoder()
    beyond = {i: name for name, i in tokenizer.get_vocab().items() if i >= vocab}
    if any(i not in added or not added[i].special for i in beyond):
        raise ValueError(f"the tokenizer has {max(beyond) + 1} ids, the embedding only {vocab}")
    needed = [
        (eos_id, "which ends responses", "eos_token in tokenizer_config.json"),
        *((i, "which the tokenizer adds to every text", "post_processor in tokenizer.json") for i in tokenizer.encode("").ids),
        (_unknown(tokenizer), "which stands for unknown characters", "unk_token in tokenizer.json"),
    ]
    for i, role, setting in needed:
        if i is not None and i >= vocab:
            token = f"the token {tokenizer.id_to_token(i)!r}, {role}, has id {i}"
            raise ValueError(f"{token}, but the model's embedding has {vocab} rows: set {setting} to a token that has a row")
    return list(beyond.values())


def any_of(names: Sequence[str]) -> re.Pattern[str]:
    """Finds these names, longer ones before others that they begin with."""
    ordered = sorted(set(names), key=len, reverse=True)
    return re.compile("|".join(re.escape(name) for name in ordered if len(name) > 1) or "(?!)")


def broken_up(names: re.Pattern[str], text: str) -> str:
    """The text with a space behind the first character of each of the names."""
    return names.sub(lambda found: f"{found[0][0]} {found[0][1:]}", text)


def _unknown(tokenizer: tokenizers.Tokenizer) -> int | None:
    """The id of characters for which the vocabulary has no token; None if every character has one."""
    model = json.loads(tokenizer.to_str())["model"]
    name = model.get("unk_token")
    return model.get("unk_id") if name is None else tokenizer.token_to_id(name)
