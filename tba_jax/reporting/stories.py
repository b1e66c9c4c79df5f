"""What pages of the viewer tell of rows: a line of a list, the whole story of one, queries, and texts that are searched for."""

import dataclasses
import time
from collections.abc import Sequence

import numpy as np

from tba_jax.reporting import rows as rows_lib
from tba_jax.reporting import samples
from tba_jax.reporting import tokens as tokens_lib
from tba_jax.reporting.live_run import LiveRun
from tba_jax.reporting.row_filter import Filter
from tba_jax.trajectory import Rows

PAGE = 50
SIBLINGS = 12
# A page may search the texts of rows for so long; the next page goes on from there.
SEARCH_SECONDS = 0.15
_SEARCHED_AT_ONCE = 64
_MOST_TOKENS = 4096  # that a row's page shows
_ROWS_OF_A_POLICY = 8
_WORST_LOOKED_AT = 2000
MOST_POLICIES = 200  # that the page of a query lists


@dataclasses.dataclass(frozen=True, kw_only=True)
class Line:
    """A row in a list. oldest_step, newest_step: of the run that made it. mounted: whether that is another run than this one.

    lost: why it cannot be read; then the texts are "" and the figures are those of the table.
    """

    writer: str
    row: int
    query: str = ""
    prompt: str = ""
    response: str = ""
    reward: float = float("nan")
    oldest_step: int = -1
    newest_step: int = -1
    length: int = 0
    finished: bool = False
    draws: int = 0
    mounted: bool = False
    lost: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Story:
    """All that is known of one row."""

    line: Line
    parts: list[tuple[str, float]]
    settings: list[tuple[str, str]]
    tokens: list[tokens_lib.Token]
    more: int
    policy_sum: float
    ref_sum: float
    steps: list[int]
    info: list[tuple[str, str]]
    not_again: str
    siblings: list[Line]


def lines(run: LiveRun, ids: Sequence[tuple[str, int]]) -> list[Line]:
    """The rows named by (writer, row), in this order."""
    rows, there, lost = run.rows(ids)
    place = {ids[at]: i for i, at in enumerate(there)}
    names = sorted({writer for writer, _ in ids})
    numbers = np.array([names.index(writer) for writer, _ in ids], np.int64)
    counts = run.draws.counts(names, numbers, np.array([row for _, row in ids], np.int64)).tolist() if ids else []
    found = []
    for (writer, row), draws in zip(ids, counts, strict=True):
        if (i := place.get((writer, row))) is None:
            found.append(Line(writer=writer, row=row, draws=draws, lost=lost.get((writer, row), "it cannot be read")))
        else:
            found.append(_line(run, rows, i, writer=writer, draws=draws))
    return found


def _line(run: LiveRun, rows: Rows, i: int, *, writer: str, draws: int) -> Line:
    steps = rows["policy_step"][i, : rows["response_length"][i]]
    return Line(
        writer=writer,
        row=int(rows["row"][i]),
        query=f"{int(rows['query_id'][i]):016x}",
        prompt=run.prompt(rows, i),
        response=run.response(rows, i),
        reward=float(rows["reward"][i]),
        oldest_step=int(steps.min(initial=2**31 - 1)) if len(steps) else -1,
        newest_step=int(steps.max(initial=-1)),
        length=int(rows["response_length"][i]),
        finished=bool(rows["finished"][i]),
        draws=draws,
        mounted=not run.is_own(writer),
    )


def names_of(run: LiveRun, columns: rows_lib.Columns, indices: np.ndarray) -> list[tuple[str, int]]:
    """(writer, row) of rows of the table."""
    return [(run.table.writers[columns.writer[i]], int(columns.row[i])) for i in indices.tolist()]


