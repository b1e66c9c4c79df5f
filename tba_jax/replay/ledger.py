"""What became of every row: committed = resident + evicted + rejected + damaged + passed over + pending + unseen, by writer.

Gaps are committed rows that a trainer does not give to its index with the rows around them. A journal line records each
integration of its step: the heads after it, the gaps below them, and the rows that were pending and came late. The first line
after a resume records the rows that it could not read any more, and its step.
"""

import bisect
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

# damaged: were read, and cannot be read again. passed_over: the trainer was too far behind to need them. pending: cannot be read
# yet; they come once they can.
KINDS = ("damaged", "passed_over", "pending")


@dataclasses.dataclass(frozen=True)
class Gap:
    """Rows [start, stop) of a writer. kind: one of KINDS. reason: half a sentence, for messages alone."""

    writer: str
    start: int
    stop: int
    kind: str
    reason: str = ""

    def __str__(self) -> str:
        rows = f"replay log of writer {self.writer}: rows {self.start} to {self.stop - 1}"
        match self.kind:
            case "damaged":
                return f"{rows} cannot be read any more, and count as damaged: {self.reason}"
            case "pending":
                return f"{rows} cannot be read, and come once they can: {self.reason}"
            case _:
                return f"{rows} are passed over: {self.reason}"

    def within(self, start: int, stop: int) -> "Gap":
        """The part in rows [start, stop)."""
        return dataclasses.replace(self, start=max(self.start, start), stop=min(self.stop, stop))


def merged(gaps: Iterable[Gap]) -> list[Gap]:
    """Gaps of one writer by rows, joined where they touch and are of one kind; of reasons the first stays."""
    found: list[Gap] = []
    for gap in sorted(gaps, key=lambda each: each.start):
        if found and found[-1].stop >= gap.start and found[-1].kind == gap.kind:
            found[-1] = dataclasses.replace(found[-1], stop=max(found[-1].stop, gap.stop))
        else:
            found.append(gap)
    return found


def integration(heads: Mapping[str, int], gaps: Iterable[Gap] = ()) -> dict[str, Any]:
    """The record of one integration. JSON. Args: heads: writer -> rows, after it; gaps: below them."""
    return {"heads": dict(heads), "skipped": _ranges(gaps)}


def late(writer: str, start: int, stop: int) -> dict[str, Any]:
    """The record of rows [start, stop) that were pending and have come. JSON."""
    return {"heads": {}, "skipped": {}, "late": [writer, start, stop]}


def closing(heads: Mapping[str, int]) -> dict[str, Any]:
    """The record of writers that were closed, JSON. Args: heads: writer -> its rows."""
    return {"heads": {}, "skipped": {}, "closed": dict(heads)}


def merging(before: int) -> dict[str, Any]:
    """The record of a move of the recent window, JSON. Args: before: see ReplayIndex.merge."""
    return {"heads": {}, "skipped": {}, "merged_before": before}


def loss(gaps: Iterable[Gap], *, since: int) -> dict[str, Any]:
    """The record of rows that a resume could not read again. JSON. Args: since: the step at which that resume began."""
    return {"heads": {}, "skipped": _ranges(gaps), "since": since}


def _ranges(gaps: Iterable[Gap]) -> dict[str, list[list[Any]]]:
    ranges: dict[str, list[list[Any]]] = {}
    for gap in gaps:
        ranges.setdefault(gap.writer, []).append([gap.start, gap.stop, gap.kind])
    return ranges


class KnownGaps:
    """The gaps of some records, by writer."""

    def __init__(self, records: Iterable[Mapping[str, Any]] = ()):
        found: dict[str, list[Gap]] = {}
        for record in records:
            for writer, ranges in record["skipped"].items():
                found.setdefault(writer, []).extend(Gap(writer, *each) for each in ranges)
        self._gaps = {writer: merged(gaps) for writer, gaps in found.items()}

    def __bool__(self) -> bool:
        return bool(self._gaps)

    def within(self, writer: str, start: int, stop: int) -> Sequence[Gap]:
        """The gaps in rows [start, stop) of a writer, ascending, cut to them."""
        gaps = self._gaps.get(writer, [])
        first = bisect.bisect_right(gaps, start, key=lambda gap: gap.stop)
        last = bisect.bisect_left(gaps, stop, key=lambda gap: gap.start)
        return [gap.within(start, stop) for gap in gaps[first:last]]


class Losses:
    """The losses of a journal, by the step since which they count."""

    def __init__(self, lines: Iterable[Mapping[str, Any]] = ()):
        """Args: lines: all that are to be done again."""
        records = [record for line in lines for record in line["visible"] if "since" in record]
        self._records = sorted(records, key=lambda record: record["since"])

    def until(self, step: int) -> list[Mapping[str, Any]]:
        """The records that count at a step."""
        return [record for record in self._records if record["since"] <= step]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Account:
    """One writer's rows.

    evicted: by rule (index.EVICTIONS); rejected: by reason (window.REJECTIONS); evicted_untrained: evicted by a
    capacity before any draw, a part of evicted; passed_over: left out by a trainer that was far behind; pending: could not be
    read yet; unseen: not read yet.
    """

    committed: int
    resident: int
    evicted: dict[str, int]
    rejected: dict[str, int]
    evicted_untrained: int
    damaged: int
    passed_over: int
    pending: int
    unseen: int

    @property
    def balances(self) -> bool:
        kept_out = sum(self.evicted.values()) + sum(self.rejected.values()) + self.damaged + self.passed_over + self.pending
        return self.committed == self.resident + kept_out + self.unseen and self.unseen >= 0


def accounts(index: Any, committed: Mapping[str, int]) -> dict[str, Account]:
    """Writer -> its account, and that of all closed writers together. One that has come again has an account of its rows since.

    Args: index: a ReplayIndex; committed: rows in each writer's log.
    """
    ledger = index.ledger()
    nothing = {"resident": 0, "evicted": {}, "rejected": {}, "evicted_untrained": 0, **dict.fromkeys(KINDS, 0)}
    found = {}
    for writer in sorted(set(committed) | set(ledger)):
        head = index.head(writer)
        total = committed.get(writer, head)
        if writer not in ledger and head == total:  # closed
            continue
        counts: dict[str, Any] = {name: value for name, value in ledger.get(writer, nothing).items() if name != "seen"}
        base = index.reopened.get(writer, 0) if writer in ledger else head
        found[writer] = Account(committed=total - base, unseen=total - head, **counts)
    if rows := index.closed.counts["rows"]:
        entry = {name: value for name, value in index.closed_ledger().items() if name != "seen"}
        found[f"({index.closed.counts['writers']} closed writers)"] = Account(committed=rows, unseen=0, **entry)
    return found
