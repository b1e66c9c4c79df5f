"""The resident rows and their queries as arrays; which rows may be among them, which are merged, how a resume reads them back."""

import array
import collections
import hashlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from rapidfuzz.distance import Levenshtein

from tba_jax.replay import ledger
from tba_jax.replay.ledger import Gap, KnownGaps
from tba_jax.replay.reader import LogCorruption, LogReader, RowsGone
from tba_jax.trajectory import Rows, RowShape, response

_ROWS_PER_READ = 4096
# What ReplayIndex.state says of each resident row.
_OF_ROWS = ("slot", "query", "writer", "row", "arrival", "visible_step", "row_draws")

# (writer number, row) packed in one int64: 2^23 writers, 2^40 rows each.
_ROW_BITS = 40
_BUCKETS = 128  # of token counts, see NearByEdits


class Window:
    """Resident rows in slots, and their queries under query numbers. Freed numbers are reused, the lowest first.

    Arrays over slots (views that end at the highest slot in use so far; a free slot has slot_query −1):
      slot_query: int32      query number
      slot_writer: int32     index into `writers`
      slot_row: int64        sequence number within the writer
      arrival: int64         how many rows were added before; −1 where the slot is free
      visible_step: int64    trainer step at which the row became visible
      row_step: int64        trainer step of the oldest weights that produced a token of the response
      row_draws: int64       times the row was drawn
      reward: float32        the column of the same name

    Arrays over query numbers (0 resident rows where the number is free):
      query_rows: int64      resident rows
      newest_arrival, newest_visible_step, newest_row_step: int64, of the query's newest row
      query_draws: int64     batches that drew the query, counted from the minimum of all queries at the last batch before
                             it came: a late query joins the running round and does not catch up with the earlier ones
      recent_draws: int64    batches that drew the query since the last row that came and stayed
    """

    def __init__(self, shape: RowShape, capacity: int):
        # One slot more than the capacity: a row goes in before the one it displaces goes out.
        slots = capacity + 1
        self.writers: list[str] = []
        self._columns = {name: np.zeros((slots, *row), dtype) for name, (dtype, row) in shape.columns().items()}
        self._slot_query = np.full(slots, -1, np.int32)
        self._slot_writer = np.zeros(slots, np.int32)
        self._arrival = np.full(slots, -1, np.int64)
        self._visible_step, self._row_step, self._row_draws = (np.zeros(slots, np.int64) for _ in range(3))
        self._query_rows, self._query_draws, self._recent_draws = (np.zeros(slots, np.int64) for _ in range(3))
        self._newest_slot = np.zeros(slots, np.int64)
        self._free_slots, self._free_queries = list(range(slots)), list(range(slots))
        self._slot_top = self._query_top = 0
        # The fewest draws of any query as of the last batch: where a new query begins.
        self._round = 0
        # Both ordered by arrival. Resident slot -> (query id, its writer's counts); query id -> its slots.
        self._order: collections.OrderedDict[int, tuple[int, collections.Counter[str]]] = collections.OrderedDict()
        self._groups: dict[int, collections.OrderedDict[int, None]] = {}
        self._query_number: dict[int, int] = {}
        # Query number -> its slots in no order (int32); slot -> its place there.
        self._members: dict[int, array.array[int]] = {}
        self._place = array.array("i", bytes(4 * slots))
        # Trainer step -> resident rows that became visible then; the keys ascend.
        self._rows_of_step: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._order)

    slot_query = property(lambda self: self._slot_query[: self._slot_top])
    slot_writer = property(lambda self: self._slot_writer[: self._slot_top])
    slot_row = property(lambda self: self._columns["row"][: self._slot_top])
    arrival = property(lambda self: self._arrival[: self._slot_top])
    visible_step = property(lambda self: self._visible_step[: self._slot_top])
    row_step = property(lambda self: self._row_step[: self._slot_top])
    row_draws = property(lambda self: self._row_draws[: self._slot_top])
    reward = property(lambda self: self._columns["reward"][: self._slot_top])
    query_rows = property(lambda self: self._query_rows[: self._query_top])
    query_draws = property(lambda self: self._query_draws[: self._query_top])
    recent_draws = property(lambda self: self._recent_draws[: self._query_top])
    newest_arrival = property(lambda self: self._arrival[self._newest_slot[: self._query_top]])
    newest_visible_step = property(lambda self: self._visible_step[self._newest_slot[: self._query_top]])
    newest_row_step = property(lambda self: self._row_step[self._newest_slot[: self._query_top]])

    def recent_since(self, window: int) -> int:
        """The first of the last `window` trainer steps at which any resident row became visible; 0 where there are fewer.

        Steps at which nothing arrived do not count: what a starved trainer calls recent stays until something newer comes.
        """
        return next(itertools.islice(reversed(self._rows_of_step), window - 1, None), 0) if window else np.iinfo(np.int64).max

    def rows_of(self, queries: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """All rows of some queries; the cost grows with their rows, not with the window.

        Args: queries: int[Q], numbers of queries with rows, Q >= 1.

        Returns slots int64[n], ascending within a query; group int64[n], the position in `queries` of each.
        """
        parts = [self._slots_of_query(number) for number in queries.tolist()]
        return np.concatenate(parts).astype(np.int64), np.repeat(np.arange(len(parts)), [len(part) for part in parts])

    def _slots_of_query(self, number: int) -> np.ndarray:
        members = self._members[number]
        # Where a query has much of the window, looking through the window is faster than sorting.
        if 16 * len(members) > self._slot_top:
            return np.flatnonzero(self.slot_query == number)
        return np.sort(np.frombuffer(members, np.int32))

    def mark_drawn(self, slots: np.ndarray) -> None:
        """Counts one batch: every appearance of a row, and every query once. Args: slots: int[B], of resident rows, B >= 1."""
        np.add.at(self._row_draws, slots, 1)
        queries = np.unique(self._slot_query[slots])
        self._query_draws[queries] += 1
        self._recent_draws[queries] += 1
        self._round = int(self.query_draws[self.query_rows > 0].min(initial=np.iinfo(np.int64).max))

    def gather(self, slots: np.ndarray) -> Rows:
        """Copies of the rows in `slots` (int[B]), in that order."""
        return {name: column[slots] for name, column in self._columns.items()}

    def ids(self, slots: np.ndarray) -> list[tuple[str, int]]:
        """(writer, row) of the rows in `slots`."""
        writers, rows = self._slot_writer[slots].tolist(), self._columns["row"][slots].tolist()
        return [(self.writers[writer], row) for writer, row in zip(writers, rows, strict=True)]

    def slots_of(self, ids: Sequence[tuple[str, int]]) -> np.ndarray:
        """int64[len(ids)], the slot of each (writer, row); −1 where the row is not resident. Costs a sort of the window."""
        numbers = {writer: number for number, writer in enumerate(self.writers)}
        wanted = np.array([numbers.get(writer, -1) << _ROW_BITS | row for writer, row in ids], np.int64)
        resident = np.flatnonzero(self.slot_query >= 0)
        keys = self.slot_writer[resident].astype(np.int64) << _ROW_BITS | self.slot_row[resident]
        if not len(resident):
            return np.full(len(ids), -1, np.int64)
        order = np.argsort(keys)
        found = order[np.minimum(np.searchsorted(keys, wanted, sorter=order), len(order) - 1)]
        return np.where(keys[found] == wanted, resident[found], -1)


class Lost:
    """Resident rows that the log does not give back. known: gaps of the journal; new: those that were found now."""

    def __init__(self, known: KnownGaps):
        self.known = known
        self._known_rows: list[Gap] = []
        self._new_rows: list[Gap] = []
        self._unreadable: dict[str, list[Gap]] = {}

    @property
    def has_any(self) -> bool:
        return bool(self._unreadable or self.known)

    def holds(self, writer: str, row: int) -> bool:
        """Whether a row is lost; it is counted then."""
        if self.known.within(writer, row, row + 1):
            self._known_rows.append(Gap(writer, row, row + 1, "damaged"))
            return True
        for gap in self._unreadable.get(writer, []):
            if gap.start <= row < gap.stop:
                self._new_rows.append(Gap(writer, row, row + 1, "damaged", gap.reason))
                return True
        return False

    def note(self, error: LogCorruption | RowsGone) -> None:
        gap = Gap(error.writer, error.start, error.stop, "damaged", error.reason)
        self._unreadable.setdefault(error.writer, []).append(gap)

    @property
    def all(self) -> list[Gap]:
        return [*self._known_rows, *self._new_rows]

    @property
    def new(self) -> list[Gap]:
        """Ascending, by writer."""
        writers = sorted({gap.writer for gap in self._new_rows})
        return [gap for each in writers for gap in ledger.merged(gap for gap in self._new_rows if gap.writer == each)]


def read_back(state: Mapping[str, Any], reader: LogReader, lost: Lost) -> Iterator[tuple[dict[str, np.ndarray], Rows]]:
    """Parts of the resident rows of an index in their order: what `state` says of them (name -> int64[n]), and their content.

    Args: state: ReplayIndex.state. lost: takes the rows that are left out.

    Raises: RowsPending, ValueError: see LogReader.read_ids.
    """
    for begin in range(0, len(state["slot"]), _ROWS_PER_READ):
        there = {name: np.array(state[name][begin : begin + _ROWS_PER_READ], np.int64) for name in _OF_ROWS}
        rows: Rows | None = None
        while rows is None:
            writers = map(state["writers"].__getitem__, there["writer"].tolist())
            ids = [*zip(writers, there["row"].tolist(), strict=True)]
            if lost.has_any:
                kept = [not lost.holds(writer, row) for writer, row in ids]
                there = {name: column[kept] for name, column in there.items()}
                ids = [each for each, stays in zip(ids, kept, strict=True) if stays]
            rows = _attempt(reader, ids, lost)
        yield there, rows


def _attempt(reader: LogReader, ids: Sequence[tuple[str, int]], lost: Lost) -> Rows | None:
    try:
        return reader.read_ids(ids)
    except (LogCorruption, RowsGone) as error:
        lost.note(error)
        return None


# Why a row is not trained on; `validate_rows` returns indices into this tuple, 0 = valid.
REJECTIONS = (
    "valid",
    "prompt_length",
    "response_length",
    "tokens",
    "reward",
    "logprobs",
    "embedding",
    "state_values",
    "reference",
)


def validate_rows(rows: Rows, *, vocab_size: int, reference_ids: Sequence[int] | None = None) -> np.ndarray:
    """Checks the values of rows that a searcher wrote.

    Args: rows: of a valid schema, see `check_rows`. vocab_size: V; every token, padding included, must be in [0, V).
    reference_ids: of the policies that ref_logprobs may be of, 0 for none yet; None: of any. Returns int8[B], the first of
    REJECTIONS that holds; 0 where the row is valid.
    """
    finite = {name: np.isfinite(rows[name]) for name in ("ref_logprobs", "policy_logprobs", "behavior_logprobs")}
    R = rows["policy_step"].shape[1]
    P = rows["tokens"].shape[1] - R
    nothing = np.zeros(len(rows["row"]), bool)
    failed = np.stack(
        [
            (rows["prompt_length"] < 0) | (rows["prompt_length"] > P),
            (rows["response_length"] < 0) | (rows["response_length"] > R),
            ((rows["tokens"] < 0) | (rows["tokens"] >= vocab_size)).any(1),
            ~np.isfinite(rows["reward"]) | ~np.isfinite(rows["reward_parts"]).all(1),
            ~np.logical_and.reduce([column.all(1) for column in finite.values()]),
            ~np.isfinite(rows["embedding"]).all(1) if "embedding" in rows else nothing,
            # NaN elsewhere says that a state was not valued.
            np.isinf(rows["state_values"]).any(1) | np.isnan(rows["state_values"][:, 0]) if "state_values" in rows else nothing,
            nothing if reference_ids is None else ~np.isin(rows["reference_id"], np.array(reference_ids, np.uint64)),
        ],
        axis=1,
    )
    return np.where(failed.any(1), failed.argmax(1) + 1, 0).astype(np.int8)


class NearByEdits:
    """The responses in the slots of an index, among which the nearest by Levenshtein distance is found.

    The distance d of two responses with n_a and n_b tokens has a cheap lower bound: d >= (L1 + |n_a − n_b|) / 2, with L1 the
    distance of their token counts. L1 of counts in 128 buckets is cheaper and at most as large; so is the number of buckets that
    only one of the two responses uses. Two vectorised passes, the bits first, leave the few whose distance has to be computed.

    _counts: uint8[slots, 128], tokens whose id is the bucket modulo 128, at most 255. _present: uint64[2, slots], a bit for each
    bucket that has any. _lengths: int32[slots], tokens.
    """

    def __init__(self, *, slots: int, share: float):
        """Args: share: in (0, 1). Responses of n and m tokens are near if their edit distance is below share · (n + m)."""
        self._share = share
        self._texts: dict[int, str] = {}  # tokens as the characters of a string, which compares fastest
        self._counts = np.zeros((slots, _BUCKETS), np.uint8)
        self._present = np.zeros((_BUCKETS // 64, slots), np.uint64)
        self._lengths = np.zeros(slots, np.int32)

    def put(self, slot: int, rows: Rows, i: int) -> None:
        """Takes the response of row i for a slot; whatever the slot held is forgotten."""
        tokens = response(rows, i)
        self._texts[slot] = "".join(map(chr, tokens.tolist()))
        self._counts[slot] = np.minimum(np.bincount(tokens % _BUCKETS, minlength=_BUCKETS), 255)
        self._present[:, slot] = np.packbits(self._counts[slot] > 0).view(np.uint64)
        self._lengths[slot] = len(tokens)

    def nearest(self, slot: int, others: np.ndarray, arrival: np.ndarray) -> int | None:
        """The slot among `others` whose response is nearest to that of `slot`; None where none is within the share.
        Args: others: int[n], slots; arrival: int64[slots], which makes ties fall the same way in every order of `others`."""
        # take() gathers several times faster than an index; `others` may be all rows of a run.
        length, lengths = self._lengths[slot], self._lengths.take(others)
        # limits[n_b]: the largest distance d < share · (n_a + n_b). The small term keeps d = 29 of 100 out of a share of 0.29.
        possible = np.arange(max(int(lengths.max(initial=0)), int(length)) + 1)
        limits = np.ceil(self._share * (possible + length) - 1e-9).astype(np.int32) - 1
        differences = np.abs(possible - length).astype(np.int32)
        near, bounds = others, differences.take(lengths)
        for L1 in (self._differing_buckets, self._differing_counts):
            kept = np.flatnonzero(bounds <= limits.take(lengths))
            near, lengths = near.take(kept), lengths.take(kept)
            bounds = (L1(slot, near) + differences.take(lengths) + 1) // 2
        kept = bounds <= limits.take(lengths)
        near, lengths, bounds = near[kept], lengths[kept], bounds[kept]
        order = np.lexsort((arrival[near], bounds))

        text, found, best = self._texts[slot], None, 0
        candidates = zip(near[order].tolist(), bounds[order].tolist(), limits[lengths[order]].tolist(), strict=True)
        for other, bound, limit in candidates:
            if found is not None and bound >= best:
                break
            cutoff = limit if found is None else min(limit, best - 1)
            distance = Levenshtein.distance(text, self._texts[other], score_cutoff=cutoff)
            if distance <= cutoff:
                found, best = other, distance
        return found

    def _differing_buckets(self, slot: int, others: np.ndarray) -> np.ndarray:
        """int32[n]: buckets that only one of a response and that of `slot` has."""
        return sum(np.bitwise_count(words.take(others) ^ words[slot]).astype(np.int32) for words in self._present)

    def _differing_counts(self, slot: int, others: np.ndarray) -> np.ndarray:
        """int32[n]: the L1 distance of the counts of a response and of that of `slot`."""
        counts, own = self._counts.take(others, axis=0), self._counts[slot]
        return (np.maximum(counts, own) - np.minimum(counts, own)).sum(axis=1, dtype=np.int32)


class NearByEmbedding:
    """The embeddings of the responses in the slots of an index. _embeddings: float32[slots, E], of length 1."""

    def __init__(self, *, slots: int, distance: float, embedding_size: int):
        """Args: distance: in (0, 2), the cosine distance 1 − e_a · e_b up to which two responses count as the same."""
        self._distance = distance
        self._embeddings = np.zeros((slots, embedding_size), np.float32)

    def put(self, slot: int, rows: Rows, i: int) -> None:
        """Takes the embedding of row i for a slot."""
        self._embeddings[slot] = rows["embedding"][i]

    def nearest(self, slot: int, others: np.ndarray, arrival: np.ndarray) -> int | None:
        """See NearByEdits.nearest."""
        own = self._embeddings[slot]
        # BLAS results vary by machine and number of threads, so candidates are computed again in float64.
        near = others[self._embeddings[others] @ own >= 1 - self._distance - 1e-4]
        distances = np.round(1.0 - (self._embeddings[near].astype(np.float64) * own).sum(axis=1), 6)
        near, distances = near[distances <= self._distance], distances[distances <= self._distance]
        return int(near[np.lexsort((arrival[near], distances))[0]]) if len(near) else None


class MergedResponses:
    """The responses in the slots of an index that have been merged with the older ones of their query."""

    def __init__(self, near: NearByEdits | NearByEmbedding | None):
        """Args: near: finds the response nearest to another one; None where only identical responses are merged."""
        self._near = near
        # Query id and digest of the response -> slot, and the reverse.
        self._slots: dict[tuple[int, bytes], int] = {}
        self._keys: dict[int, tuple[int, bytes]] = {}

    def put(self, slot: int, query_id: int, rows: Rows, i: int) -> None:
        """Takes the response of row i for a free slot."""
        self._keys[slot] = _key(query_id, rows, i)
        self._slots[self._keys[slot]] = slot
        if self._near is not None:
            self._near.put(slot, rows, i)

    def remove(self, slot: int) -> None:
        """Frees a slot; one that is free stays so."""
        if (key := self._keys.pop(slot, None)) is not None:
            del self._slots[key]

    def same(self, slot: int, query_id: int, rows: Rows, i: int, *, members: Sequence[int], arrival: np.ndarray) -> int | None:
        """The slot of the response that that of row i is merged with, None where there is none.

        Args: slot: of row i, which is free here. members: all slots of its query. arrival: int64[slots], of the index; rows that
        came before this one have all been merged.
        """
        found = self._slots.get(_key(query_id, rows, i))
        if found is not None or self._near is None:
            return found
        self._near.put(slot, rows, i)
        others = np.array(members, np.int32)
        return self._near.nearest(slot, others[arrival[others] < arrival[slot]], arrival)


def _key(query_id: int, rows: Rows, i: int) -> tuple[int, bytes]:
    """128 bits stand for a response's tokens, and for which of them the policy drew: equal digests are equal responses."""
    digest = hashlib.blake2b(response(rows, i).tobytes(), digest_size=16)
    if "environment" in rows:
        digest.update((rows["policy_step"][i] >= 0).tobytes())
    return query_id, digest.digest()
