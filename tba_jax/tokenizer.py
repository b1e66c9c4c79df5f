"""Tokenizers: text to token ids and back, behind one small protocol."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

# A folder that holds none of these has no tokenizer; without this check transformers may invent an empty one from config.json.
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


class Tokenizer(Protocol):
    """What the project asks of a tokenizer. Ids are below vocab_size; a model's embedding may be larger, never smaller."""

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included."""

    @property
    def eos_id(self) -> int:
        """The id that ends a response."""

    @property
    def pad_id(self) -> int:
        """The id in masked positions; may equal eos_id or another special id, so masks come from lengths, never from ids."""

    @property
    def special_ids(self) -> tuple[int, ...]:
        """All ids that are not text, ascending: decode skips them."""

    @property
    def fingerprint(self) -> str:
        """Hex digest of everything that maps text to ids: part of the run's contract."""

    def encode(self, text: str) -> list[int]:
        """The ids of a prompt, with a beginning-of-sequence id where the tokenizer adds one, without an end."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of a whole sequence, without special ids. Ids beyond vocab_size give nothing either."""

    def decode_continuation(self, prompt_ids: Sequence[int], response_ids: Sequence[int]) -> str:
        """The text that `response_ids` adds after `prompt_ids` (both without padding), leading space included.

        Use this for responses, not decode: a fragment decoded alone loses its first space in Llama-style tokenizers.
        """


class CharacterTokenizer:
    """One id a character: pad 0, beginning 1, end 2, then `characters` in order. encode begins with 1."""

    def __init__(self, characters: str):
        """
        Raises:
          ValueError: `characters` is empty or repeats a character.
        """
        if repeated := sorted({c for c in characters if characters.count(c) > 1}):
            raise ValueError(f"the alphabet repeats {repeated}; every character stands once")
        if not characters:
            raise ValueError("the alphabet is empty")
        self.pad_id, self.bos_id, self.eos_id = 0, 1, 2
        self.special_ids = (0, 1, 2)
        self.characters = characters
        self._ids = {c: i for i, c in enumerate(characters, start=len(self.special_ids))}
        self.vocab_size = len(self.special_ids) + len(characters)
        self.fingerprint = _digest(["characters", characters])

    def encode(self, text: str) -> list[int]:
        """
        Raises:
          ValueError: names the first character that is not in the alphabet.
        """
        if unknown := next((c for c in text if c not in self._ids), None):
            raise ValueError(f"character {unknown!r} of {text[:60]!r} is not in the tokenizer's alphabet {self.characters!r}")
        return [self.bos_id, *(self._ids[c] for c in text)]

    def decode(self, ids: Sequence[int]) -> str:
        first = len(self.special_ids)
        return "".join(self.characters[i - first] for i in ids if first <= i < self.vocab_size)

    def decode_continuation(self, prompt_ids: Sequence[int], response_ids: Sequence[int]) -> str:
        return self.decode(response_ids)


class HuggingFaceTokenizer:
    """The tokenizer of a Hugging Face folder.

    Where the folder has a tokenizer.json, ids are what that file says. The model classes of transformers rebuild some tokenizers
    from their vocabulary alone, without its normaliser (LlamaTokenizer of transformers 5 then silently drops characters), and
    what they rebuild depends on the version, which must not change a run's tokens.
    """

    def __init__(self, folder: Path | str):
        """
        Raises:
          ValueError: the folder has no tokenizer, or one that cannot be loaded or has no end-of-sequence token.
        """
        folder = Path(folder)
        if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
            raise ValueError(f"{folder} holds no tokenizer: none of {', '.join(_TOKENIZER_FILES)}")
        from transformers import AutoTokenizer, PreTrainedTokenizerFast

        serialized = (folder / "tokenizer.json").is_file()
        try:
            if serialized:
                self._tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
            else:
                self._tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
            eos_id = self._tokenizer.eos_token_id
            if eos_id is None:  # GPT-2's is a default of its class, in no file
                eos_id = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False).eos_token_id
        except Exception as error:  # the Rust parser raises bare Exception; the user needs the folder
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ValueError(f"the tokenizer of {folder} cannot be loaded: {reason}") from error
        if eos_id is None:
            raise ValueError(
                f"the tokenizer of {folder} has no end-of-sequence token; set eos_token in its tokenizer_config.json"
            )

        self.vocab_size = len(self._tokenizer)
        self.eos_id = int(eos_id)
        self.pad_id = self.eos_id if self._tokenizer.pad_token_id is None else int(self._tokenizer.pad_token_id)
        added_special = {i for i, token in self._tokenizer.added_tokens_decoder.items() if token.special}
        self.special_ids = tuple(sorted({*self._tokenizer.all_special_ids, *added_special, self.eos_id, self.pad_id}))
        self._special = frozenset(self.special_ids)
        text = (
            (folder / "tokenizer.json").read_text(encoding="utf-8") if serialized else self._tokenizer.backend_tokenizer.to_str()
        )
        definition = {key: value for key, value in json.loads(text).items() if key not in ("truncation", "padding")}
        self.fingerprint = _digest([definition, self.encode(""), self.eos_id, self.pad_id, self.special_ids, self.vocab_size])

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, verbose=False)

    def decode(self, ids: Sequence[int]) -> str:
        # skip_special_tokens misses special tokens that tokenizer.json marks as normalized.
        text_ids = [int(i) for i in ids if i not in self._special]
        return self._tokenizer.decode(text_ids, clean_up_tokenization_spaces=False)

    def decode_continuation(self, prompt_ids: Sequence[int], response_ids: Sequence[int]) -> str:
        prompt, whole = self.decode(prompt_ids), self.decode([*prompt_ids, *response_ids])
        if whole.startswith(prompt):
            return whole[len(prompt) :]
        # The prompt ends inside a character, which the response completes: the text begins at that character.
        return whole[len(prompt.rstrip("�")) :]


def _digest(definition: object) -> str:
    canonical = json.dumps(definition, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.blake2b(canonical.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
