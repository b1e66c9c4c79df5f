"""Tokenizers: text to token ids and back. Both classes have the same methods, which HuggingFaceTokenizer describes.

Ids are below vocab_size; a model's embedding may have more rows, never fewer. Masks come from lengths, never from pad_id.

Stop strings are an automaton over tokens that finds the token that completes one (Aho and Corasick 1975, over UTF-8 bytes).
"""

import contextlib
import dataclasses
import datetime
import hashlib
import importlib.util
import json
import re
import string
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from tba_jax.schemas import NO_CHARACTER, holds_surrogate
from tba_jax.text.escaping import Escaper, any_of, broken_up, without_rows

# A folder with none of these files has no tokenizer. Without the check transformers may invent an empty one from config.json.
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


class CharacterTokenizer:
    """One id a character: padding 0, beginning of sequence 1, end of sequence 2, then `characters` in order."""

    def __init__(self, characters: str):
        if repeated := sorted({c for c in characters if characters.count(c) > 1}):
            raise ValueError(f"the alphabet repeats {repeated}; every character must be unique")
        if not characters:
            raise ValueError("the alphabet is empty")
        if holds_surrogate(characters):
            raise ValueError(f"the alphabet {characters!r} {NO_CHARACTER}")
        self.pad_id, self.bos_id, self.eos_id = 0, 1, 2
        self.special_ids = (0, 1, 2)
        self.characters = characters
        self._ids = {c: i for i, c in enumerate(characters, start=len(self.special_ids))}
        self.vocab_size = len(self.special_ids) + len(characters)
        self.fingerprint = _digest(["characters", characters])

    def encode(self, text: str) -> list[int]:
        """Raises ValueError naming the first character that is not in the alphabet."""
        if unknown := next((c for c in text if c not in self._ids), None):
            raise ValueError(f"character {unknown!r} of {text[:60]!r} is not in the tokenizer's alphabet {self.characters!r}")
        return [self.bos_id, *(self._ids[c] for c in text)]

    def encode_all(self, texts: Sequence[str], *, begin: bool) -> list[list[int]]:
        return [self.encode(text)[0 if begin else 1 :] for text in texts]

    def escaped(self, texts: Sequence[str]) -> list[str]:
        return list(texts)  # a special id has no character

    chat_template = ""
    eos_text = ""

    def conversations(
        self, asked: Sequence[Any], system: str = "", *, setting: str = "task.chat_template=True", tools: Sequence[Any] = ()
    ) -> list[str]:
        raise ValueError(f"{setting} needs a pretrained model: an alphabet of characters has no chat template")

    chat = conversations

    def decode(self, ids: Sequence[int]) -> str:
        first = len(self.special_ids)
        return "".join(self.characters[i - first] for i in ids if first <= i < self.vocab_size)

    def decode_continuation(self, prompt_ids: Sequence[int], response_ids: Sequence[int]) -> str:
        return self.decode(response_ids)

    def token_bytes(self) -> list[bytes | None]:
        return [*(None for _ in self.special_ids), *(character.encode() for character in self.characters)]


@contextlib.contextmanager
def _told(*texts: str) -> Iterator[None]:
    """Raises ValueError where the backend, which has no class of its own for it, cannot encode a text."""
    try:
        yield
    except Exception as error:
        shown = repr(texts[0] if len(texts) == 1 else [text[:60] for text in texts[:3]])
        raise ValueError(f"the tokenizer cannot encode {shown[:200]}: {error}") from error


