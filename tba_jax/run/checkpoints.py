"""Checkpoints of training (orbax): the state on the devices and the JSON state of the host, committed together."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from tba_jax.run import held_folders, places, snapshots
from tba_jax.sharding import PINNED_HOST


class Checkpoints:
    """Checkpoints of one run, by step. Saving is asynchronous and atomic: a killed save is not visible."""

    def __init__(self, folder: Path, *, keep: int, read_only: bool = False):
        """Args: keep: how many of the newest checkpoints stay. read_only: the folder is another run's and stays unchanged."""
        options = ocp.CheckpointManagerOptions(
            max_to_keep=None if read_only else keep, step_format_fixed_length=8, read_only=read_only
        )
        if not read_only:
            places.make_folder(folder)
            folder = held_folders.hold(folder)  # orbax would make a workdir anew that was moved away meanwhile
        self._copy = snapshots.copy_program()
        self._held: Path | None = None if read_only else folder
        self._manager = ocp.CheckpointManager(folder.absolute(), options=options)

    def latest_step(self) -> int | None:
        return self._manager.latest_step()

    def steps(self) -> list[int]:
        """Steps with a whole checkpoint."""
        return sorted(self._manager.all_steps())

    def save(self, trees: Mapping[str, Any], host: dict[str, Any], *, step: int) -> None:
        """Starts a save after `step` updates.

        Args:
          trees: name -> a tree of arrays. host: JSON.
        """
        # A copy, because the caller donates the state to the next update. Arrays in host memory are never donated.
        items = {name: ocp.args.StandardSave(tree if _in_host_memory(tree) else self._copy(tree)) for name, tree in trees.items()}
        self._manager.save(step, args=ocp.args.Composite(**items, host=ocp.args.JsonSave(host)), force=True)

    def restore(self, step: int, trees: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Restores trees by name into the given shapes and shardings (trees of jax.ShapeDtypeStruct with shardings).

        Returns:
          (trees, host) as `save` took them.

        Raises:
          ValueError: the checkpoint does not fit a tree, by orbax's account of the difference.
        """
        items = {name: ocp.args.StandardRestore(tree) for name, tree in trees.items()}
        restored = self._manager.restore(step, args=ocp.args.Composite(**items, host=ocp.args.JsonRestore()))
        return {name: restored[name] for name in trees}, restored["host"]

    def restore_host(self, step: int) -> dict[str, Any]:
        """The `host` that `save` took for this step."""
        return self._manager.restore(step, args=ocp.args.Composite(host=ocp.args.JsonRestore()))["host"]

    def wait(self) -> None:
        self._manager.wait_until_finished()

    def close(self) -> None:
        self._manager.wait_until_finished()
        self._manager.close()
        if self._held is not None:
            held_folders.let_go(self._held)
            self._held = None


def _in_host_memory(tree: Any) -> bool:
    return any(x.sharding.memory_kind == PINNED_HOST for x in jax.tree.leaves(tree))