def worst(run: LiveRun, count: int) -> list[Line]:
    """Some rows of the lowest rewards; among equals, those that a step drew come first, then those of the newest policy."""
    columns = run.columns
    ranked = run.orders.matching(columns, run.table.writers, Filter(order="worst"))
    if not len(ranked):
        return []
    limit = columns.reward[ranked[min(count, len(ranked)) - 1]]
    # Very many rows may share the lowest reward: some of them suffice.
    near = ranked[: int(np.searchsorted(columns.reward[ranked], limit, side="right"))]
    near = np.unique(
        np.concatenate([np.arange(min(count, len(near))), np.linspace(0, len(near) - 1, _WORST_LOOKED_AT).astype(int)])
    )
    some = ranked[near]
    drawn = run.draws.counts(run.table.writers, columns.writer[some], columns.row[some])
    chosen = some[np.lexsort((near, drawn == 0, columns.reward[some]))[:count]]
    return lines(run, names_of(run, columns, chosen))


def search(run: LiveRun, columns: rows_lib.Columns, matching: np.ndarray, asked: Filter) -> tuple[list[tuple[str, int]], int]:
    """Looks for the text of a filter in rows, in their order, from `asked.at` on, until a page is full or time is up.

    Returns:
      (writer, row) of those that have it; and how many rows of the order have been searched, `asked.at` included.
    """
    wanted, deadline, at = asked.text.casefold(), time.monotonic() + SEARCH_SECONDS, asked.at
    found: list[tuple[str, int]] = []
    while at < len(matching):
        rows, there, _ = run.rows(ids := names_of(run, columns, matching[at : at + _SEARCHED_AT_ONCE]))
        for i, place in enumerate(there):
            if wanted in f"{run.prompt(rows, i)}\n{run.response(rows, i)}".casefold():
                found.append(ids[place])
                if len(found) == PAGE:
                    return found, at + place + 1
        at += len(ids)
        if time.monotonic() > deadline:
            break
    return found, min(at, len(matching))


def story(run: LiveRun, writer: str, row: int) -> Story:
    """All about one row. Raises ValueError where it cannot be read, or there is no such writer."""
    rows, there, lost = run.rows([(writer, row)])
    if not there and not run.is_known(writer):
        raise ValueError(f"the run has no writer {writer[:100]}")
    if not there:
        raise ValueError(f"row {writer}:{row} cannot be read: {lost.get((writer, row), 'it is not there')}")
    steps = run.draws.steps_of(writer, row)
    line = _line(run, rows, 0, writer=writer, draws=len(steps))
    source = samples.Source(
        reader=run.reader,
        table=run.table,
        draws=run.draws,
        tokenizer=run.tokenizer,
        snapshots=run.snapshots(),
        newest_step=run.newest_step(),
    )
    settings = ("temperature", "top_k", "top_p", "min_p", "reward_version")
    shown = tokens_lib.tokens(rows, 0, run.pieces, newest_step=run.newest_step(), limit=_MOST_TOKENS)
    return Story(
        line=line,
        parts=[*zip(run.contract.reward_parts, rows["reward_parts"][0].tolist(), strict=True)],
        settings=[
            *((name.replace("_", " "), f"{rows[name][0]:g}") for name in settings),
            ("random key", " ".join(f"{int(word):08x}" for word in rows["key"][0])),
            ("reference policy", f"{int(rows['reference_id'][0]):016x}" if rows["reference_id"][0] else "none"),
        ],
        tokens=shown,
        more=line.length - len(shown),
        policy_sum=float(rows["policy_logprobs"][0, : line.length].sum()),
        ref_sum=float(rows["ref_logprobs"][0, : line.length].sum()),
        steps=steps,
        info=[(str(name), str(value)[:300]) for name, value in run.writer_info(writer).items()],
        not_again=samples.not_again(source, writer, line.oldest_step, line.newest_step),
        siblings=lines(run, _siblings(run, rows, writer, row)),
    )


def _siblings(run: LiveRun, rows: Rows, writer: str, row: int) -> list[tuple[str, int]]:
    """The rows of the same query that the writer sampled nearest to this one."""
    columns = run.columns
    if writer not in run.table.writers:
        return []
    mine = columns.writer == run.table.writers.index(writer)
    others = np.flatnonzero(mine & (columns.query_id == rows["query_id"][0]) & (columns.row != row))
    nearest = np.sort(others[np.argsort(np.abs(columns.row[others] - row), kind="stable")[:SIBLINGS]])
    return sorted(names_of(run, columns, nearest))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Query:
    """What all rows of a query have in common. text: of the prompt, "" where no row of it can be read."""

    query: str
    text: str
    rows: int
    mean: float
    least: float
    greatest: float
    newest_step: int  # of this run's policies, -1 where all rows are of mounted runs