class HuggingFaceTokenizer:
    """The tokenizer of a Hugging Face folder.

    A tokenizer.json alone decides the ids where there is one: classes of transformers rebuild some tokenizers from their
    vocabulary, without the normaliser and with another result in another version.

    vocab_size: number of ids, added tokens included. eos_id: ends a response. pad_id: eos_id where the model has no row for the
    tokenizer's own. special_ids: all ids that are not text, ascending. fingerprint: hex digest of everything that maps text to
    ids.
    """

    def __init__(self, folder: Path | str, *, vocab: int | None = None, date: str = ""):
        """Raises ValueError: the folder has no tokenizer, or it cannot be loaded, has no end-of-sequence token, or needs a token
        that has no row in the embedding.

        Args:
          vocab: rows of the model's embedding. Special tokens from there on are not used, as Gemma 3's token of images.
          date: YYYY-MM-DD, the day that a chat template finds where it reads the clock; "": what the clock says.
        """
        folder = self._folder = Path(folder)
        (self._tokenizer, eos_id), self._date = open_transformers(folder), date
        if eos_id is None:
            raise ValueError(
                f"the tokenizer of {folder} has no end-of-sequence token; set eos_token in its tokenizer_config.json"
            )
        backend = self._tokenizer.backend_tokenizer
        unused = [] if vocab is None else without_rows(backend, vocab, eos_id=eos_id)
        self.vocab_size = len(self._tokenizer) - len(unused)
        self._unused = any_of(unused)
        self.eos_id = int(eos_id)
        pad_id = self._tokenizer.pad_token_id
        self.pad_id = self.eos_id if pad_id is None or self._tokenizer.pad_token in unused else int(pad_id)
        added = {i: token.content for i, token in self._tokenizer.added_tokens_decoder.items() if token.special}
        special = {*self._tokenizer.all_special_ids, *added, self.eos_id, self.pad_id}
        self.special_ids = tuple(sorted(i for i in special if i < self.vocab_size))
        self._special = frozenset(self.special_ids)
        names = [*self._tokenizer.all_special_tokens, *added.values()]
        self._escaper = Escaper(backend, names=names, ids=self.special_ids)
        serialized = folder / "tokenizer.json"
        text = serialized.read_bytes() if serialized.is_file() else backend.to_str()
        definition = {key: value for key, value in json.loads(text).items() if key not in ("truncation", "padding")}
        self._decoders = _flat_decoders(definition.get("decoder"))
        self.fingerprint = _digest([definition, self.encode(""), self.eos_id, self.pad_id, self.special_ids, self.vocab_size])

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt: with a beginning-of-sequence id if the tokenizer adds one, without an end-of-sequence id."""
        with _told(text):
            return self._tokenizer.encode(broken_up(self._unused, text), verbose=False)

    def encode_all(self, texts: Sequence[str], *, begin: bool) -> list[list[int]]:
        """Token ids of many prompts. begin: whether special ids are added, as encode does, or the texts spell them themselves."""
        if not texts:
            return []
        texts = [broken_up(self._unused, text) for text in texts]
        with _told(*texts):
            return self._tokenizer(texts, add_special_tokens=begin, verbose=False)["input_ids"]

    def escaped(self, texts: Sequence[str]) -> list[str]:
        """The texts, with spaces in the special tokens that they spell, so that they encode as text."""
        return self._escaper(texts)

    @property
    def eos_text(self) -> str:
        """The spelling of the end of sequence."""
        return str(self._tokenizer.convert_ids_to_tokens(self.eos_id))

    @property
    def chat_template(self) -> str:
        """The source of the chat template, "" without one."""
        return self._tokenizer.get_chat_template() if self._tokenizer.chat_template else ""

    def chat(self, prompts: Sequence[str], system: str, *, tools: Sequence[Any] = ()) -> list[str]:
        """The chat template's texts of user messages, see conversations. system: the system message, "" for none."""
        before = [{"role": "system", "content": system}] if system else []
        asked = [[*before, {"role": "user", "content": prompt}] for prompt in prompts]
        return self.conversations(asked, setting="task.chat_template=True", tools=tools)

    def conversations(
        self, asked: Sequence[Sequence[Mapping[str, Any]]], *, setting: str, tools: Sequence[Any] = ()
    ) -> list[str]:
        """The chat template's text of each list of messages {"role", "content"}, up to where the next message begins.

        Args: tools: JSON schemas of the tools that it tells of.

        Raises ValueError, which begins with `setting`: there is no chat template, or it refuses such messages.
        """
        if not asked:
            return []
        if not (template := self.chat_template):
            raise ValueError(
                f"{setting}: the tokenizer of {self._folder} has no chat template (neither chat_template.jinja nor "
                "chat_template in its tokenizer_config.json)"
            )
        if holds_surrogate(template):
            raise ValueError(f"{setting}: the chat template of {self._folder} {NO_CHARACTER}")
        if self._date and "strftime_now" in template:
            template = _stopped_clock(self._date) + template
        given: dict[str, Any] = dict(
            chat_template=template, tokenize=False, add_generation_prompt=True, tools=list(tools) or None
        )
        try:
            return self._tokenizer.apply_chat_template([list(messages) for messages in asked], **given)
        except Exception as error:  # a template may raise any exception
            kinds, why = " and ".join(f"a {message['role']}" for message in asked[0]), " ".join(str(error).split())[:200]
            raise ValueError(f"{setting}: the chat template of {self._folder} refuses {kinds} message: {why}") from error

    def decode(self, ids: Sequence[int]) -> str:
        """The text of a whole sequence. Special ids and ids beyond vocab_size are skipped."""
        # skip_special_tokens misses special tokens that tokenizer.json marks as normalized.
        text_ids = [int(i) for i in ids if i not in self._special]
        return self._tokenizer.decode(text_ids, clean_up_tokenization_spaces=False)

    def decode_continuation(self, prompt_ids: Sequence[int], response_ids: Sequence[int]) -> str:
        """The text that `response_ids` adds after `prompt_ids` (both without padding). A response that is decoded alone would
        lose its first space in Llama-style tokenizers."""
        prompt, whole = self.decode(prompt_ids), self.decode([*prompt_ids, *response_ids])
        if whole.startswith(prompt):
            return whole[len(prompt) :]
        # The prompt ends inside of a character that the response completes. The response's text begins at that character.
        return whole[len(prompt.rstrip("�")) :]

    def token_bytes(self) -> list[bytes | None]:
        """The UTF-8 bytes that each id adds to the text of a continuation, special ids their literal text; None without text.

        Raises ValueError: the text that a token adds depends on the tokens beside it.
        """
        bytes_of = _token_bytes_by(self._decoders)
        pieces: list[str | None] = self._tokenizer.convert_ids_to_tokens(list(range(self.vocab_size)))
        texts = [None if piece is None else bytes_of(piece) for piece in pieces]
        # Vocabulary pieces of special tokens may be normalised, as "▁<s>" is. tokenizer.json has the literal spelling.
        for i, token in self._tokenizer.added_tokens_decoder.items():
            if i in self._special:
                texts[i] = token.content.encode()
        return texts


