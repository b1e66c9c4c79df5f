"""The rows that a report shows: which ones, their tokens, and the steps that trained on them."""

import codecs
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tba_jax.reporting import rows as rows_lib
from tba_jax.reporting.gathering import Gathered
from tba_jax.text.tokenizers import Tokenizer
from tba_jax.text.visible import visible
from tba_jax.trajectory import response

MOST_TOKENS, MOST_PROMPT, MOST_STEPS = 400, 3000, 12  # of a row: tokens of the response, characters, steps that drew it
ROWS_EACH, RANDOM_ROWS, QUERIES, POLICY_STEPS = 12, 24, 6, 8


def chosen(rows: np.ndarray, counts: np.ndarray) -> dict[str, list[int]]:
    """Group -> indices of rows, first to show first.

    `worst` and `best` are by reward; of equal rewards, rows that a step drew come first, then the newest; different queries come
    first. `disagreeing` has the best and the worst row of the queries whose rewards differ most. `random` is drawn evenly, by a
    fixed seed. `steps` has three random rows of policy steps that divide the run evenly.

    Args: rows: FIGURES[n]; counts: int[n], how often steps drew each row.
    """
    if not len(rows):
        return {}
    rng = np.random.default_rng(0)
    age, undrawn = -rows["newest_step"].astype(np.int64), counts == 0
    groups = {}
    for name, reward in (("worst", rows["reward"]), ("best", -rows["reward"])):
        limit = np.partition(reward, min(len(rows), 4096) - 1)[min(len(rows), 4096) - 1]
        near = np.flatnonzero(~(reward > limit))  # with rows that have no reward
        near = near[np.lexsort((age[near], undrawn[near], reward[near]))][:4096]
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
    if not len(there):
        return []
    order = there[np.lexsort((undrawn[there], rows["reward"][there], rows["query_id"][there]))]
    reward, ids = rows["reward"][order], rows["query_id"][order]
    begins = np.flatnonzero(np.append(True, ids[1:] != ids[:-1]))
    ends = np.append(begins[1:], len(ids))
    spread = reward[ends - 1] - reward[begins]
    found = [query for query in np.argsort(-spread, kind="stable")[:QUERIES] if spread[query] > 1e-6]
    return [int(order[place]) for query in found for place in (ends[query] - 1, begins[query])]


class Pieces:
    """Splits token ids into the texts that they add, without a vocabulary's markers of spaces and bytes."""

    def __init__(self, tokenizer: Tokenizer | None):
        """Args: tokenizer: None: the run's cannot be read here, and a token's text is its number."""
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
    wanted = [int(i) for i in dict.fromkeys(indices)]
    ids = [table.name(int(table.rows["key"][i])) for i in wanted]
    rows, there, lost = rows_lib.read_some(table.reader, ids)
    found.problems += lost[:5]
    newest, oldest = rows_lib.steps_of_rows(rows)
    draws = table.draws_of(table.rows["key"][wanted].tolist())
    audit = f"python -m tba_jax audit --workdir={shlex.quote(found.called)}"
    shown = {}
    for i, place in enumerate(there):
        index, (writer, row) = wanted[place], ids[place]
        steps = draws[int(table.rows["key"][index])]
        shown[index] = {
            "name": f"{writer}:{row}",
            "query": f"{int(rows['query_id'][i]):016x}",
            "prompt": prompt_text(rows, i, found.tokenizer, pieces),
            **_tokens(rows, i, pieces),
            "reward": _number(rows["reward"][i]),
            "parts": [*zip(table.reader.shape.reward_parts, map(_number, rows["reward_parts"][i]), strict=True)],
            "finished": bool(rows["finished"][i]),
            "length": int(rows["response_length"][i]),
            "newest": int(newest[i]),
            "oldest": int(oldest[i]),
            "ratio": _number(table.rows["log_ratio"][index]),
            "steps": steps[:MOST_STEPS],
            "draws": len(steps),
            "mounted": not table.reader.is_own(writer),
            "again": f"{audit} --regenerate={shlex.quote(f'{writer}:{row}')}",
        }
    return shown


def _tokens(rows: Mapping[str, np.ndarray], i: int, pieces: Pieces) -> dict[str, Any]:
    """tokens: [text, log π_θ/π_ref in nats, policy step] each, MOST_TOKENS at most; more: how many tokens follow."""
    ids = response(rows, i)[: rows["policy_step"].shape[1]]  # a trainer refuses rows whose length is wrong
    ratios = (rows["policy_logprobs"][i] - rows["ref_logprobs"][i])[: len(ids)]
    texts = pieces.texts(ids[:MOST_TOKENS].tolist())
    found = [
        [text, _number(ratio, "{:.3f}"), int(step)]
        for text, ratio, step in zip(texts, ratios[:MOST_TOKENS], rows["policy_step"][i, :MOST_TOKENS][: len(texts)], strict=True)
    ]
    return {"tokens": found, "more": max(0, len(ids) - MOST_TOKENS)}


def _number(value: float, form: str = "{:.6g}") -> float | None:
    return float(form.format(value)) if np.isfinite(value) else None


def prompt_text(rows: Mapping[str, np.ndarray], i: int, tokenizer: Tokenizer | None, pieces: Pieces) -> str:
    """The visible text of a row's prompt, without its middle where it is very long."""
    ids = rows["tokens"][i, : rows["prompt_length"][i]].tolist()
    if tokenizer is None:
        text = "".join(pieces.texts(ids))
    else:
        text = visible(tokenizer.decode([each for each in ids if 0 <= each < tokenizer.vocab_size]))
    return text if len(text) <= MOST_PROMPT else f"{text[: MOST_PROMPT // 2]} … {text[-MOST_PROMPT // 2 :]}"
