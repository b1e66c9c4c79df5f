"""The checkpoints of a trainer: train state and replay index together, and the segments of the log that they need."""

import logging
from collections.abc import Mapping
from typing import Any

from tba_jax.roles.trainer.buffer import ReplayBuffer
from tba_jax.roles.trainer.expiry import SegmentExpiry
from tba_jax.run import layout
from tba_jax.run.checkpoints import Checkpoints
from tba_jax.run.lease import EpochLease
from tba_jax.run.process_group import Group

log = logging.getLogger(__name__)


class Checkpointing:
    """Writes checkpoints under the trainer's epoch and reads them back."""

    def __init__(self, config: Any, run: layout.RunDir, lease: EpochLease, buffer: ReplayBuffer, group: Group):
        self._group = group
        self._lease, self._buffer = lease, buffer
        self._every_steps, self._final_step = config.checkpoint.every_steps, config.learner.steps
        self._checkpoints = Checkpoints(run.checkpoints, keep=config.checkpoint.keep)
        self._expiry = SegmentExpiry(run.replay, buffer) if config.replay.retention == "checkpoints" else None
        # The step of the newest checkpoint that this process wrote or restored.
        self._newest_step = -1

    def latest_step(self) -> int | None:
        return self._checkpoints.latest_step()

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, ascending."""
        return self._checkpoints.steps()

    def is_due(self, step: int) -> bool:
        return step % self._every_steps == 0 or step == self._final_step

    def save(self, trees: Mapping[str, Any], step: int) -> None:
        """Starts an asynchronous checkpoint of `trees` and the replay buffer, unless this step has one.

        Raises: StaleEpoch where another trainer has taken over.
        """
        if self._newest_step == step:
            return
        self._lease.check()
        self._newest_step = step
        if self._checkpoints.folder_of(step).exists():
            self.set_aside(step, "a trainer that had been replaced wrote it meanwhile")
        if self._expiry is not None:
            self._checkpoints.wait()
            self._expiry.remove_unneeded(self._checkpoints.steps())
            self._expiry.note(step)
        self._group.call("checkpoint", step=step)
        self._checkpoints.save(trees, {"epoch": self._lease.epoch, **self._buffer.state()}, step=step)

    def read(self, step: int, shapes: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """See Checkpoints.restore. The trainer takes over the second with `take`."""
        return self._checkpoints.restore(step, shapes)

    def damage(self, step: int, shapes: Mapping[str, Any]) -> str:
        """See Checkpoints.damage."""
        return self._checkpoints.damage(step, shapes)

    def set_aside(self, step: int, reason: str) -> None:
        """See Checkpoints.set_aside; says so. Args: reason: why it does not count, in part of a sentence."""
        folder = self._checkpoints.folder_of(step)
        aside = self._checkpoints.set_aside(step)
        log.warning(
            "checkpoint %s is set aside: %s. It is in %s, which goes when a trainer starts and finds checkpoint.keep newer ones",
            *(folder, reason, aside.name),
        )

    def take(self, step: int, host: Mapping[str, Any]) -> None:
        """Goes on from the replay buffer in the checkpoint of a step. Args: host: see `read`."""
        self._buffer.restore(host, step=step)
        if self._expiry is not None:
            self._expiry.note(step)
        self._newest_step = step

    def wait(self) -> None:
        """Returns when the last checkpoint is on disk."""
        self._checkpoints.wait()

    def close(self) -> None:
        self.wait()
        self._checkpoints.close()
        if self._expiry is not None:
            self._expiry.close()
