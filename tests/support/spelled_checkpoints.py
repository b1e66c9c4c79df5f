"""Copies of the tiny checkpoints with a tokenizer that spells: small letters, and the words "safe" and "unsafe"."""

import json
import shutil
import string
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.support.tiny_checkpoints import path_of

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
    shutil.copytree(path_of(fixture), folder)
    merges = [("u", "n"), ("s", "a"), ("sa", "f"), ("saf", "e"), ("un", "safe")]
    tokenizer = Tokenizer(models.BPE(vocab=IDS, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(piece, special=True) for piece in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIAL[EOS], "pad_token": SPECIAL[PAD]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | ({"chat_template": CHAT} if chat else {})))
    return folder


def dated(folder: Path, to: Path) -> Path:
    """A copy of a checkpoint whose conversations begin with the name of the month."""
    shutil.copytree(folder, to)
    (to / "chat_template.jinja").write_text("{{ strftime_now('%B') | lower }}" + CHAT)
    return to


def spelled(text: str) -> list[int]:
    """The ids of a text without the words: a character each."""
    return [IDS[{" ": "Ġ", "\n": "Ċ"}.get(character, character)] for character in text]
