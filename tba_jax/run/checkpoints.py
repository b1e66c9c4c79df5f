"""Checkpoints of training (orbax): the state on the devices and the JSON state of the host, committed together."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from tba_jax.run import held_folders, layout, places, processes
from tba_jax.sharding import PINNED_HOST

# A save that takes longer fails. Orbax measures it by the wall clock, which may be set forth by an hour meanwhile.
_SAVE_SECONDS = 3 * 3600


class Checkpoints:
    """Checkpoints of one run, by step. Saving is asynchronous and atomic: a killed save is not visible."""

    def __init__(self, folder: Path, *, keep: int, read_only: bool = False):
        """Args: keep: how many of the newest checkpoints stay. read_only: the folder is another run's and stays unchanged."""
        self._folder = folder
        options = ocp.CheckpointManagerOptions(
            max_to_keep=None if read_only else keep,
            step_format_fixed_length=8,
            read_only=read_only,
            async_options=ocp.AsyncOptions(timeout_secs=_SAVE_SECONDS),
        )
        if not read_only:
            places.make_folder(folder)
            folder = held_folders.hold(folder)  # orbax would make a workdir anew that was moved away meanwhile
        self._held: Path | None = None if read_only else folder
        self._manager = ocp.CheckpointManager(folder.absolute(), options=options)

    def latest_step(self) -> int | None:
        return self._manager.latest_step()

    def steps(self) -> list[int]:
        """Steps with a whole checkpoint."""
        return sorted(self._manager.all_steps())

    def save(self, trees: Mapping[str, Any], host: dict[str, Any], *, step: int) -> None:
        """Starts a save after `step` updates, and returns when the shards of this process are in host memory.

        The caller may then donate the arrays to the next update. Nothing is copied on accelerators.

        Args:
          trees: name -> a tree of arrays. host: JSON.
        """
        # Before it returns, orbax copies from the devices to the host all that is not in host memory.
        items = {name: ocp.args.StandardSave(jax.tree.map(_for_host, tree)) for name, tree in trees.items()}
        self._manager.save(step, args=ocp.args.Composite(**items, host=ocp.args.JsonSave(host)), force=True)

    def restore(self, step: int, trees: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Restores trees by name into the given shapes and shardings (trees of jax.ShapeDtypeStruct with shardings).

        Returns:
          (trees, host) as `save` took them.

        Raises:
          ValueError: the checkpoint is damaged, or does not fit a tree; names its folder.
        """
        items = {name: ocp.args.StandardRestore(tree) for name, tree in trees.items()}
        try:
            restored = self._manager.restore(step, args=ocp.args.Composite(**items, host=ocp.args.JsonRestore()))
        except Exception as error:  # orbax raises what its storage does
            if processes.is_storage_failure(error):
                raise
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ValueError(f"checkpoint {self._folder / layout.step_name(step)} cannot be restored: {reason[:300]}") from error
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


def _for_host(x: jax.Array) -> jax.Array:
    """x, or a copy where x is in a CPU's memory, which the host reads in place while the next update overwrites it."""
    devices: Any = x.sharding.device_set
    on_cpu = all(device.platform == "cpu" for device in devices)
    return jax.numpy.copy(x) if on_cpu and x.sharding.memory_kind != PINNED_HOST else x
