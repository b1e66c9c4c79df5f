"""Which rows a report shows: the worst, the best, the newest, and those of queries whose responses disagree most in reward."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from tba_jax.replay.reader import LogReader
from tba_jax.reporting import rows as rows_lib
from tba_jax.reporting import tokens
from tba_jax.reporting.draws import Draws
from tba_jax.text.tokenizers import Tokenizer
from tba_jax.text.visible import visible

MOST_TOKENS = 400
MOST_PROMPT = 3000  # characters
MOST_STEPS = 12  # that drew a row
ROWS_EACH = 8
DISAGREEING_QUERIES, ROWS_OF_A_QUERY = 5, 2
_LOOKED_AT = 4096


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    """One row of the page.

    name: WRITER:ROW. tokens: of the response, at most MOST_TOKENS; more: how many follow. steps: that drew the row, at most
    MOST_STEPS; draws: how many there are. oldest_step, newest_step: of the policies that sampled it. not_again: why the row
    cannot be generated again, as half a sentence; "" where it can. mounted: whether the row and its steps are of a mounted run.
    """

    name: str
    query_id: str
    prompt: str
    tokens: list[tokens.Token]
    text: str
    more: int
    reward: float
    parts: list[tuple[str, float]]
    finished: bool
    length: int
    oldest_step: int
    newest_step: int
    log_ratio_sum: float
    steps: list[int]
    draws: int
    not_again: str
    mounted: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
    """title and told: what these rows have in common."""

    title: str
    told: str
    samples: list[Sample]


def chosen(columns: rows_lib.Columns, counts: np.ndarray) -> dict[str, list[int]]:
    """Group -> indices of rows, first to show first. Args: counts: int[n], how often steps drew each row.

    Of equal rewards, the worst and the best begin with rows that a step drew, then with the newest. A group shows different
    queries, as far as there are enough.
    """
    if not len(columns):
        return {}
    age = -columns.newest_step.astype(np.int64)
    undrawn, later = counts == 0, -columns.row
    query = columns.query_id
    groups = {
        "worst": _first((later, age, undrawn, columns.reward), query),
        "best": _first((later, age, undrawn, -columns.reward), query),
        "newest": _first((later, age), query),
    }
    return groups | {"disagreeing": _disagreeing(columns, undrawn)}


def _first(keys: Sequence[np.ndarray], query: np.ndarray) -> list[int]:
    """The indices of the first ROWS_EACH rows by keys, as np.lexsort takes them: of different queries, as far as there are.

    Only rows that can be among the first are sorted.
    """
    count = min(_LOOKED_AT, len(query))
    limit = np.partition(keys[-1], count - 1)[count - 1]
    near = np.flatnonzero(~(keys[-1] > limit))  # with those that have no reward
    near = near[np.lexsort([each[near] for each in keys])][:_LOOKED_AT]
    first_of_query = np.sort(np.unique(query[near], return_index=True)[1])
    others = np.setdiff1d(np.arange(len(near)), first_of_query)
    return near[np.concatenate([first_of_query, others])[:ROWS_EACH]].tolist()


def _disagreeing(columns: rows_lib.Columns, undrawn: np.ndarray) -> list[int]:
    """Rows of the queries with the largest spread of rewards: of each, the worst and the best, those that were drawn first."""
    there = np.flatnonzero(np.isfinite(columns.reward))
    if not len(there):
        return []
    reward = columns.reward.astype(np.float64)
    order = there[np.lexsort((reward[there], columns.query_id[there]))]
    ids = columns.query_id[order]
    begins = np.flatnonzero(np.append(True, ids[1:] != ids[:-1]))
    ends = np.append(begins[1:], len(ids))
    count = ends - begins
    total = np.add.reduceat(reward[order], begins)
    square = np.add.reduceat(reward[order] ** 2, begins)
    deviation = np.sqrt(np.maximum(square / count - (total / count) ** 2, 0.0))
    deviation[count < 2] = 0.0
    found: list[int] = []
    for query in np.argsort(-deviation, kind="stable")[:DISAGREEING_QUERIES]:
        if deviation[query] <= 1e-6:
            break
        mine = order[begins[query] : ends[query]]
        half = min(ROWS_OF_A_QUERY, len(mine)) // 2
        worst = mine[np.lexsort((-columns.newest_step[mine], undrawn[mine], reward[mine]))[:half]]
        best = mine[np.lexsort((-columns.newest_step[mine], undrawn[mine], -reward[mine]))[:half]]
        found += [*best.tolist(), *worst.tolist()]
    return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """What samples are made of. tokenizer: None where it cannot be read here; snapshots: steps whose policies are kept."""

    reader: LogReader
    table: rows_lib.RowTable
    draws: Draws
    tokenizer: Tokenizer | None
    snapshots: Sequence[int]
    newest_step: int


def made(source: Source, columns: rows_lib.Columns, indices: Sequence[int]) -> tuple[dict[int, Sample], list[str]]:
    """Index -> its sample, of all that can be read, and sentences about the others."""
    wanted = sorted(set(indices))
    ids = [(source.table.writers[columns.writer[i]], int(columns.row[i])) for i in wanted]
    rows, places, lost = rows_lib.read_some(source.reader, ids)
    pieces = tokens.Pieces(source.tokenizer)
    found = {}
    for i, place in enumerate(places):
        prompt = rows["tokens"][i, : rows["prompt_length"][i]].tolist()
        length = int(rows["response_length"][i])
        shown = tokens.tokens(rows, i, pieces, newest_step=source.newest_step, limit=MOST_TOKENS)
        index = wanted[place]
        writer, row = ids[place]
        steps = source.draws.steps_of(writer, row)
        oldest, newest = int(columns.oldest_step[index]), int(columns.newest_step[index])
        found[index] = Sample(
            name=f"{writer}:{row}",
            query_id=f"{int(rows['query_id'][i]):016x}",
            prompt=prompt_text(prompt, source.tokenizer, pieces),
            tokens=shown,
            text="".join(token.text for token in shown if not token.special)[:300],
            more=max(0, length - MOST_TOKENS),
            reward=float(rows["reward"][i]),
            parts=[*zip(source.reader.shape.reward_parts, rows["reward_parts"][i].tolist(), strict=True)],
            finished=bool(rows["finished"][i]),
            length=length,
            oldest_step=oldest,
            newest_step=newest,
            log_ratio_sum=float(columns.policy_logprob_sum[index] - columns.ref_logprob_sum[index]),
            steps=steps[:MOST_STEPS],
            draws=len(steps),
            not_again=not_again(source, writer, oldest, newest),
            mounted=not source.reader.is_own(writer),
        )
    return found, [f"row {writer}:{row} is not shown: {why}" for (writer, row), why in list(lost.items())[:5]]


def prompt_text(ids: Sequence[int], tokenizer: Tokenizer | None, pieces: tokens.Pieces) -> str:
    text = (
        "".join(text for text, _ in pieces.texts(ids))
        if tokenizer is None
        else visible(tokenizer.decode([i for i in ids if 0 <= i < tokenizer.vocab_size]))
    )
    return text if len(text) <= MOST_PROMPT else f"{text[: MOST_PROMPT // 2]} … {text[-MOST_PROMPT // 2 :]}"


def not_again(source: Source, writer: str, oldest: int, newest: int) -> str:
    """Why `audit --regenerate` cannot make a row again, as half a sentence; "" where it can."""
    try:
        given = source.reader.info(writer).get("responses")
    except (KeyError, ValueError, OSError):
        given = None
    if given:
        return f"its response was not sampled, it is from {given}"
    if newest < 0:
        return "it has no token"
    if oldest != newest:
        return f"the weights were swapped midway, from step {oldest} to step {newest}"
    if source.reader.is_own(writer) and newest not in source.snapshots:
        return f"the snapshot of step {newest} has been removed"
    return ""
