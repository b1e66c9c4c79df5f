"""Copies of the tiny checkpoints with a tokenizer that spells: small letters, and the words "safe" and "unsafe"."""

import shutil
import string
from pathlib import Path

from tokenizers import AddedToken

from tests.support import tiny_checkpoints

PAD, BEGIN, EOS, OTHER_END = range(4)
SPECIAL = ("<|pad|>", "<|begin|>", "<|end|>", "<|over|>")
_PIECES = (*SPECIAL, *string.ascii_lowercase, "Ġ", "Ċ", ":", "un", "sa", "saf", "safe", "unsafe")
IDS = {piece: i for i, piece in enumerate(_PIECES)}
UNSAFE = IDS["unsafe"]
# As text: what a conversation becomes.
CHAT = (
    "{{ '<|begin|>' }}{% for m in messages %}{{ m['role'] + ':' + m['content'] + '\\n' }}{% endfor %}"
    "{% if messages[-1]['role'] == 'user' %}{{ 'assistant:' }}{% endif %}"
)


def write(folder: Path, fixture: str, *, chat: bool = False) -> Path:
    """The tiny checkpoint of that name with the tokenizer's files. Returns the folder."""
    shutil.copytree(tiny_checkpoints.path_of(fixture), folder)
    merges = [("u", "n"), ("s", "a"), ("sa", "f"), ("saf", "e"), ("un", "safe")]
    tokenizer = tiny_checkpoints.byte_level(_PIECES, merges)
    tokenizer.add_special_tokens([AddedToken(piece, special=True) for piece in SPECIAL])
    settings = {"eos_token": SPECIAL[EOS], "pad_token": SPECIAL[PAD]} | ({"chat_template": CHAT} if chat else {})
    return tiny_checkpoints.save_tokenizer(folder, tokenizer, **settings)


def dated(folder: Path, to: Path) -> Path:
    """A copy of a checkpoint whose conversations begin with the name of the month."""
    shutil.copytree(folder, to)
    (to / "chat_template.jinja").write_text("{{ strftime_now('%B') | lower }}" + CHAT)
    return to


def spelled(text: str) -> list[int]:
    """The ids of a text without the words: a character each."""
    return [IDS[{" ": "Ġ", "\n": "Ċ"}.get(character, character)] for character in text]
