"""Removal of log segments that no checkpoint needs (replay.retention=checkpoints)."""

import concurrent.futures
from collections.abc import Sequence

from tba_jax.replay import retention
from tba_jax.replay.expiry import remove_segments
from tba_jax.roles.trainer.buffer import ReplayBuffer
from tba_jax.run.places import Place


class SegmentExpiry:
    """Knows what a resume from each checkpoint reads, and removes the other segments of this run in a thread."""

    def __init__(self, replay: Place, buffer: ReplayBuffer):
        self._replay, self._buffer = replay, buffer
        # Checkpointed step -> what a resume from there reads of each writer.
        self._needs: dict[int, dict[str, retention.Need]] = {}
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="retention")
        self._removal: concurrent.futures.Future[None] | None = None

    def note(self, step: int) -> None:
        """Notes what a resume from a checkpoint of the buffer as it is now reads.

        Where a writer is not followed, that cannot be told: the step stays unknown, and nothing is removed as long as it is kept.
        """
        index, reader = self._buffer.index, self._buffer.reader
        sizes = {writer: reader.segment_rows(writer) for writer in index.writers}
        known = {writer: size for writer, size in sizes.items() if size is not None}
        if len(known) == len(sizes):
            self._needs[step] = retention.needs(index, known)

    def remove_unneeded(self, kept: Sequence[int]) -> None:
        """Starts to remove the segments that no resume from the kept checkpoints reads. Raises what the last removal raised."""
        if self._removal is not None:
            self._removal.result()
        # A checkpoint of an earlier process may need any segment, until it is replaced.
        if not self._needs.keys() >= set(kept):
            return
        self._needs = {step: self._needs[step] for step in kept}
        expired = retention.expired(self._needs)
        own = {writer: segments for writer, segments in expired.items() if self._buffer.reader.is_own(writer)}
        self._removal = self._thread.submit(remove_segments, self._replay, own)

    def close(self) -> None:
        self._thread.shutdown()