QUERY_ORDERS = {"hardest": "lowest mean reward first", "easiest": "highest mean reward first", "spread": "most disagreeing first",
                "rows": "most rows first"}  # fmt: skip


def queries(run: LiveRun, order: str, page: int) -> tuple[list[Query], int]:
    """A page of queries, and how many queries there are."""
    columns = run.columns
    by_query = np.argsort(columns.query_id, kind="stable")
    ids = columns.query_id[by_query]
    begins = np.flatnonzero(np.append(True, ids[1:] != ids[:-1])) if len(ids) else np.zeros(0, np.int64)
    if not len(begins):
        return [], 0
    rewards = columns.reward[by_query]
    counts = np.diff(np.append(begins, len(ids)))
    mean = np.add.reduceat(rewards.astype(np.float64), begins) / counts
    least, greatest = np.minimum.reduceat(rewards, begins), np.maximum.reduceat(rewards, begins)
    newest = np.maximum.reduceat(columns.newest_step[by_query], begins)
    keys = {
        "hardest": (-counts, mean),
        "easiest": (-counts, -mean),
        "spread": (-counts, least - greatest),
        "rows": (mean, -counts),
    }
    chosen = np.lexsort(keys[order])[(page - 1) * PAGE : page * PAGE]
    examples = []
    for group in chosen.tolist():  # the newest row is the last that retention removes
        mine = by_query[begins[group] : begins[group] + counts[group]]
        examples.append(mine[np.argmax(columns.newest_step[mine])])
    names = names_of(run, columns, np.array(examples, np.int64))
    rows, there, _ = run.rows(names)
    texts = {place: run.prompt(rows, i) for i, place in enumerate(there)}
    found = [
        Query(
            query=f"{int(ids[begins[group]]):016x}",
            text=texts.get(i, ""),
            rows=int(counts[group]),
            mean=float(mean[group]),
            least=float(least[group]),
            greatest=float(greatest[group]),
            newest_step=int(newest[group]),
        )
        for i, group in enumerate(chosen.tolist())
    ]
    return found, len(begins)


def of_query(run: LiveRun, query: str) -> tuple[list[tuple[int, int, float]], dict[int, np.ndarray]]:
    """The rows of a query by the policy that sampled them, ascending: (policy step, rows, mean reward), and policy step -> table
    indices. Rows of mounted runs share the step -1."""
    columns = run.columns
    mine = np.flatnonzero(columns.query_id == np.uint64(int(query, 16)))
    mine = mine[np.argsort(columns.newest_step[mine], kind="stable")]
    steps, begins = np.unique(columns.newest_step[mine], return_index=True)
    groups = dict(zip(steps.tolist(), np.split(mine, begins[1:]), strict=True)) if len(mine) else {}
    return [(step, len(each), float(columns.reward[each].mean())) for step, each in groups.items()], groups


def listed(summary: Sequence[tuple[int, int, float]], chosen: Sequence[int]) -> list[tuple[int, int, float]]:
    """Returns at most MOST_POLICIES of the policies in `summary`, evenly spaced, and the chosen steps."""
    places = np.linspace(0, len(summary) - 1, min(len(summary), MOST_POLICIES)).astype(int).tolist()
    kept = {summary[place][0] for place in places} | {*chosen}
    return [policy for policy in summary if policy[0] in kept]


def of_policy(run: LiveRun, indices: np.ndarray) -> list[Line]:
    """Some rows of one policy and query, the lowest and the highest rewards."""
    columns = run.columns
    ranked = indices[np.argsort(columns.reward[indices], kind="stable")]
    half = _ROWS_OF_A_POLICY // 2
    some = ranked if len(ranked) <= _ROWS_OF_A_POLICY else np.concatenate([ranked[:half], ranked[-half:]])
    return lines(run, names_of(run, columns, some))
