"""How often responses to each query succeed: the counts behind prompt selection (MoPPS, arXiv 2507.04632).

The trainer, which reads each row once, counts. It publishes the counts beside each policy snapshot, where searchers read them.
"""

import collections
import dataclasses
import io
import zipfile
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tba_jax.storage import layout
from tba_jax.storage.places import Place

# The name of the file beside the parameters of a snapshot.
FILE = "success_counts.npz"
# Queries that are counted at most. The one whose last visit is the oldest is forgotten for a new one.
MOST_QUERIES = 1 << 18

_Entry = tuple[float, float, float, float]


@dataclasses.dataclass(frozen=True)
class QueryCounts:
    """Discounted counts of queries as they are published.

    query_id: uint64[n], ascending. successes, trials: float64[n], see SuccessCounts.
    """

    query_id: np.ndarray
    successes: np.ndarray
    trials: np.ndarray

    def of(self, query_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(successes, trials) float64[m] of queries, 0 where nothing is counted. Args: query_ids: uint64[m]."""
        if not len(self.query_id):
            return np.zeros(len(query_ids)), np.zeros(len(query_ids))
        at = np.minimum(np.searchsorted(self.query_id, query_ids), len(self.query_id) - 1)
        counted = self.query_id[at] == query_ids
        return np.where(counted, self.successes[at], 0.0), np.where(counted, self.trials[at], 0.0)

    def to_bytes(self) -> bytes:
        """The content of FILE: an .npz, whose parts have checksums."""
        file = io.BytesIO()
        np.savez(file, query_id=self.query_id, successes=self.successes, trials=self.trials)
        return file.getvalue()


def from_bytes(content: bytes) -> QueryCounts:
    """The counts in the content of FILE. Raises ValueError where that is damaged."""
    names = [field.name for field in dataclasses.fields(QueryCounts)]
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as columns:
            return QueryCounts(*(columns[name] for name in names))
    except (ValueError, KeyError, OSError, EOFError, RuntimeError, zipfile.BadZipFile) as error:
        raise ValueError(f"{FILE} is damaged: {error}") from error


def read(snapshot: Place) -> QueryCounts:
    """The counts beside a snapshot. Args: snapshot: its folder.

    Raises FileNotFoundError: there are none, or the snapshot is gone. ValueError: they are damaged. OSError: the storage failed.
    """
    return from_bytes(layout.read_file(snapshot / FILE))


def told_outside(row: str, reward: float) -> str:
    """The sentence about a row, "WRITER:ROW", whose reward is not within [0, 1], which is refused or not counted."""
    return (
        f"searchers.prompt_selection=posterior counts successes, so every reward must be within [0, 1], and row {row} has the "
        f"reward {reward:g}, which is not counted: scale the task's reward, or set searchers.prompt_selection=uniform"
    )


def first_outside(rewards: np.ndarray) -> int | None:
    """The place of the first reward that is not within [0, 1], None where there is none. NaN, no reward, is not outside."""
    outside = np.flatnonzero((rewards < 0) | (rewards > 1))
    return int(outside[0]) if len(outside) else None


class SuccessCounts:
    """Counts of the responses that searchers of this run sampled.

    A visit of a query is made of its rows in one append of a writer, which follow each other. With λ = `decay`, a visit of k rows
    with rewards r changes the counts of its query so:
        successes ← λ · successes + Σ r
        trials    ← λ · trials + k
    Under the prior Beta(1, 1) the posterior of the success rate is Beta(1 + successes, 1 + trials − successes): α and β of MoPPS.

    Attributes: outside: (row, reward) of the first row whose reward is not within [0, 1]. Such rows are not counted.
    """

    def __init__(self, *, decay: float, most_queries: int = MOST_QUERIES):
        self._decay, self._most_queries = decay, most_queries
        # Query id -> successes, trials, and both of its last visit alone; in the order of the last visits.
        self._counts: collections.OrderedDict[int, _Entry] = collections.OrderedDict()
        # Writer -> the visit of its last row: query id, and number of the append.
        self._last: dict[str, tuple[int, int]] = {}
        self.outside: tuple[str, float] | None = None

    def add(
        self, writer: str, rows: Sequence[int], query_ids: Sequence[int], rewards: Sequence[float], *, rows_per_append: int
    ) -> None:
        """Counts the next valid rows of a writer, in order. Args: one number, query id and finite reward of each row."""
        last = self._last.get(writer)
        for row, query_id, reward in zip(rows, query_ids, rewards, strict=True):
            if not 0 <= reward <= 1:
                self.outside = self.outside or (f"{writer}:{row}", reward)
                continue
            visit = query_id, row // rows_per_append
            if visit != last or query_id not in self._counts:
                self._visit(query_id)
                last = self._last[writer] = visit
            successes, trials, newest, k = self._counts[query_id]
            self._counts[query_id] = successes + reward, trials + 1, newest + reward, k + 1

    def _visit(self, query_id: int) -> None:
        successes, trials, *_ = self._counts.get(query_id, (0.0, 0.0))
        self._counts[query_id] = self._decay * successes, self._decay * trials, 0.0, 0.0
        self._counts.move_to_end(query_id)
        if len(self._counts) > self._most_queries:
            self._counts.popitem(last=False)

    def published(self) -> QueryCounts:
        """The counts by query id."""
        ids, columns = self._columns()
        order = np.argsort(ids)
        return QueryCounts(ids[order], columns[order, 0], columns[order, 1])

    def _columns(self) -> tuple[np.ndarray, np.ndarray]:
        """uint64[n] query ids, and float64[n, 4] their counts."""
        values = np.array(list(self._counts.values()), np.float64).reshape(-1, 4)
        return np.fromiter(self._counts, np.uint64, len(self._counts)), values

    def measure(self) -> tuple[dict[str, float], np.ndarray]:
        """Metrics, and float64[n], successes / trials of each query; ({}, empty) if nothing is counted, or a reward is outside.

        success_rate: the mean of successes / trials. queries_failed, queries_solved, queries_mixed: the shares of the queries of
        whose last visit no response, every response, and anything between succeeded.
        """
        values = self._columns()[1]
        if self.outside is not None or not len(values):
            return {}, np.zeros(0)
        rates = values[:, 0] / values[:, 1]
        failed, solved = values[:, 2] == 0, values[:, 2] == values[:, 3]
        of_kind = {"queries_failed": failed, "queries_mixed": ~(failed | solved), "queries_solved": solved}
        shares = {name: float(queries.mean()) for name, queries in of_kind.items()}
        return {"success_rate": float(rates.mean()), **shares}, rates

    def state(self) -> dict[str, Any]:
        """All that `restore` needs (JSON)."""
        return {
            "decay": self._decay,
            "most_queries": self._most_queries,
            "query_id": list(self._counts),
            "counts": [list(entry) for entry in self._counts.values()],
            "last": {writer: list(visit) for writer, visit in self._last.items()},
            "outside": list(self.outside) if self.outside else [],
        }

    @classmethod
    def restore(cls, state: Mapping[str, Any]) -> "SuccessCounts":
        """The object whose `state` this is."""
        made = cls(decay=state["decay"], most_queries=state["most_queries"])
        entries = zip(state["query_id"], state["counts"], strict=True)
        made._counts.update((query_id, (a, b, c, d)) for query_id, (a, b, c, d) in entries)
        made._last = {writer: (visit[0], visit[1]) for writer, visit in state["last"].items()}
        made.outside = (state["outside"][0], state["outside"][1]) if state["outside"] else None
        return made
