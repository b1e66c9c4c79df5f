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
    """The examples of a run. skipped: number of examples left out of both splits."""

    train: list[Encoded]
    heldout: list[Encoded]
    skipped: int

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
    """Reads what the section `data` names, for OBJECTIVES' `kind`. Raises ValueError: a sentence with file, line and field, or
    about examples that do not fit."""
    train, skipped = _read("train", config, kind, tokenizer)
    if config.heldout:
        heldout, more = _read("heldout", config, kind, tokenizer)
        return Data(train=train, heldout=heldout, skipped=skipped + more)
    # Examples of one prompt stand on one side, unless there is no other (attacks of red-teaming, say). A hash of the tokens alone
    # chooses, so that an example stays on its side in a longer file.
    several = any(not np.array_equal(example[0], train[0][0]) for example in train)
    tokens = [(example[0] if several else np.concatenate(example)).tolist() for example in train]
    held = [trajectory.query_id(ids) / 2**64 < config.heldout_share for ids in tokens]
    sides = {side: [example for example, is_held in zip(train, held, strict=True) if is_held == side] for side in (False, True)}
    if not all(sides.values()):
        raise ValueError(
            f"data.heldout_share={config.heldout_share} splits the examples of data.train {config.train} into "
            f"{len(sides[False])} to train on and {len(sides[True])} held out; change it, give more examples, or name a file in "
            "data.heldout"
        )
    return Data(train=sides[False], heldout=sides[True], skipped=skipped)


def make_batch(examples: Sequence[Encoded], *, rows: int, prompt_length: int, response_length: int, pad_id: int) -> Batch:
    """Pads examples to `rows` rows: rows beyond them count nothing (see objectives.Examples)."""
    filling = rows - len(examples)
    prompts = [*(example[0].tolist() for example in examples), *[[pad_id]] * filling]
    lengths = dict(prompt_length=prompt_length, response_length=response_length)
    by_answer = [
        trajectory.token_columns(prompts, [*responses, *[[]] * filling], **lengths, pad_id=pad_id)
        for responses in zip(*(example[1:] for example in examples), strict=True)
    ]
    if len(by_answer) == 1:
        return Examples(**by_answer[0])
    chosen, rejected = by_answer
    return Preferences(**{name: np.stack([chosen[name], rejected[name]], axis=1) for name in chosen})


def _read(name: str, config: Any, kind: str, tokenizer: Tokenizer) -> tuple[list[Encoded], int]:
    """The examples of data.NAME, and how many were left out."""
    setting = f"data.{name} {config[name]}"
    answers = (config.response_field,) if kind == "sft" else (config.chosen_field, config.rejected_field)
    fields = (config.prompt_field, *answers)
    kept: list[Encoded] = []
    unfit: list[str] = []
    for row in data.read_lines(Path(config[name]), fields=dict.fromkeys(fields, str), where=setting):
        example = _encode(row, fields, tokenizer)
        if why := _misfit(example, fields, config):
            unfit.append(f"{row.where.removeprefix(f'{setting} ')}: {why}")
        else:
            kept.append(example)
    if not kept and not unfit:
        raise ValueError(f"{setting} holds no examples")
    if not kept or (unfit and config.unfit == "refuse"):
        advice = "" if config.unfit == "skip" else "; data.unfit=skip leaves such examples out"
        raise ValueError(
            f"{len(unfit)} of the {len(unfit) + len(kept)} examples of {setting} are unfit, first {unfit[0]}{advice}"
        )
    return kept, len(unfit)


def _encode(row: data.Row, fields: Sequence[str], tokenizer: Tokenizer) -> Encoded:
    prompt, ids = row[fields[0]], list[list[int]]()
    for field in fields:
        try:
            ids.append(encode_pair(prompt, row[field], tokenizer)[1] if ids else tokenizer.encode(prompt))
        except ValueError as error:
            raise ValueError(f"{row.where}: field {field!r}: {error}") from error
    if not ids[0]:
        raise ValueError(f"{row.where}: field {fields[0]!r} is empty, and the tokenizer puts nothing before it")
    return tuple(np.array(part, np.int32) for part in ids)


def _misfit(example: Encoded, fields: Sequence[str], config: Any) -> str:
    """Why nothing can be learned of an example; "" if something can."""
    limits = [("prompt_length", config.prompt_length)] + [("response_length", config.response_length)] * (len(fields) - 1)
    for ids, field, (setting, limit) in zip(example, fields, limits, strict=True):
        if len(ids) > limit:
            end = ", end of sequence included" if setting == "response_length" else ""
            return f"field {field!r} has {len(ids)} tokens{end}, data.{setting}={limit}"
    same = len(example) > 2 and np.array_equal(example[1], example[2])
    return f"fields {fields[1]!r} and {fields[2]!r} hold the same text" if same else ""
