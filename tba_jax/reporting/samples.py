"""The rows that a report shows: which ones, their tokens, and the steps that trained on them."""

import codecs
import shlex
from collections.abc import Sequence
from typing import Any

import numpy as np

from tba_jax.reporting.gathering import Gathered
from tba_jax.reporting.rows import steps_of_rows
from tba_jax.storage.places import STORAGE_ERRORS
from tba_jax.text.tokenizers import Tokenizer
from tba_jax.text.visible import visible
from tba_jax.trajectory import Rows, response

MOST_TOKENS, MOST_PROMPT, MOST_STEPS = 400, 3000, 12  # of a row: tokens of the response, characters, steps that drew it
ROWS_EACH, RANDOM_ROWS, QUERIES, POLICY_STEPS = 12, 24, 6, 8


def chosen(rows: np.ndarray, counts: np.ndarray) -> dict[str, list[int]]:
    """Group -> indices of rows, first to show first. Args: rows: FIGURES[n]; counts: int[n], how often steps drew each row.

    `worst` and `best` are by reward, then drawn rows, then the newest; different queries come first. `disagreeing` has the best
    and the worst row of the queries whose rewards differ most. `random` is drawn evenly. `steps` has three random rows of each of
    some policy steps.
    """
    if not len(rows):
        return {}
    rng = np.random.default_rng(0)
    age, undrawn = -rows["newest_step"].astype(np.int64), counts == 0
    groups = {}
    for name, reward in (("worst", rows["reward"]), ("best", -rows["reward"])):
        near = np.lexsort((age, undrawn, reward))[:4096]
        first = np.sort(np.unique(rows["query_id"][near], return_index=True)[1])
        groups[name] = near[[*first, *np.setdiff1d(np.arange(len(near)), first)][:ROWS_EACH]].tolist()
    groups["disagreeing"] = _disagreeing(rows, undrawn)
    groups["random"] = sorted(rng.choice(len(rows), min(len(rows), RANDOM_ROWS), replace=False).tolist(), key=age.__getitem__)
    steps = np.unique(rows["newest_step"][rows["newest_step"] >= 0])
    groups["steps"] = []
    for step in steps[np.unique(np.linspace(0, len(steps) - 1, POLICY_STEPS).astype(int))] if len(steps) else ():
        mine = np.flatnonzero(rows["newest_step"] == step)
        groups["steps"] += rng.choice(mine, min(len(mine), 3), replace=False).tolist()
    return groups


def _disagreeing(rows: np.ndarray, undrawn: np.ndarray) -> list[int]:
    there = np.flatnonzero(np.isfinite(rows["reward"]))
    order = there[np.lexsort((undrawn[there], rows["reward"][there], rows["query_id"][there]))]
    reward, ids = rows["reward"][order], rows["query_id"][order]
    begins = np.flatnonzero(np.append(True, ids[1:] != ids[:-1])[: len(ids)])
    ends = np.append(begins[1:], len(ids))[: len(begins)]
    spread = reward[ends - 1] - reward[begins]
    found = [query for query in np.argsort(-spread, kind="stable")[:QUERIES] if spread[query] > 1e-6]
    return [int(order[place]) for query in found for place in (ends[query] - 1, begins[query])]


class Pieces:
    """The text that each token adds, without a vocabulary's markers of spaces and bytes."""

    def __init__(self, tokenizer: Tokenizer | None):
        """Args: tokenizer: None: a token's text is its number."""
        self._bytes = [] if tokenizer is None else tokenizer.token_bytes()
        self._special = frozenset(() if tokenizer is None else tokenizer.special_ids)
        self._names = {} if tokenizer is None else {tokenizer.pad_id: "⟨padding⟩", tokenizer.eos_id: "⟨end⟩"}

    def texts(self, ids: Sequence[int]) -> list[str]:
        """The visible text of each id. The token that completes a character has its text, where several share it."""
        decoder, found = codecs.getincrementaldecoder("utf-8")("replace"), []
        for each in map(int, ids):
            content = self._bytes[each] if 0 <= each < len(self._bytes) else None
            if each in self._special or content is None:
                name = self._names.get(each) or ("" if content is None else content.decode(errors="replace")) or f"⟨{each}⟩"
                # A character that a special token interrupts stays unfinished.
                found.append(decoder.decode(b"", final=True) + visible(name))
                decoder.reset()
            else:
                found.append(visible(decoder.decode(content)))
        if rest := decoder.decode(b"", final=True):
            found[-1] += rest
        return found


