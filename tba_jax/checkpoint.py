"""Checkpoints of training (orbax): the state on the devices, and what goes with it on the host, committed together."""

from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp


class Checkpoints:
    """Checkpoints of one run, by step. Saving is asynchronous and atomic: a killed save is not visible."""

    def __init__(self, folder: Path, *, keep: int, read_only: bool = False):
        """Args: keep: newest checkpoints that stay; read_only: the folder is of another run, and is left as it is."""
        options = ocp.CheckpointManagerOptions(
            max_to_keep=None if read_only else keep, step_format_fixed_length=8, read_only=read_only
        )
        self._manager = ocp.CheckpointManager(folder.absolute(), options=options)

    def latest_step(self) -> int | None:
        return self._manager.latest_step()

    def steps(self) -> list[int]:
        """Steps with a whole checkpoint."""
        return sorted(self._manager.all_steps())

    def save(self, state: Any, host: dict[str, Any], *, step: int) -> None:
        """Starts a save after `step` updates.

        Args:
          state: a tree of arrays. host: JSON.
        """
        # A copy, because the caller donates the state to the next update.
        snapshot = jax.tree.map(jax.numpy.copy, state)
        items = ocp.args.Composite(state=ocp.args.StandardSave(snapshot), host=ocp.args.JsonSave(host))
        self._manager.save(step, args=items, force=True)

    def restore(self, step: int, state: Any) -> tuple[Any, dict[str, Any]]:
        """Restores into the shapes and shardings of `state` (a tree of jax.ShapeDtypeStruct with shardings).

        Returns:
          what `save` was given.

        Raises:
          ValueError: the checkpoint does not fit the state, by orbax's account of the difference.
        """
        items = ocp.args.Composite(state=ocp.args.StandardRestore(state), host=ocp.args.JsonRestore())
        restored = self._manager.restore(step, args=items)
        return restored["state"], restored["host"]

    def restore_host(self, step: int) -> dict[str, Any]:
        """What `save` was given for the host."""
        return self._manager.restore(step, args=ocp.args.Composite(host=ocp.args.JsonRestore()))["host"]

    def wait(self) -> None:
        self._manager.wait_until_finished()

    def close(self) -> None:
        self._manager.wait_until_finished()
        self._manager.close()
