"""The queries of one searcher, in an order of its own: all of them pass after pass, or those that are neither easy nor hard.

What a searcher takes is a function of the run's seed, its writer id, and how many queries it has taken; under
searchers.prompt_selection=posterior also of the counts that lie beside its policy. A row needs none of this to be made again.
"""

import hashlib
import logging
import uuid
from collections.abc import Sequence
from typing import Any

import numpy as np

from tba_jax import trajectory
from tba_jax.replay import success_counts
from tba_jax.storage import published
from tba_jax.storage.places import Place
from tba_jax.tasks.interface import EncodedQuery

log = logging.getLogger(__name__)


def _key(seed: int, writer: int, number: int) -> np.ndarray:
    """uint64[2]. A list would become float64 from 2^63 on, and lose the number. Args: all of them below 2^32."""
    return np.array([seed, (writer << 32) | number], np.uint64)


def query_order(count: int, *, seed: int, writer: int, epoch: int) -> np.ndarray:
    """int64[count]: the order in which a searcher takes the queries in its pass `epoch` over them."""
    return np.random.Generator(np.random.Philox(key=_key(seed, writer, epoch))).permutation(count)


def chosen_queries(
    successes: np.ndarray,
    trials: np.ndarray,
    *,
    size: int,
    candidates: int,
    target: float,
    seed: int,
    writer: int,
    batch: int,
) -> np.ndarray:
    """The queries of a searcher's batch, by posterior success rates (MoPPS, arXiv 2507.04632, Thompson sampling and top-B).

    Of `candidates` · `size` queries, drawn at random without replacement, those `size` are taken whose
    γ ~ Beta(1 + successes, 1 + trials − successes) is nearest to γ* = `target`.

    Args: successes, trials: float64[n] of all queries. writer: see `writer_number`; batch: how many the searcher has taken
    before. Returns int64[size], the nearest first, distinct unless n < size: then all of them again and again.
    """
    # The counter keeps these numbers apart from those of query_order.
    rng = np.random.Generator(np.random.Philox(counter=[0, 0, 0, 1], key=_key(seed, writer, batch)))
    among = rng.permutation(len(trials))[: candidates * size]
    rates = rng.beta(1 + successes[among], 1 + trials[among] - successes[among])
    nearest = among[np.argsort((rates - target) ** 2, kind="stable")]
    return np.resize(nearest, max(size, len(nearest)))[:size]


def writer_id(name: str) -> str:
    """A new id of a searcher's log: no two lives of a searcher write to the same. Args: name: of the searcher."""
    return f"{name}-{uuid.uuid4().hex[:8]}"


def writer_number(writer: str) -> int:
    """uint32 that stands for a writer id in random keys."""
    return int.from_bytes(hashlib.blake2b(writer.encode(), digest_size=4).digest(), "little")


class QueryStream:
    """Pass after pass over the queries. taken: how many queries it has given so far."""

    def __init__(self, queries: Sequence[EncodedQuery], *, seed: int, writer: int):
        self._queries, self._seed, self._writer = queries, seed, writer
        self._size = len(queries)  # of what is ordered at a time
        self.taken = 0

    def look(self, step: int) -> None:
        """Called when the policy of a step is taken up, which may be in another thread. The order does not depend on it."""

    def _next_order(self, number: int) -> np.ndarray:
        return query_order(self._size, seed=self._seed, writer=self._writer, epoch=number)

    def __next__(self) -> EncodedQuery:
        number, position = divmod(self.taken, self._size)
        if position == 0:
            self._order = self._next_order(number)
        self.taken += 1
        return self._queries[self._order[position]]


class SelectedQueries(QueryStream):
    """Batch after batch of the queries that `chosen_queries` takes, by the newest counts that it has seen.

    Before it has seen any, and for queries that nobody has counted, every success rate is as likely as any other.
    """

    def __init__(self, queries: Sequence[EncodedQuery], policies: Place, *, config: Any, writer: int):
        """Args: policies: where the snapshots are."""
        super().__init__(queries, seed=config.seed, writer=writer)
        s = config.searchers
        self._policies, self._size = policies, s.queries_per_batch
        self._settings = dict(size=self._size, candidates=s.prompt_candidates, target=s.target_success_rate)
        self._ids = np.array([trajectory.query_id(query.prompt) for query in queries], np.uint64)
        self._counts = np.zeros(len(queries)), np.zeros(len(queries))
        self._told = False

    def look(self, step: int) -> None:
        """Takes up the counts beside the policy of a step. Without them, or where they are damaged, the last ones stay."""
        try:
            self._counts = success_counts.read(published.kept(self._policies)[step]).of(self._ids)
        except (FileNotFoundError, KeyError, ValueError) as error:  # the snapshot may also have been removed meanwhile
            there_is = (
                f"cannot be read: {error}" if isinstance(error, ValueError) else "are not there: the trainer publishes them"
            )
            if not self._told:
                told = "searchers.prompt_selection=posterior goes on with the counts that it has: those of step %d %s"
                log.warning(told, step, there_is)
            self._told = True

    def _next_order(self, number: int) -> np.ndarray:
        return chosen_queries(*self._counts, seed=self._seed, writer=self._writer, batch=number, **self._settings)


def make(config: Any, queries: Sequence[EncodedQuery], policies: Place, *, writer: int) -> QueryStream:
    """The stream that the config of a searcher names. Args: policies: where the snapshots are; writer: see `writer_number`."""
    if config.searchers.prompt_selection == "uniform":
        return QueryStream(queries, seed=config.seed, writer=writer)
    return SelectedQueries(queries, policies, config=config, writer=writer)


class Quota:
    """Counts the queries that were asked since the newest snapshot, or since the trainer's last grant, in whole batches."""

    def __init__(self, *, max_rows: int, queries_per_batch: int, samples_per_query: int):
        """Args: max_rows: searchers.max_rows_per_snapshot, 0 = no limit."""
        self._limit = -(-max_rows // (queries_per_batch * samples_per_query)) * queries_per_batch if max_rows else None
        self._asked = 0
        self._grants: int | None = None  # their number when the searcher began to wait

    @property
    def is_left(self) -> bool:
        """Whether another query may be asked."""
        return self._limit is None or self._asked < self._limit

    def ask(self) -> None:
        """Another query is asked."""
        self._asked += 1

    def renew(self) -> None:
        """A newer snapshot has come."""
        self._asked, self._grants = 0, None

    def wait(self, grants: int) -> bool:
        """Called while the searcher waits. Returns whether it is let go on, by a grant that was given since it began to wait: an
        earlier one may be for the very rows that this searcher was generating.

        Args: grants: how many the run has had.
        """
        if self._grants is None:
            self._grants = grants
        if grants == self._grants:
            return False
        self.renew()
        return True
