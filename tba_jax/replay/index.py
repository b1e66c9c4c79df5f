"""The resident window: the newest valid rows of all logs in host memory, grouped by query.

Pure NumPy and deterministic: the state is a function of the sequence of calls, so a resumed trainer that replays the
calls of its journal draws the same batches.
"""

import array
import collections
import dataclasses
import heapq
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tba_jax.replay.closed import ClosedWriters
from tba_jax.replay.ledger import KINDS, Gap, KnownGaps
from tba_jax.replay.log import GIVEN
from tba_jax.replay.reader import LogReader
from tba_jax.replay.success_counts import SuccessCounts
from tba_jax.replay.window import (
    REJECTIONS,
    Lost,
    MergedResponses,
    NearByEdits,
    NearByEmbedding,
    Window,
    read_back,
    validate_rows,
)
from tba_jax.trajectory import Rows, RowShape, check_rows, trained

# Why a resident row left: it was merged with an identical (or near) response, its query was full, the window was full.
EVICTIONS = ("duplicate", "query_capacity", "capacity")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rules:
    """What stays in the window: settings of the section replay, which the schema and experiment/checks.py check.

    capacity: resident rows in total (replay.capacity). capacity_per_query: of one query.
    merge_duplicates: of identical responses to a query one stays; otherwise frequent responses weigh more in what is drawn.
    merge_edit_distance: a response is merged with the nearest older one of its query also where the edit distance over tokens is
      below this share of both lengths together; 0 = identical responses only. See `merges_late`.
    merge_cosine_distance: the same where the cosine distance of their embeddings is at most this; one of the two settings.
    merge_keep: which of two merged responses stays. newest: the one that came later; best: the one of the higher reward, and of
      equal rewards the newer.
    """

    capacity: int
    capacity_per_query: int
    merge_duplicates: bool = True
    merge_edit_distance: float = 0.0
    merge_cosine_distance: float = 0.0
    merge_keep: str = "newest"

    @property
    def merges_late(self) -> bool:
        """Whether rows are merged when they leave the recent window (ReplayIndex.merge), and not as they arrive.

        Recent rows stand for the policy: if they were merged with near-copies, or with an older row of a higher reward, a policy
        that repeats one response would have few or none of its rows drawn, and would not unlearn it.
        """
        return self.merge_duplicates and bool(self.merge_edit_distance or self.merge_cosine_distance or self.merge_keep == "best")

    def near(self, shape: RowShape) -> NearByEdits | NearByEmbedding | None:
        """What finds the response nearest to another one; None where only identical responses are merged."""
        slots = self.capacity + 1
        if self.merge_edit_distance:
            return NearByEdits(slots=slots, share=self.merge_edit_distance)
        if self.merge_cosine_distance:
            return NearByEmbedding(slots=slots, distance=self.merge_cosine_distance, embedding_size=shape.embedding_size)
        return None