Tokenizer = CharacterTokenizer | HuggingFaceTokenizer


def _stopped_clock(date: str) -> str:
    """A line of Jinja before a template, for which the clock stands at the beginning of a day: transformers passes no functions
    to templates, so strftime_now(FORMAT) is a macro that replaces each code of the format."""
    day = datetime.datetime.fromisoformat(date)
    codes = [f"%{flag}{letter}" for flag in ("", "-") for letter in string.ascii_letters]
    replaced = "".join(f"|replace({json.dumps(code)}, {json.dumps(day.strftime(code))})" for code in codes)
    return f"{{% macro strftime_now(format) %}}{{{{ format{replaced} }}}}{{% endmacro %}}\n"


def has_tokenizer(folder: Path) -> bool:
    """Whether a Hugging Face folder has the files of a tokenizer."""
    return any((folder / name).is_file() for name in _TOKENIZER_FILES)


def open_transformers(folder: Path) -> tuple[Any, int | None]:
    """The transformers tokenizer of a folder, and its end-of-sequence id; None for tokenizers without one, such as BERT's.

    Raises ValueError: the folder has no tokenizer, or it cannot be loaded.
    """
    if not has_tokenizer(folder):
        raise ValueError(f"{folder} holds no tokenizer: none of {', '.join(_TOKENIZER_FILES)}")
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        if (folder / "tokenizer.json").is_file():
            tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
        else:
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        eos_id = tokenizer.eos_token_id
        if eos_id is None:  # GPT-2's end of sequence is a default of its tokenizer class and stands in no file
            eos_id = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False).eos_token_id
    except Exception as error:  # the Rust parser raises bare Exception without naming the folder
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        if (folder / "tokenizer.model").is_file() and importlib.util.find_spec("sentencepiece") is None:
            reason += "; a tokenizer.model needs the package sentencepiece: pip install -e '.[sentencepiece]'"
        raise ValueError(f"the tokenizer of {folder} cannot be loaded: {reason}") from error
    return tokenizer, None if eos_id is None else int(eos_id)


