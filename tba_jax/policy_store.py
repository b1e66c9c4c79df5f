"""Policy snapshots on shared storage: the wire from the trainer to searchers and evaluators, and the reference store.

A snapshot is a folder of tensorstore arrays, one per parameter, chunked as the writer's shards. `commit.json`, written
last, makes it visible. A reader restores straight into its own sharding, whatever mesh wrote it.
"""

import concurrent.futures
import dataclasses
import hashlib
import shutil
import uuid
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore as ts

from tba_jax import run_dir
from tba_jax.models import parameters
from tba_jax.models.parameters import Params, Specs

COMMIT = "commit.json"
_READ_AHEAD_BYTES = 1 << 28


@dataclasses.dataclass(frozen=True)
class SnapshotInfo:
    """What commit.json says. step: trainer step of the weights; epoch: lease epoch of the trainer that wrote them."""

    step: int
    epoch: int


def _spec(folder: Path, name: str) -> dict[str, Any]:
    return {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": f"{folder / name}/"},
        # A missing chunk must not read as zeros, so a chunk of zeros must be written.
        "fill_missing_data_reads": False,
        "store_data_equal_to_fill_value": True,
    }


def save(folder: Path, params: Params, info: SnapshotInfo, *, dtype: str, durable: bool = True) -> None:
    """Writes one snapshot; it becomes visible as a whole at the end.

    Args:
      folder: the snapshot's final place; an uncommitted leftover there is replaced.
      params: arrays on device or host. A device array is written shard by shard.
      dtype: dtype on disk.
      durable: waits until the device has the bytes. Without, a snapshot may be damaged after a loss of power (a reader then says
        so); journal and log derive it again.

    Raises:
      OSError or ValueError: the storage refused (full, read-only); nothing is visible then.
    """
    temporary = folder.parent / f".{folder.name}.{uuid.uuid4().hex[:8]}"
    temporary.mkdir(parents=True)
    try:
        futures = []
        for name, array in parameters.flatten(params).items():
            shards = _host_shards(array)
            chunk = shards[0][1].shape
            spec = _spec(temporary, name) | {
                "context": {"file_io_sync": durable},
                "metadata": {
                    "shape": list(array.shape),
                    "data_type": dtype,
                    "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(chunk)}},
                    "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}],
                },
            }
            store = ts.open(spec, create=True).result()
            futures += [
                ts.cast(store, block.dtype)[index].write(block, can_reference_source_data_indefinitely=True)
                for index, block in shards
            ]
        for future in futures:
            future.result()
        run_dir.write_json(temporary / COMMIT, dataclasses.asdict(info) | {"dtype": dtype})
        if folder.exists():
            shutil.rmtree(folder)
        temporary.rename(folder)
        run_dir.sync_folder(folder.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _host_shards(array: Any) -> list[tuple[Any, np.ndarray]]:
    """(index, host block) of the shards this process owns, each block once."""
    if isinstance(array, jax.Array):
        return [(shard.index, np.asarray(shard.data)) for shard in array.addressable_shards if shard.replica_id == 0]
    return [((slice(None),) * array.ndim, np.asarray(array))]


def open_arrays(folder: Path, specs: Specs) -> Params:
    """The parameters of a snapshot as tensorstore arrays, which read what is asked of them.

    Raises:
      FileNotFoundError: there is no committed snapshot in `folder` (it may have been pruned).
      ValueError: a parameter is not there or has another shape than the model; names it.
    """
    run_dir.read_json(folder / COMMIT)

    opened = {name: ts.open(_spec(folder, name), open=True) for name in parameters.flatten(specs)}

    def open_one(name: str, spec: parameters.ParamSpec) -> ts.TensorStore:
        try:
            store = opened[name].result()
        except ValueError as error:
            raise _refusal(folder, f"parameter {name} is missing or unreadable: {error}") from error
        if store.shape != spec.shape:
            raise ValueError(f"{folder}: parameter {name} has shape {store.shape}, the model needs {spec.shape}")
        return store

    return parameters.map_specs(open_one, specs)


def _refusal(folder: Path, sentence: str) -> Exception:
    if not (folder / COMMIT).exists():
        return FileNotFoundError(f"snapshot {folder} was removed while it was read")
    return ValueError(f"{folder}: {sentence}")


def load(folder: Path, specs: Specs, shardings: Params, *, dtype: str = "float32") -> Params:
    """Restores a snapshot in `shardings`; every device reads its own shard only.

    Args:
      specs: what the snapshot holds; shardings: of the same tree, parameters.shardings(specs, mesh).
      dtype: of the parameters returned, whatever it is on disk.

    Raises:
      FileNotFoundError: there is no committed snapshot in `folder` (it may have been pruned).
      ValueError: a parameter on disk has another shape than the model, or its bytes are damaged; names it.
    """
    stores = {name: ts.cast(store, dtype) for name, store in parameters.flatten(open_arrays(folder, specs)).items()}
    sharding_of, flat = parameters.flatten(shardings), parameters.flatten(specs)
    # Reads run ahead of the parameter that is being put on the devices, by so many bytes.
    reads: dict[str, dict[str, ts.Future]] = {}
    waiting = list(flat)

    def start_reads() -> None:
        ahead = sum(stores[name].size * stores[name].dtype.numpy_dtype.itemsize for name in reads)
        while waiting and (not reads or ahead < _READ_AHEAD_BYTES):
            name = waiting.pop(0)
            indices = {
                str(index): index for index in sharding_of[name].addressable_devices_indices_map(flat[name].shape).values()
            }
            reads[name] = {key: stores[name][index].read() for key, index in indices.items()}
            ahead += stores[name].size * stores[name].dtype.numpy_dtype.itemsize

    def read(name: str, spec: parameters.ParamSpec) -> jax.Array:
        start_reads()
        try:
            loaded = jax.make_array_from_callback(spec.shape, sharding_of[name], lambda index: reads[name][str(index)].result())
        except ValueError as error:
            raise _refusal(folder, f"parameter {name} is damaged: {error}") from error
        del reads[name]
        return loaded

    return parameters.map_specs(read, specs)


def committed_steps(policies: Path) -> list[int]:
    """Steps with a visible snapshot, ascending."""
    return [step for step in run_dir.steps_in(policies) if (policies / run_dir.step_name(step) / COMMIT).exists()]


def latest_step(policies: Path) -> int | None:
    """The newest step with a visible snapshot; looks at no more folders than it must."""
    newest_first = reversed(run_dir.steps_in(policies))
    return next((step for step in newest_first if (policies / run_dir.step_name(step) / COMMIT).exists()), None)


def load_step(policies: Path, step: int, specs: Specs, shardings: Params, *, dtype: str = "float32") -> Params:
    return load(policies / run_dir.step_name(step), specs, shardings, dtype=dtype)


def load_latest(
    policies: Path, specs: Specs, shardings: Params, *, newer_than: int, dtype: str = "float32"
) -> tuple[int, Params] | None:
    """The newest snapshot if it is newer than `newer_than`, else None. One that vanishes meanwhile: the next newest."""
    while (step := latest_step(policies)) is not None and step > newer_than:
        try:
            return step, load_step(policies, step, specs, shardings, dtype=dtype)
        except FileNotFoundError:
            continue
    return None


def prune(policies: Path, *, keep: int, keep_every: int, final_step: int) -> list[int]:
    """Removes old snapshots: all but the newest `keep` (0: keeps all), step 0, multiples of keep_every, final_step."""
    steps = committed_steps(policies)
    old = steps[:-keep] if keep else []
    removed = [step for step in old if step % keep_every and step != final_step]
    for step in removed:
        folder = policies / run_dir.step_name(step)
        (folder / COMMIT).unlink(missing_ok=True)  # first the commit: no reader takes up a half-removed snapshot
        shutil.rmtree(folder, ignore_errors=True)
    return removed


def sweep(policies: Path) -> None:
    """Removes what killed writers and prunings left: drafts, and folders without a commit. Only the trainer may call it."""
    for folder in policies.iterdir() if policies.is_dir() else ():
        if folder.is_dir() and not (folder.name[0] != "." and (folder / COMMIT).exists()):
            shutil.rmtree(folder, ignore_errors=True)


def fingerprint(folder: Path) -> str:
    """16 hex digits over every parameter's name, shape and bytes on disk: the id of a reference policy."""
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(p for p in folder.rglob("*") if p.is_file() and p.name != COMMIT):
        digest.update(str(path.relative_to(folder)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


class Publisher:
    """Publishes snapshots from a background thread; the trainer waits for a copy on the device only.

    Snapshots that retention keeps for good are durable; the others are soon superseded, and waiting for the disk would delay
    them by as long as it takes to write and read them.
    """

    def __init__(self, policies: Path, *, dtype: str, keep: int, keep_every: int, final_step: int):
        self._policies = policies
        self._dtype = dtype
        self._retention = dict(keep=keep, keep_every=keep_every, final_step=final_step)
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="publisher")
        self._pending: concurrent.futures.Future[None] | None = None

    def publish(self, params: Params, info: SnapshotInfo) -> None:
        """Hands a snapshot over. Waits only if the one before is still being written; its failure is raised here."""
        self.wait()
        # A copy on the device: the caller donates its buffers to the next update while the thread reads this one.
        snapshot = jax.block_until_ready(jax.tree.map(jnp.copy, params))
        self._pending = self._thread.submit(self._write, snapshot, info)

    def _write(self, params: Params, info: SnapshotInfo) -> None:
        kept = info.step % self._retention["keep_every"] == 0 or info.step == self._retention["final_step"]
        save(self._policies / run_dir.step_name(info.step), params, info, dtype=self._dtype, durable=kept)
        prune(self._policies, **self._retention)

    def wait(self) -> None:
        """Returns when everything handed over is visible. Raises what the background write raised."""
        if self._pending is not None:
            self._pending.result()
            self._pending = None

    def close(self) -> None:
        self.wait()
        self._thread.shutdown()
