"""Which segments of the log no kept checkpoint needs: no resume reads their rows again.

A resume from a checkpoint reads its resident rows and everything above its heads. What a later step draws was resident
then or came later, so this covers the journalled steps too.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np

from tba_jax.replay.index import ReplayIndex


@dataclasses.dataclass(frozen=True)
class Need:
    """What a resume from a checkpoint reads of one writer: `segments`, and every segment from `last_segment` on."""

    last_segment: int
    segments: frozenset[int]


def needs(index: ReplayIndex, segment_rows: Mapping[str, int]) -> dict[str, Need]:
    """Writer -> need of a checkpoint that holds this index. segment_rows: of every writer's log."""
    resident = np.flatnonzero(index.slot_query >= 0)
    sizes = np.array([segment_rows[writer] for writer in index.writers], np.int64)
    writers = index.slot_writer[resident]
    segments: dict[int, set[int]] = {}
    for number, segment in np.unique(np.stack([writers, index.slot_row[resident] // sizes[writers]]), axis=1).T.tolist():
        segments.setdefault(number, set()).add(segment)
    # The segment of the last row stays even if it is full: it tells where the log ends.
    return {
        writer: Need((index.heads[writer] - 1) // segment_rows[writer], frozenset(segments.get(number, ())))
        for number, writer in enumerate(index.writers)
    }


def expired(kept: Mapping[int, Mapping[str, Need]]) -> dict[str, list[int]]:
    """Writer -> segments that none of the kept checkpoints (step -> needs) reads."""
    if not kept:
        return {}
    oldest = kept[min(kept)]
    found = {}
    for writer, need in oldest.items():
        needed = frozenset().union(*(each[writer].segments for each in kept.values() if writer in each))
        if gone := [segment for segment in range(need.last_segment) if segment not in needed]:
            found[writer] = gone
    return found
