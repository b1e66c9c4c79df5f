"""Trainer checkpoints (orbax): the train state, and the replay index that goes with it, committed together."""

from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp


class Checkpoints:
    """Checkpoints of one run, by trainer step. Saving is asynchronous and atomic: a killed save is not visible."""

    def __init__(self, folder: Path, *, keep: int):
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, step_format_fixed_length=8)
        self._manager = ocp.CheckpointManager(folder.absolute(), options=options)

    def latest_step(self) -> int | None:
        return self._manager.latest_step()

    def save(self, state: Any, replay: dict[str, Any], *, step: int, epoch: int) -> None:
        """Starts a save after `step` updates.

        Args:
          state: the train state, a tree of arrays. replay: JSON, the index without its rows, which the log holds.
        """
        # A copy, because the caller donates the state to the next update.
        snapshot = jax.tree.map(jax.numpy.copy, state)
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(snapshot), replay=ocp.args.JsonSave({"epoch": epoch, "index": replay})
        )
        self._manager.save(step, args=items, force=True)

    def restore(self, step: int, state: Any) -> tuple[Any, dict[str, Any], int]:
        """Restores into the shapes and shardings of `state` (a tree of jax.ShapeDtypeStruct with shardings).

        Returns:
          the state, the index, and the epoch of the trainer that saved them.

        Raises:
          ValueError: the checkpoint does not fit the state, by orbax's account of the difference.
        """
        items = ocp.args.Composite(state=ocp.args.StandardRestore(state), replay=ocp.args.JsonRestore())
        restored = self._manager.restore(step, args=items)
        return restored["state"], restored["replay"]["index"], restored["replay"]["epoch"]

    def wait(self) -> None:
        self._manager.wait_until_finished()

    def close(self) -> None:
        self._manager.wait_until_finished()
        self._manager.close()
