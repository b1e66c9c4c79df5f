"""Does the integrations of journal lines again: the index after them is that of the trainer that journalled them."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from tba_jax.replay import journal
from tba_jax.replay.gaps import Gap, KnownGaps, Losses
from tba_jax.replay.index import ReplayIndex
from tba_jax.replay.reader import LogReader, RowsPending
from tba_jax.replay.tail import read_part, take_part


class RowsLost(ValueError):
    """A row that a journalled step drew cannot be read any more."""


class Again:
    """Brings an index through journal lines, one after the other.

    Attributes: lost: gaps that are new: rows that could be read when they were journalled, and cannot be read any more.
    """

    def __init__(self, index: ReplayIndex, reader: LogReader, losses: Losses, *, step: int):
        """Args: losses: of the lines that follow; step: where the index stands."""
        self._index, self._reader, self._losses = index, reader, losses
        self._counted = losses.until(step)
        self._lost_before = KnownGaps(self._counted)
        self.lost: list[Gap] = []

    def do(self, line: Mapping[str, Any]) -> np.ndarray:
        """Integrates what a line tells of. Returns the slots of its batch, int64[B].

        Raises:
          RowsLost: a row of the batch cannot be read any more; names it. ValueError: it is not resident although it can be read.
          RowsPending: storage does not answer.
        """
        self._lose_what_was_lost(line["step"] - 1)
        for record in line["visible"]:
            self._integrate(record, step=line["step"] - 1)
        slots = self._index.slots_of(journal.line_ids(line))
        if (slots < 0).any():
            raise _not_resident(self._reader, line, slots)
        return slots

    def _lose_what_was_lost(self, step: int) -> None:
        counted = self._losses.until(step)
        for record in counted[len(self._counted) :]:
            for writer, ranges in record["skipped"].items():
                for start, stop, _ in ranges:
                    self._index.lose(writer, start, stop)
        if len(counted) > len(self._counted):
            self._counted, self._lost_before = counted, KnownGaps(counted)

    def _integrate(self, record: Mapping[str, Any], *, step: int) -> None:
        """What ReplayBuffer.integrate did when it made the record."""
        own = KnownGaps([record])
        for writer, head in sorted(record["heads"].items()):
            if (begin := self._index.heads.get(writer, 0)) >= head:
                continue
            known = own.within(writer, begin, head) or self._lost_before.within(writer, begin, head)
            part = read_part(self._reader, writer, begin, head, known, wait=True)
            take_part(self._index, self._reader, writer, part, step=step)
            self.lost += [gap for gap in part.gaps if gap not in known]
        if "merged_before" in record:
            self._index.merge(before=record["merged_before"])


def _not_resident(reader: LogReader, line: Mapping[str, Any], slots: np.ndarray) -> ValueError:
    """Why a journalled batch cannot be drawn again: the row that is missing, and what is wrong with it.

    Args: slots: int64[B], of the batch's rows; −1 where one is not resident.
    """
    writer, row = journal.line_ids(line)[int((slots < 0).argmax())]
    try:
        reader.read_ids([(writer, row)])
    except (ValueError, RowsPending) as error:
        return RowsLost(
            f"step {line['step']} drew row {writer}:{row}, which cannot be read any more: {error}. Restore it, or begin a new "
            "run from a snapshot (--init_from=RUN@STEP)"
        )
    return ValueError(f"step {line['step']} drew row {writer}:{row}, which was not resident: log and journal disagree")
