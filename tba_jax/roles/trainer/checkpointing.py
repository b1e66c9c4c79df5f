"""The checkpoints of a trainer: train state and replay index together, and the segments of the log that no resume reads again.

A resume from a checkpoint reads its resident rows and everything above its heads. What a later step draws was resident then or
came later, so this covers the journalled steps too.
"""

import concurrent.futures
import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tba_jax.replay.expiry import remove_segments
from tba_jax.replay.index import ReplayIndex
from tba_jax.roles.process_group import Group
from tba_jax.roles.trainer.buffer import ReplayBuffer
from tba_jax.storage import layout
from tba_jax.storage.checkpoints import Checkpoints
from tba_jax.storage.lease import EpochLease
from tba_jax.storage.places import Place


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


log = logging.getLogger(__name__)


class Checkpointing:
    """Writes checkpoints under the trainer's epoch. Attributes: stored: the checkpoints of the run."""

    def __init__(self, config: Any, run: layout.RunDir, lease: EpochLease, buffer: ReplayBuffer, group: Group):
        self._group = group
        self._lease, self._buffer = lease, buffer
        self._every_steps, self._final_step = config.checkpoint.every_steps, config.learner.steps
        self.stored = Checkpoints(run.checkpoints, keep=config.checkpoint.keep)
        self._expiry = SegmentExpiry(run.replay, buffer) if config.replay.retention == "checkpoints" else None
        # The step of the newest checkpoint that this process wrote or restored.
        self._newest_step = -1

    def is_due(self, step: int) -> bool:
        return step % self._every_steps == 0 or step == self._final_step

    def save(self, trees: Mapping[str, Any], step: int) -> None:
        """Starts an asynchronous checkpoint of `trees` and the replay buffer, unless this step has one. Raises StaleEpoch."""
        if self._newest_step == step:
            return
        self._lease.check()
        self._newest_step = step
        if self.stored.folder_of(step).exists():
            self.set_aside(step, "a trainer that had been replaced wrote it meanwhile")
        if self._expiry is not None:
            self.stored.wait()
            self._expiry.remove_unneeded(self.stored.steps())
            self._expiry.note(step)
        self._group.call("checkpoint", step=step)
        self.stored.save(trees, {"epoch": self._lease.epoch, **self._buffer.state()}, step=step)

    def set_aside(self, step: int, reason: str) -> None:
        """See Checkpoints.set_aside; says so. Args: reason: why it does not count, in part of a sentence."""
        folder = self.stored.folder_of(step)
        aside = self.stored.set_aside(step)
        log.warning(
            "checkpoint %s is set aside: %s. It is in %s, which goes when a trainer starts and finds checkpoint.keep newer ones",
            *(folder, reason, aside.name),
        )

    def take(self, step: int, host: Mapping[str, Any]) -> None:
        """Goes on from the replay buffer in the checkpoint of a step. Args: host: see Checkpoints.restore."""
        self._buffer.restore(host, step=step)
        if self._expiry is not None:
            self._expiry.note(step)
        self._newest_step = step

    def close(self) -> None:
        """Returns when the last checkpoint is on disk."""
        self.stored.close()
        if self._expiry is not None:
            self._expiry.close()


class SegmentExpiry:
    """Knows what a resume from each checkpoint reads, and removes the other segments of this run in a thread."""

    def __init__(self, replay: Place, buffer: ReplayBuffer):
        self._replay, self._buffer = replay, buffer
        # Checkpointed step -> what a resume from there reads of each writer.
        self._needs: dict[int, dict[str, Need]] = {}
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="retention")
        self._removal: concurrent.futures.Future[None] | None = None

    def note(self, step: int) -> None:
        """Notes what a resume from a checkpoint of the buffer as it is now reads. Where a writer is not followed, that is
        unknown: nothing is removed as long as this checkpoint is kept."""
        index, reader = self._buffer.index, self._buffer.reader
        sizes = {writer: reader.segment_rows(writer) for writer in index.writers}
        known = {writer: size for writer, size in sizes.items() if size is not None}
        if len(known) == len(sizes):
            self._needs[step] = needs(index, known)

    def remove_unneeded(self, kept: Sequence[int]) -> None:
        """Starts to remove the segments that no resume from the kept checkpoints reads. Raises what the last removal raised."""
        if self._removal is not None:
            self._removal.result()
        # A checkpoint of an earlier process may need any segment, until it is replaced.
        if not self._needs.keys() >= set(kept):
            return
        self._needs = {step: self._needs[step] for step in kept}
        unneeded = expired(self._needs)
        own = {writer: segments for writer, segments in unneeded.items() if self._buffer.reader.is_own(writer)}
        self._removal = self._thread.submit(remove_segments, self._replay, own)

    def close(self) -> None:
        self._thread.shutdown()