def _flat_decoders(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The decoders of tokenizer.json in their order, nested sequences flattened; [] for None."""
    if decoder is None or decoder["type"] != "Sequence":
        return [decoder] if decoder else []
    return [inner for each in decoder["decoders"] for inner in _flat_decoders(each)]


def _token_bytes_by(decoders: Sequence[dict[str, Any]]) -> Callable[[str], bytes]:
    """The function from a vocabulary piece to its bytes. Raises ValueError where the decoders give pieces no fixed bytes."""
    kinds = [decoder["type"] for decoder in decoders]
    if "ByteLevel" in kinds and set(kinds) <= {"ByteLevel", "Fuse"}:
        return _byte_level
    space = next((mark for decoder in decoders if (mark := _mark_of_space(decoder))), "")
    fused = kinds.index("Fuse") if "Fuse" in kinds else len(kinds)
    of_pieces = all(_mark_of_space(d) == space or d["type"] == "ByteFallback" for d in decoders[:fused])
    # The start of a text, which a decoder may strip, belongs to the prompt and never to a continuation.
    if space and of_pieces and all(d["type"] == "Fuse" or (d["type"] == "Strip" and d["stop"] == 0) for d in decoders[fused:]):
        # The piece of a single byte in SentencePiece's vocabularies.
        byte = re.compile("<0x([0-9A-Fa-f]{2})>" if "ByteFallback" in kinds else "(?!)")
        return lambda piece: bytes.fromhex(found[1]) if (found := byte.fullmatch(piece)) else piece.replace(space, " ").encode()
    raise ValueError(
        f"the tokenizer's decoder is {' + '.join(kinds) or 'none'}, with which the text of a token depends on other tokens: "
        "task.stop_strings and task.step_ends need a byte-level or SentencePiece tokenizer"
    )


def _mark_of_space(decoder: dict[str, Any]) -> str:
    """The character that a decoder turns into a space; "" for decoders that do something else."""
    if decoder["type"] == "Metaspace":
        return decoder["replacement"]
    if decoder["type"] == "Replace" and decoder["content"] == " ":
        return decoder["pattern"].get("String", "")
    return ""


# Character -> byte of byte-level BPE (Radford et al. 2019): bytes that are no visible character of Latin-1 are, in order, the
# characters from 256 on.
_BYTE_LEVEL = set(tokenizers.pre_tokenizers.ByteLevel.alphabet())
_HIDDEN = [byte for byte in range(256) if chr(byte) not in _BYTE_LEVEL]
_BYTE_ALPHABET = {c: ord(c) if ord(c) < 256 else _HIDDEN[ord(c) - 256] for c in _BYTE_LEVEL}


def _byte_level(piece: str) -> bytes:
    """The bytes of a piece of byte-level BPE. Added tokens, which have characters outside of its alphabet, are plain text."""
    if all(character in _BYTE_ALPHABET for character in piece):
        return bytes(_BYTE_ALPHABET[character] for character in piece)
    return piece.encode()


def _digest(definition: object) -> str:
    canonical = json.dumps(definition, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.blake2b(canonical.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


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


def stop_automaton(token_bytes: Sequence[bytes | None], stop_strings: Sequence[str], *, vocab: int) -> StopStrings | None:
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
