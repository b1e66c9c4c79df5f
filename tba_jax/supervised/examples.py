"""Examples for supervised training: JSON lines read, checked and tokenised, and the split into train and held-out ones."""

import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tba_jax import trajectory
from tba_jax.supervised.objectives import Batch, Examples, Preferences
from tba_jax.tasks import data
from tba_jax.text.prompts import encode_pair
from tba_jax.text.tokenizers import Tokenizer

# Token ids int32[n] of a prompt and of what may follow it: one response, or the chosen and the rejected one.
Encoded = tuple[np.ndarray, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Data:
    """The examples of a run. skipped: reason -> number of examples left out of both splits."""

    train: list[Encoded]
    heldout: list[Encoded]
    skipped: dict[str, int]

    @property
    def fingerprint(self) -> str:
        """Hex digest of all token ids in their order: examples of another file, tokenizer or split have another one."""
        digest = hashlib.blake2b(digest_size=16)
        for split in (self.train, self.heldout):
            digest.update(len(split).to_bytes(8, "little"))
            for example in split:
                for ids in example:
                    digest.update(len(ids).to_bytes(4, "little") + ids.astype("<i4").tobytes())
        return digest.hexdigest()


def load(config: Any, kind: str, tokenizer: Tokenizer) -> Data:
    """Reads what `config` (the section `data`) names, for OBJECTIVES' `kind`.

    Raises:
      ValueError: one sentence with file, line and field, or about examples that do not fit.
    """
    answers = (config.response_field,) if kind == "sft" else (config.chosen_field, config.rejected_field)
    fields = (config.prompt_field, *answers)
    skipped = {"too long": 0, "identical": 0}
    train = _encode(Path(config.train), "data.train", fields, config, tokenizer, skipped)
    if config.heldout:
        heldout = _encode(Path(config.heldout), "data.heldout", fields, config, tokenizer, skipped)
    else:
        # Examples of one prompt stand on one side, unless there is no other (attacks of red-teaming, say).
        several = any(not np.array_equal(example[0], train[0][0]) for example in train)
        chosen = [_hashed_share(example[0] if several else np.concatenate(example)) < config.heldout_share for example in train]
        heldout = [example for example, held in zip(train, chosen, strict=True) if held]
        train = [example for example, held in zip(train, chosen, strict=True) if not held]
        if not heldout or not train:
            raise ValueError(
                f"data.heldout_share={config.heldout_share} splits the examples of data.train {config.train} into {len(train)} "
                f"to train on and {len(heldout)} held out; change it, give more examples, or name a file in data.heldout"
            )
    return Data(train=train, heldout=heldout, skipped=skipped)


def make_batch(examples: Sequence[Encoded], *, rows: int, prompt_length: int, response_length: int, pad_id: int) -> Batch:
    """Pads examples to `rows` rows: rows beyond them count nothing (see objectives.Examples)."""
    filling = rows - len(examples)
    prompts = [*(example[0].tolist() for example in examples), *[[pad_id]] * filling]
    by_answer = [
        trajectory.token_columns(
            prompts,
            [*(response.tolist() for response in responses), *[[]] * filling],
            prompt_length=prompt_length,
            response_length=response_length,
            pad_id=pad_id,
        )
        for responses in zip(*(example[1:] for example in examples), strict=True)
    ]
    if len(by_answer) == 1:
        return Examples(**by_answer[0])
    chosen, rejected = by_answer
    return Preferences(**{name: np.stack([chosen[name], rejected[name]], axis=1) for name in chosen})


def _hashed_share(tokens: np.ndarray) -> float:
    """A number in [0, 1), of the tokens alone: what is on one side of the split stays there."""
    return trajectory.query_id(tokens.tolist()) / 2**64


def _encode(
    path: Path, setting: str, fields: Sequence[str], config: Any, tokenizer: Tokenizer, skipped: dict[str, int]
) -> list[Encoded]:
    """Tokenises a file; adds to `skipped` what the config says is to be left out."""
    kept: list[Encoded] = []
    complaints: dict[str, list[str]] = {"too long": [], "identical": []}
    total = 0
    for row in data.read_lines(path, fields=dict.fromkeys(fields, str), where=f"{setting} {path}"):
        total += 1
        line, example = row.where.removeprefix(f"{setting} {path} "), _encode_line(row, fields, tokenizer)
        if too_long := _excess(example, fields, config):
            complaints["too long"].append(f"{line}: {too_long}")
        elif len(example) > 2 and np.array_equal(example[1], example[2]):
            complaints["identical"].append(line)
        else:
            kept.append(example)
    where = f"of the {total} examples of {setting} {path}"
    long, same = complaints["too long"], complaints["identical"]
    if long and config.long_examples == "refuse":
        raise ValueError(f"{len(long)} {where} are too long, first {long[0]}; raise it, or set data.long_examples=skip")
    if same and config.identical_pairs == "refuse":
        both = f"fields {fields[1]!r} and {fields[2]!r} hold the same text"
        raise ValueError(f"in {len(same)} {where} {both}, first in {same[0]}; set data.identical_pairs=skip to leave them out")
    if not total:
        raise ValueError(f"{setting} {path} holds no examples")
    if not kept:
        raise ValueError(f"none {where} is left: {len(long)} are too long, {len(same)} pairs are identical")
    for reason, lines in complaints.items():
        skipped[reason] += len(lines)
    return kept


def _encode_line(row: data.Row, fields: Sequence[str], tokenizer: Tokenizer) -> Encoded:
    prompt, ids = row[fields[0]], list[list[int]]()
    for field in fields:
        try:
            ids.append(encode_pair(prompt, row[field], tokenizer)[1] if ids else tokenizer.encode(prompt))
        except ValueError as error:
            raise ValueError(f"{row.where}: field {field!r}: {error}") from error
    if not ids[0]:
        raise ValueError(f"{row.where}: field {fields[0]!r} is empty, and the tokenizer puts nothing before it")
    return tuple(np.array(part, np.int32) for part in ids)


def _excess(example: Encoded, fields: Sequence[str], config: Any) -> str:
    """What of an example is longer than it may be; "" if nothing is."""
    limits = [("prompt_length", config.prompt_length)] + [("response_length", config.response_length)] * (len(fields) - 1)
    for ids, field, (setting, limit) in zip(example, fields, limits, strict=True):
        if len(ids) > limit:
            end = ", end of sequence included" if setting == "response_length" else ""
            return f"field {field!r} has {len(ids)} tokens{end}, data.{setting}={limit}"
    return ""