def made(found: Gathered, indices: Sequence[int]) -> dict[int, dict[str, Any]]:
    """Index into `found.table.rows` -> the row as the page shows it; what cannot be read is named in `found.problems`."""
    table, pieces = found.table, Pieces(found.tokenizer)
    keys = {int(i): int(table.rows["key"][i]) for i in indices}
    draws = table.draws_of([*keys.values()])
    audit = f"python -m tba_jax audit --workdir={shlex.quote(found.called)}"
    shown: dict[int, dict[str, Any]] = {}
    lost = 0
    for index, key in keys.items():
        writer, row = table.name(key)
        try:
            rows = table.reader.read_ids([(writer, row)])
        except STORAGE_ERRORS as error:
            lost += 1
            if lost <= 5:
                found.problems.append(f"row {writer}:{row} is not shown: {error}")
            continue
        newest, oldest = steps_of_rows(rows)
        shown[index] = {
            "name": f"{writer}:{row}",
            "query": f"{int(rows['query_id'][0]):016x}",
            "prompt": _prompt(rows, found.tokenizer, pieces),
            **_tokens(rows, pieces),
            "reward": _number(rows["reward"][0]),
            "parts": [*zip(table.reader.shape.reward_parts, map(_number, rows["reward_parts"][0]), strict=True)],
            "finished": bool(rows["finished"][0]),
            "length": int(rows["response_length"][0]),
            "newest": int(newest[0]),
            "oldest": int(oldest[0]),
            "ratio": _number((rows["policy_logprobs"] - rows["ref_logprobs"]).sum(dtype=np.float64)),
            "steps": draws[key][:MOST_STEPS],
            "draws": len(draws[key]),
            "mounted": not table.reader.is_own(writer),
            "again": f"{audit} --regenerate={shlex.quote(f'{writer}:{row}')}",
        }
    return shown


def _tokens(rows: Rows, pieces: Pieces) -> dict[str, Any]:
    """tokens: [text, log π_θ/π_ref in nats, policy step] each, MOST_TOKENS at most; more: how many tokens follow."""
    steps = rows["policy_step"][0].tolist()
    ids = response(rows, 0)[: len(steps)]  # a trainer refuses rows whose length is wrong
    ratios = (rows["policy_logprobs"][0] - rows["ref_logprobs"][0]).tolist()
    texts = pieces.texts(ids[:MOST_TOKENS].tolist())
    found = [[text, _number(ratio, "{:.3f}"), step] for text, ratio, step in zip(texts, ratios, steps, strict=False)]
    return {"tokens": found, "more": max(0, len(ids) - MOST_TOKENS)}


def _number(value: float, form: str = "{:.6g}") -> float | None:
    return float(form.format(value)) if np.isfinite(value) else None


def _prompt(rows: Rows, tokenizer: Tokenizer | None, pieces: Pieces) -> str:
    """The visible text of the prompt, without its middle where it is very long."""
    ids = rows["tokens"][0, : rows["prompt_length"][0]].tolist()
    if tokenizer is None:
        text = "".join(pieces.texts(ids))
    else:
        text = visible(tokenizer.decode([each for each in ids if 0 <= each < tokenizer.vocab_size]))
    return text if len(text) <= MOST_PROMPT else f"{text[: MOST_PROMPT // 2]} … {text[-MOST_PROMPT // 2 :]}"
