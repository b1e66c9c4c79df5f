"""Checkpoints of training (orbax): the state on the devices and the JSON state of the host, committed together."""

import itertools
import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
import tensorstore as ts

from tba_jax.run import processes
from tba_jax.sharding import PINNED_HOST
from tba_jax.storage import file_systems, layout, places

# What the folder of a checkpoint that counts no more is called, before its step.
ASIDE = "set-aside-"
# What orbax calls the folder of a checkpoint that it has begun and not committed.
UNFINISHED = "*.orbax-checkpoint-tmp*"
_JSON_FILES = ("_CHECKPOINT_METADATA", "_METADATA", "_sharding", "metadata")
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
            folder = file_systems.hold(folder)  # orbax would make a workdir anew that was moved away meanwhile
        self._held: Path | None = None if read_only else folder
        self._reached = folder.absolute()
        self._manager = ocp.CheckpointManager(self._reached, options=options)
        self._is_saving = False

    def folder_of(self, step: int) -> Path:
        """Where the checkpoint of a step is."""
        return self._folder / layout.step_name(step)

    def latest_step(self) -> int | None:
        return self._manager.latest_step()

    def steps(self) -> list[int]:
        """Steps with a whole checkpoint."""
        return sorted(self._manager.all_steps())

    def save(self, trees: Mapping[str, Any], host: dict[str, Any], *, step: int) -> None:
        """Starts a save after `step` updates, and returns when the shards of this process are in host memory.

        The caller may then donate the arrays to the next update. Nothing is copied on accelerators.

        Args: trees: name -> a tree of arrays. host: JSON.
        """
        # Before it returns, orbax copies from the devices to the host all that is not in host memory.
        items = {name: ocp.args.StandardSave(jax.tree.map(_for_host, tree)) for name, tree in trees.items()}
        self._is_saving = True
        self._manager.save(step, args=ocp.args.Composite(**items, host=ocp.args.JsonSave(host)), force=True)

    def restore(self, step: int, trees: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Restores trees by name into the given shapes and shardings (trees of jax.ShapeDtypeStruct with shardings).

        Each process of a trainer reads its own shards and waits for no other, so that one may fail while the others do not.

        Returns (trees, host) as `save` took them. Raises ValueError: the checkpoint is damaged, or does not fit a tree; names its
        folder.
        """
        items = {name: ocp.args.StandardRestore(tree) for name, tree in trees.items()}
        # Where reading fails within orbax, threads of it print tracebacks; most damage shows before.
        if damage := self._damage(step, trees, reads_arrays=False):
            raise ValueError(f"checkpoint {self.folder_of(step)} cannot be restored: {damage}")
        try:
            args = ocp.args.Composite(**items, host=ocp.args.JsonRestore())
            restored = _reader().restore(self._reached / layout.step_name(step), args=args)
        except Exception as error:  # orbax raises what its storage does
            if processes.is_storage_failure(error):
                raise
            raise ValueError(f"checkpoint {self.folder_of(step)} cannot be restored: {_first_line(error)}") from error
        return {name: restored[name] for name in trees}, restored["host"]

    def restore_host(self, step: int) -> dict[str, Any]:
        """The `host` that `save` took for this step. Raises ValueError where a trainer has removed the checkpoint meanwhile."""
        try:
            return self._manager.restore(step, args=ocp.args.Composite(host=ocp.args.JsonRestore()))["host"]
        except FileNotFoundError as error:
            raise ValueError(f"checkpoint {self.folder_of(step)} was removed while it was read, by a trainer at work") from error

    def damage(self, step: int, names: Iterable[str]) -> str:
        """The first file or array of a checkpoint that cannot be read, and why; "" where every byte of it can be read.

        That a checkpoint cannot be restored does not make it damaged: its trees may be others, or the memory too small.

        Args: names: of its trees. Raises: OSError where the storage fails.
        """
        return self._damage(step, names, reads_arrays=True)

    def _damage(self, step: int, names: Iterable[str], *, reads_arrays: bool) -> str:
        """See `damage`. Args: reads_arrays: False: only the last byte of each chunk of an array is read."""
        folder = self._reached / layout.step_name(step)
        parts = [f"{name}/{part}" for name in names for part in ("_METADATA", "manifest.ocdbt")]
        for file in dict.fromkeys([*parts, "host/metadata", *places.files_in(folder)]):
            try:
                _check_file(folder / file, reads_arrays=reads_arrays)
            except places.STORAGE_ERRORS as error:
                if processes.is_storage_failure(error):
                    raise
                return f"{file}: {_first_line(error)}"
        return ""

    def set_aside(self, step: int) -> Path:
        """Renames the folder of a checkpoint, which then counts no more. Returns its new place.

        This object must not save a step that was there when it was made: orbax remembers those.
        """
        aside = self._folder / f"{ASIDE}{layout.step_name(step)}"
        shutil.rmtree(aside, ignore_errors=True)  # of the same step, whose checkpoint was written again
        self.folder_of(step).rename(aside)
        places.sync_folder(self._folder)
        return aside

    def check(self) -> None:
        """Raises what the last save raised, once it has ended. orbax' own check_for_errors misses most of that."""
        if self._is_saving and not self._manager.is_saving_in_progress():
            self._is_saving = False
            self._manager.wait_until_finished()

    def wait(self) -> None:
        self._manager.wait_until_finished()

    def close(self) -> None:
        self._manager.wait_until_finished()
        self._manager.close()
        if self._held is not None:
            file_systems.let_go(self._held)
            self._held = None


def _reader() -> ocp.Checkpointer:
    """Reads without the barriers at which orbax' manager has all processes wait for each other."""
    here = jax.process_index()
    options = ocp.options.MultiprocessingOptions(primary_host=here, active_processes={here})
    handler = ocp.CompositeCheckpointHandler(composite_options=ocp.CompositeOptions(multiprocessing_options=options))
    return ocp.Checkpointer(handler, multiprocessing_options=options)


def _check_file(file: Path, *, reads_arrays: bool) -> None:
    """Reads a file of a checkpoint, and the arrays of the database that it is the manifest of, see Checkpoints._damage."""
    if file.name in _JSON_FILES or file.parent.name == "array_metadatas":
        json.loads(file.read_bytes())
    # The databases of single processes are parts of the one above them.
    if file.name != "manifest.ocdbt" or file.parent.name.startswith("ocdbt.process_"):
        return
    if not file.exists():
        raise FileNotFoundError("it is not there")
    database = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{file.parent}/"}}
    store = ts.KvStore.open(database).result()
    keys = [key.decode() for key in store.list().result()]
    names = [key.removesuffix("/.zarray") for key in keys if key.endswith("/.zarray")]
    opened = [ts.open({"driver": "zarr", "kvstore": {**database, "path": f"{name}/"}}, open=True) for name in names]
    # A file that is shorter than it was lacks the last byte of a chunk.
    ends = [store.read(key, byte_range=slice(-1, None)) for key in keys]
    for end in ends:
        end.result()
    for array in [each.result() for each in opened]:
        if reads_arrays:
            _read_array(array)


def _read_array(array: ts.TensorStore) -> None:
    """Reads an array chunk by chunk, and keeps nothing of it."""
    chunk = array.chunk_layout.read_chunk.shape or ()  # none of a single number
    sizes = [(length, size or length) for length, size in zip(array.shape, chunk, strict=True)]
    for begin in itertools.product(*(range(0, length, size) for length, size in sizes)):
        ends = [min(at + size, length) for at, (length, size) in zip(begin, sizes, strict=True)]
        array[tuple(map(slice, begin, ends))].read().result()


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]


def _for_host(x: jax.Array) -> jax.Array:
    """x, or a copy where x is in a CPU's memory, which the host reads in place while the next update overwrites it."""
    devices: Any = x.sharding.device_set
    on_cpu = all(device.platform == "cpu" for device in devices)
    return jax.numpy.copy(x) if on_cpu and x.sharding.memory_kind != PINNED_HOST else x