class ReplayIndex(Window):
    """A window that integrates rows: which response replaces which, and what leaves when a query or the window is full."""

    def __init__(
        self,
        *,
        shape: RowShape,
        vocab_size: int,
        reference_ids: Sequence[int] | None = None,
        success_decay: float = 1.0,
        **rules: Any,
    ):
        """Args: reference_ids: of the policies that ref_logprobs may be of, None: of any. success_decay: λ of SuccessCounts.
        rules: fields of Rules."""
        self.rules = Rules(**rules)
        super().__init__(shape, self.rules.capacity)
        self.shape, self.vocab_size, self.reference_ids = shape, vocab_size, reference_ids
        self.heads: dict[str, int] = {}
        self.closed = ClosedWriters()
        # Writers that came again after they were closed -> their rows until then, which the account of these has.
        self.reopened: dict[str, int] = {}
        # Writer -> rows [start, stop) below its head that have not come.
        self.pending: dict[str, list[tuple[int, int]]] = {}
        self.arrivals = 0  # how many valid rows have come, resident or not
        self.success_counts = SuccessCounts(decay=success_decay)
        self._responses, self._merged = MergedResponses(self.rules.near(shape)), 0  # rows that came before have been
        # Per writer, in the order of `writers`.
        self._counts: list[collections.Counter[str]] = []
        self._writer_number: dict[str, int] = {}
        # seen, rejected and damaged rows of all writers together
        self.totals: collections.Counter[str] = collections.Counter()
        # (writer, reason) -> the first row that was rejected since this object was made: for reports, not part of the state.
        self.rejected_first: dict[tuple[str, str], int] = {}

    def add(self, writer: str, rows: Rows, *, step: int, own: bool = True, append: int | None = None) -> None:
        """Integrates rows of one writer's log, in order or such as were pending, as visible from trainer step `step` on.

        own: whether they are of this run; weights of other runs count as those of step 0. append: the first row of the append
        that they are of; None: that of `rows`.

        Invalid rows are counted and left out. The older of identical responses leaves, unless rows are merged late. A full query
        loses its oldest row, then a full window. How rows are split over calls makes no difference.

        Raises ValueError: rows of another schema, row numbers that are not consecutive, or rows below the writer's head that are
        not pending.
        """
        count = check_rows(rows, self.shape)
        if not count:
            return
        first, head = int(rows["row"][0]), self.head(writer)
        is_late = self.take_pending(writer, first, first + count)
        if (first < head and not is_late) or not np.array_equal(rows["row"], np.arange(first, first + count)):
            told = f"rows {first} to {rows['row'][-1]} ({count}) of writer {writer}"
            raise ValueError(f"{told} must be consecutive and not below row {head}")
        self._open_writer(writer)
        self.heads[writer] = max(head, first + count)
        number = self._writer_number[writer]
        counts = self._counts[number]
        counts["seen"] += count
        self.totals["seen"] += count

        if not len(valid := self._valid(writer, rows, counts)):
            return
        row_steps = _row_steps(rows) if own else np.zeros(count, np.int64)
        arrivals = range(self.arrivals, self.arrivals + len(valid))
        self.arrivals = arrivals.stop
        query_ids = rows["query_id"].tolist()
        if own and not writer.startswith(GIVEN):  # sampled by the policy of this run
            sampled = (rows[name][valid].tolist() for name in ("row", "query_id", "reward"))
            self.success_counts.add(writer, *sampled, append=first if append is None else append)
        # The row that was put into a slot last; what a free slot holds does not matter.
        row_in: dict[int, int] = {}
        for arrival, row in zip(arrivals, valid.tolist(), strict=True):
            slot = heapq.heappop(self._free_slots)
            self._arrival[slot], self._visible_step[slot] = arrival, step
            row_in[slot] = row
            self._insert(slot, rows, row, query_ids[row], counts)
        self._slot_top = max(self._slot_top, max(row_in) + 1)
        slots, put = np.fromiter(row_in.keys(), np.int64), np.fromiter(row_in.values(), np.int64)
        self._slot_writer[slots], self._row_step[slots] = number, row_steps[put]
        for name, column in self._columns.items():
            column[slots] = rows[name][put]

    def merge(self, *, before: int) -> bool:
        """Merges the rows that became visible before a step with older ones of their queries, where rows are merged late.

        Returns whether there were such rows that had not been merged: the journal has a record of that (ledger.merging).
        """
        leaving = np.flatnonzero((self.arrival >= self._merged) & (self.visible_step < before) & self.rules.merges_late)
        for slot in leaving[np.argsort(self.arrival[leaving])].tolist():
            self._merged = int(self._arrival[slot]) + 1
            self._merge(slot, self._columns, slot)
        return len(leaving) > 0

    def _merge(self, slot: int, rows: Rows, i: int) -> None:
        """Merges the row in `slot`, which is row i of `rows`, with an older one of its query, if one is identical or near."""
        query_id, reward = self._order[slot][0], self._columns["reward"]
        members = self._members[self._query_number[query_id]]
        leaving = self._responses.same(slot, query_id, rows, i, members=members, arrival=self._arrival)
        if leaving is not None:
            if self.rules.merge_keep == "best" and reward[leaving] > reward[slot]:
                leaving = slot
            self._evict(leaving, "duplicate")
        if leaving != slot:
            self._responses.put(slot, query_id, rows, i)

    def _valid(self, writer: str, rows: Rows, counts: collections.Counter[str]) -> np.ndarray:
        """int64[n], which rows are valid, ascending; the others are counted, by reason."""
        reasons = validate_rows(rows, vocab_size=self.vocab_size, reference_ids=self.reference_ids)
        self.totals["rejected"] += int(np.count_nonzero(reasons))
        for i in np.flatnonzero(reasons).tolist():
            reason = REJECTIONS[reasons[i]]
            self.rejected_first.setdefault((writer, reason), int(rows["row"][i]))
            counts[f"rejected/{reason}"] += 1
        return np.flatnonzero(reasons == 0)

    def skip(self, writer: str, start: int, stop: int, *, kind: str) -> None:
        """Counts committed rows [start, stop) of a writer that do not come now. kind: one of ledger.KINDS."""
        self._open_writer(writer)
        self._counts[self._writer_number[writer]][kind] += stop - start
        self.totals["damaged"] += (stop - start) * (kind == "damaged")
        if kind == "pending":
            ranges = self.pending.setdefault(writer, [])
            touches = ranges and ranges[-1][1] == start
            ranges[-1:] = [(ranges[-1][0], stop)] if touches else [*ranges[-1:], (start, stop)]
        self.heads[writer] = max(self.heads[writer], stop)

    def take_pending(self, writer: str, start: int, stop: int) -> bool:
        """Takes rows [start, stop) out of those that are pending. Returns whether all of them were."""
        there = next((each for each in self.pending.get(writer, ()) if each[0] <= start and stop <= each[1]), None)
        if there is None:
            return False
        kept = [each for each in self.pending.pop(writer) if each != there]
        kept += [each for each in ((there[0], start), (stop, there[1])) if each[0] < each[1]]
        if kept:
            self.pending[writer] = sorted(kept)
        self._counts[self._writer_number[writer]]["pending"] -= stop - start
        return True

    def lose(self, writer: str, start: int, stop: int) -> None:
        """Takes the resident rows among [start, stop) of a writer out of the window; they count as damaged, and not as seen."""
        of_writer = (self.slot_query >= 0) & (self.slot_writer == self._writer_number.get(writer, -1))
        for slot in np.flatnonzero(of_writer & (self.slot_row >= start) & (self.slot_row < stop)).tolist():
            counts = self._leave(slot)
            counts["seen"] -= 1
            counts["damaged"] += 1
            self.totals.update(seen=-1, damaged=1)

    def head(self, writer: str) -> int:
        """The rows of a writer that have been taken up or left out: the next row."""
        return self.heads.get(writer, self.closed.heads.get(writer, 0))

    def closable(self, writers: Sequence[str]) -> list[str]:
        """Those of these writers that have neither a resident nor a pending row."""
        resident = np.bincount(self.slot_writer[self.slot_query >= 0], minlength=len(self.writers))
        there = [writer for writer in writers if writer in self.heads and writer not in self.pending]
        return [writer for writer in there if not resident[self._writer_number[writer]]]

    def close(self, writers: Sequence[str]) -> None:
        """Moves the accounts of writers that are silent into one. A writer that comes again goes on where it was.

        Args: writers: see `closable`; those that are closed already are left out.
        """
        leaving = {writer for writer in writers if writer in self.heads}
        kept = [number for number, writer in enumerate(self.writers) if writer not in leaving]
        for writer in sorted(leaving):
            counts, base = self._counts[self._writer_number[writer]], self.reopened.pop(writer, 0)
            self.closed.close(writer, self.heads.pop(writer), base=base, counts=counts)
            self.success_counts.forget(writer)
        numbers = np.zeros(len(self.writers) + 1, self._slot_writer.dtype)
        numbers[kept] = np.arange(len(kept))
        self._slot_writer[:] = numbers[self._slot_writer]
        self.writers, self._counts = [self.writers[each] for each in kept], [self._counts[each] for each in kept]
        self._writer_number = {writer: number for number, writer in enumerate(self.writers)}

    def _open_writer(self, writer: str) -> None:
        if writer not in self.heads:
            if head := self.closed.reopen(writer):
                self.reopened[writer] = head
            self._writer_number[writer] = len(self.writers)
            self.writers.append(writer)
            self._counts.append(collections.Counter())
            self.heads[writer] = head

    def _insert(self, slot: int, rows: Rows, i: int, query_id: int, counts: collections.Counter[str]) -> None:
        number = self._query_number.get(query_id)
        if number is None:
            number = self._open_query(heapq.heappop(self._free_queries), query_id)
        self._enter(slot, query_id, counts)
        if self.rules.merge_duplicates and not self.rules.merges_late:
            self._merge(slot, rows, i)
        if len(group := self._groups[query_id]) > self.rules.capacity_per_query:
            self._evict(next(iter(group)), "query_capacity")
        if len(self._order) > self.rules.capacity:
            self._evict(next(iter(self._order)), "capacity")
        self._recent_draws[number] = 0

    def _open_query(self, number: int, query_id: int) -> int:
        self._query_number[query_id] = number
        self._groups[query_id] = collections.OrderedDict()
        self._members[number] = array.array("i")
        self._query_top = max(self._query_top, number + 1)
        self._query_rows[number] = 0
        self._query_draws[number], self._recent_draws[number] = self._round, 0
        return number

    def _enter(self, slot: int, query_id: int, counts: collections.Counter[str]) -> None:
        """Makes the row in `slot` resident, the newest of its query."""
        number, group = self._query_number[query_id], self._groups[query_id]
        group[slot] = None
        self._order[slot] = (query_id, counts)
        self._slot_query[slot] = number
        self._query_rows[number] = len(group)
        self._newest_slot[number] = slot
        visible = int(self._visible_step[slot])
        self._rows_of_step[visible] = self._rows_of_step.get(visible, 0) + 1
        members = self._members[number]
        self._place[slot] = len(members)
        members.append(slot)

    def _evict(self, slot: int, rule: str) -> None:
        untrained = rule != "duplicate" and not self._row_draws[slot]
        self._leave(slot).update({f"evicted/{rule}": 1, "evicted_untrained": int(untrained)})

    def _leave(self, slot: int) -> collections.Counter[str]:
        """Takes the row in `slot` out of the window. Returns its writer's counts."""
        query_id, counts = self._order.pop(slot)
        number, group = self._query_number[query_id], self._groups[query_id]
        del group[slot]
        self._responses.remove(slot)
        self._row_draws[slot] = 0  # as in every free slot
        self._query_rows[number] = len(group)
        self._slot_query[slot] = self._arrival[slot] = -1
        visible = int(self._visible_step[slot])
        self._rows_of_step[visible] -= 1
        if not self._rows_of_step[visible]:
            del self._rows_of_step[visible]
        heapq.heappush(self._free_slots, slot)
        members, place = self._members[number], self._place[slot]
        last = members.pop()
        if last != slot:
            members[place], self._place[last] = last, place
        if not group:
            del self._groups[query_id], self._query_number[query_id], self._members[number]
            heapq.heappush(self._free_queries, number)
        elif self._newest_slot[number] == slot:
            self._newest_slot[number] = next(reversed(group))
        return counts

    def ledger(self) -> dict[str, dict[str, Any]]:
        """Per writer: seen, resident, evicted by rule, rejected by reason, evicted_untrained (by a capacity, never drawn); not
        seen: ledger.KINDS.

        seen = resident + evicted + rejected holds for every writer.
        """
        resident = np.bincount(self.slot_writer[self.slot_query >= 0], minlength=len(self.writers))
        of_writers = zip(self.writers, self._counts, resident.tolist(), strict=True)
        return {writer: _entry(counts, resident=there) for writer, counts, there in of_writers}

    def closed_ledger(self) -> dict[str, Any]:
        """The same of all closed writers together."""
        return _entry(self.closed.counts, resident=0)

    def state(self) -> dict[str, Any]:
        """All that `restore` needs, of ints, strings, lists and dicts (JSON)."""
        slots = np.array(list(self._order), np.int64)
        queries = np.unique(self._slot_query[slots])
        return {
            "rules": dataclasses.asdict(self.rules),
            "vocab_size": self.vocab_size,
            "writers": self.writers.copy(),
            "heads": self.heads.copy(),
            "closed": self.closed.state(),
            "reopened": self.reopened.copy(),
            "pending": {writer: [list(each) for each in ranges] for writer, ranges in self.pending.items()},
            "counts": [{name: int(count) for name, count in counts.items()} for counts in self._counts],
            "next_arrival": self.arrivals,
            "merged": self._merged,
            "round": self._round,
            "success_counts": self.success_counts.state(),
            # Residents in order of arrival.
            "slot": slots.tolist(),
            "query": self._slot_query[slots].tolist(),
            "writer": self._slot_writer[slots].tolist(),
            "row": self._columns["row"][slots].tolist(),
            "arrival": self._arrival[slots].tolist(),
            "visible_step": self._visible_step[slots].tolist(),
            "row_draws": self._row_draws[slots].tolist(),
            "queries": queries.tolist(),
            "query_draws": self._query_draws[queries].tolist(),
            "recent_draws": self._recent_draws[queries].tolist(),
        }

    @classmethod
    def restore(
        cls,
        state: Mapping[str, Any],
        reader: LogReader,
        *,
        closed: Path,
        reference_ids: Sequence[int] | None = None,
        known: KnownGaps | None = None,
    ) -> tuple["ReplayIndex", list[Gap]]:
        """The index whose `state` this is; reads the resident rows from the log.

        Args: closed: RunDir.closed. known: gaps of the journal. Rows in them are no longer resident, and count as damaged.

        Returns the index, and new gaps: rows that were resident and cannot be read back. They are left out like the known ones.
        Raises RowsPending: storage does not answer.
        """
        index = cls(shape=reader.shape, vocab_size=state["vocab_size"], reference_ids=reference_ids, **state["rules"])
        index.writers, index.heads = list(state["writers"]), dict(state["heads"])
        index.closed = ClosedWriters.restore(state["closed"], closed, is_open=index.heads)
        index.reopened = dict(state["reopened"])
        index.pending = {writer: [(start, stop) for start, stop in ranges] for writer, ranges in state["pending"].items()}
        index._writer_number = {writer: number for number, writer in enumerate(index.writers)}
        index._counts = [collections.Counter(counts) for counts in state["counts"]]
        index.arrivals, index._round, index._merged = state["next_arrival"], state["round"], state["merged"]
        index.success_counts = SuccessCounts.restore(state["success_counts"])
        numbers = np.array(state["queries"], np.int64)
        index._query_draws[numbers] = state["query_draws"]
        index._recent_draws[numbers] = state["recent_draws"]
        lost = Lost(known if known is not None else KnownGaps())
        reader.expect(index.heads)
        for there, rows in read_back(state, reader, lost):
            numbers, of_row = np.unique(there["writer"], return_inverse=True)
            index._put_back(there, rows, own=np.array([reader.is_own(index.writers[n]) for n in numbers], bool)[of_row])
        for gap in lost.all:
            counts = index._counts[index._writer_number[gap.writer]]
            counts["seen"] -= gap.stop - gap.start
            counts["damaged"] += gap.stop - gap.start
        # Sorted lists are heaps, so the lowest free number comes first as before.
        slots, queries = list(index._order), list(index._query_number.values())
        index._free_slots = np.delete(np.arange(index.rules.capacity + 1), slots).tolist()
        index._free_queries = np.delete(np.arange(index.rules.capacity + 1), queries).tolist()
        index._slot_top = max(slots, default=-1) + 1
        for counts in (*index._counts, index.closed.counts):
            rejected = sum(counts[f"rejected/{reason}"] for reason in REJECTIONS[1:])
            index.totals.update(seen=counts["seen"], damaged=counts["damaged"], rejected=rejected)
        return index, lost.new

    def _put_back(self, there: Mapping[str, np.ndarray], rows: Rows, *, own: np.ndarray) -> None:
        """Makes rows resident as they were. there: int64[n] each, what `state` says of them. own: bool[n]."""
        slots = there["slot"]
        for name, column in self._columns.items():
            column[slots] = rows[name]
        self._slot_writer[slots], self._arrival[slots] = there["writer"], there["arrival"]
        self._visible_step[slots], self._row_draws[slots] = there["visible_step"], there["row_draws"]
        self._row_step[slots] = np.where(own, _row_steps(rows), 0)
        merged = there["arrival"] < (self._merged if self.rules.merges_late else np.inf)
        merged &= self.rules.merge_duplicates
        of_rows = (rows["query_id"], *(there[name] for name in ("slot", "query", "writer")), merged)
        for i, (query_id, slot, number, writer, is_merged) in enumerate(zip(*(x.tolist() for x in of_rows), strict=True)):
            if query_id not in self._query_number:
                draws = self._query_draws[number], self._recent_draws[number]
                self._open_query(number, query_id)
                self._query_draws[number], self._recent_draws[number] = draws
            self._enter(slot, query_id, self._counts[writer])
            if is_merged:
                self._responses.put(slot, query_id, rows, i)


def _entry(counts: Mapping[str, int], *, resident: int) -> dict[str, Any]:
    """A writer's part of ReplayIndex.ledger."""
    return {
        "seen": counts["seen"],
        "resident": resident,
        "evicted": {rule: counts[f"evicted/{rule}"] for rule in EVICTIONS},
        "rejected": {reason: counts[f"rejected/{reason}"] for reason in REJECTIONS[1:]},
        "evicted_untrained": int(counts["evicted_untrained"]),
        **{kind: counts[kind] for kind in KINDS},
    }


def _row_steps(rows: Rows) -> np.ndarray:
    """int64[B], the oldest policy_step of a token that the policy drew; −1 where there is none."""
    mask = trained(rows)
    oldest = np.where(mask, rows["policy_step"].astype(np.int64), np.iinfo(np.int64).max).min(axis=1)
    return np.where(mask.any(axis=1), oldest, -1)
