"""The checkpoints of a trainer: train state and replay index together, and the segments of the log that they need."""

from collections.abc import Mapping
from typing import Any

from tba_jax.roles.trainer.buffer import ReplayBuffer
from tba_jax.roles.trainer.expiry import SegmentExpiry
from tba_jax.run import layout
from tba_jax.run.checkpoints import Checkpoints
from tba_jax.run.lease import EpochLease
from tba_jax.run.process_group import Group


def restore(checkpoints: Checkpoints, step: int, shapes: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """See Checkpoints.restore; of this run, whose user is told what can be done where it fails."""
    try:
        return checkpoints.restore(step, shapes)
    except ValueError as error:
        raise ValueError(
            f"{error}. If it is damaged, remove that folder: the run then goes on from the checkpoint before, or from its "
            "reference, exactly"
        ) from error


class Checkpointing:
    """Writes checkpoints under the trainer's epoch and reads them back."""

    def __init__(self, config: Any, run: layout.RunDir, lease: EpochLease, buffer: ReplayBuffer, group: Group):
        self._group = group
        self._folder, self._lease, self._buffer = run.checkpoints, lease, buffer
        self._every_steps, self._final_step = config.checkpoint.every_steps, config.learner.steps
        self._checkpoints = Checkpoints(run.checkpoints, keep=config.checkpoint.keep)
        self._expiry = SegmentExpiry(run.replay, buffer) if config.replay.retention == "checkpoints" else None
        # The step of the newest checkpoint that this process wrote or restored.
        self._newest_step = -1

    def latest_step(self) -> int | None:
        return self._checkpoints.latest_step()

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
        if self._expiry is not None:
            self._checkpoints.wait()
            self._expiry.remove_unneeded(self._checkpoints.steps())
            self._expiry.note(step)
        self._group.call("checkpoint", step=step)
        self._checkpoints.save(trees, {"epoch": self._lease.epoch, **self._buffer.state()}, step=step)

    def restore(self, step: int, shapes: Mapping[str, Any], *, recorded_by: int) -> dict[str, Any]:
        """Restores the replay buffer, and returns the trees that `save` was given.

        Args: shapes: see Checkpoints.restore; recorded_by: the epoch whose journal has the step, 0 where none has.

        Raises:
          ValueError: the checkpoint is damaged, or a trainer wrote it that had been replaced; names the folder.
        """
        trees, host = restore(self._checkpoints, step, shapes)
        if host["epoch"] < recorded_by:
            raise ValueError(
                f"checkpoint {step} was written under epoch {host['epoch']}, but step {step} belongs to epoch {recorded_by}: "
                f"a trainer that had been replaced wrote it; remove it from {self._folder}"
            )
        self._buffer.restore(host)
        if self._expiry is not None:
            self._expiry.note(step)
        self._newest_step = step
        return trees

    def wait(self) -> None:
        """Returns when the last checkpoint is on disk."""
        self._checkpoints.wait()

    def close(self) -> None:
        self._checkpoints.close()
        if self._expiry is not None:
            self._expiry.close()
