"""Whether prompts survive the tokenizer: a tokenizer without a token for a character drops it, and "1/5" becomes "15"."""

import dataclasses
import unicodedata
from collections.abc import Sequence

from tba_jax.text.tokenizers import Tokenizer
from tba_jax.text.visible import visible_line

# Characters of an example before and after the first one that is lost.
_BEFORE, _AFTER = 20, 40


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lost:
    """count: prompts that the tokenizer changes, of those looked at. text, read: of the first of them, the part with the change
    and what the policy reads of it, both safe to print."""

    count: int
    text: str = ""
    read: str = ""


def find(prompts: Sequence[str], tokenizer: Tokenizer) -> Lost:
    """Encodes and decodes prompts. White space and Unicode's compatible forms (NFKC) may change; texts of special tokens stay."""
    texts = tokenizer.escaped(prompts)
    read = [tokenizer.decode(ids) for ids in tokenizer.encode_all(texts, begin=False)]
    changed = [i for i, text in enumerate(texts) if _compared(text) != _compared(read[i])]
    if not changed:
        return Lost(count=0)
    first = changed[0]
    return Lost(count=len(changed), **_excerpts(texts[first], read[first]))


def _compared(text: str) -> str:
    return "".join(unicodedata.normalize("NFKC", text).split())


def _excerpts(text: str, read: str) -> dict[str, str]:
    """The parts of both texts around the first difference, with white space made single spaces."""
    text, read = (" ".join(unicodedata.normalize("NFKC", each).split()) for each in (text, read))
    i = j = 0
    while i < len(text) and j < len(read):
        if text[i] == read[j]:
            i, j = i + 1, j + 1
        elif " " in (text[i], read[j]):  # white space may differ
            i, j = i + (text[i] == " "), j + (read[j] == " ")
        else:
            break
    parts = text[max(0, i - _BEFORE) : i + _AFTER], read[max(0, j - _BEFORE) : j + _AFTER]
    return dict(zip(("text", "read"), map(visible_line, parts), strict=True))
