"""The queries of one searcher, in an order of its own: every query comes once before any comes again."""

import hashlib
import uuid
from collections.abc import Sequence

import numpy as np

from tba_jax.tasks.interface import EncodedQuery


def query_order(count: int, *, seed: int, writer: int, epoch: int) -> np.ndarray:
    """int64[count]: the order in which a searcher takes the queries in its pass `epoch` over them."""
    return np.random.Generator(np.random.Philox(key=[seed, (writer << 32) | epoch])).permutation(count)


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
        self._order = np.zeros(0, np.int64)
        self.taken = 0

    def __next__(self) -> EncodedQuery:
        epoch, position = divmod(self.taken, len(self._queries))
        if position == 0:
            self._order = query_order(len(self._queries), seed=self._seed, writer=self._writer, epoch=epoch)
        self.taken += 1
        return self._queries[self._order[position]]
