"""Snapshots: weights as folders of tensorstore arrays, one per parameter: the wire from the trainer to searchers and evaluators,
and the reference store.

A folder is written once, under a name of its own, and never changed: it is whole before anything points at it (published.py; of a
reference policy, `commit.json`, written last). A writer's shard is made of whole chunks. A reader restores straight into its own
sharding, whatever mesh wrote it.

A snapshot is full, or a delta: the lossless difference from one full snapshot (deltas.py), its base, which the name of its
folder holds, so that a reader of a full one asks for nothing more. `delta.json` has checksums of what a reader must come to.
"""

import functools
import hashlib
import json
import math
import re
import shutil
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore as ts

from tba_jax.models import parameters
from tba_jax.models.parameters import Params, Specs
from tba_jax.run import processes
from tba_jax.storage import deltas, file_systems, layout, places
from tba_jax.storage.places import Place

COMMIT, DELTA = "commit.json", "delta.json"
# Chunks are read and checked side by side, and a reader of another mesh reads no more of them than it must.
_READ_AHEAD_BYTES, CHUNK_BYTES = 1 << 28, 1 << 22
_NAME = re.compile(r"(\d{8,})-(\d{6,})-[0-9a-f]{8}(?:\.from\.(\d{8,}-\d{6,}-[0-9a-f]{8}))?")

# Parameter -> chunk -> checksum, see deltas.sums.
Sums = dict[str, dict[str, int]]


class Damaged(ValueError):
    """A snapshot cannot be read, although the storage answers: a part of it is missing or not what was written."""


def new_name(step: int, epoch: int, *, base: str = "", unique: str = "") -> str:
    """A name for the folder of a snapshot, which no other has. Args: step, epoch: of the trainer that writes it; base: the name
    of the full snapshot from which this one is the difference, "" for a full one; unique: 8 hex digits, "": new ones."""
    return f"{layout.step_name(step)}-{epoch:06d}-{unique or uuid.uuid4().hex[:8]}" + (f".from.{base}" if base else "")


def step_and_epoch(name: str) -> tuple[int, int] | None:
    """What `new_name` was given; None where the name is no snapshot's."""
    match = _NAME.fullmatch(name)
    return (int(match[1]), int(match[2])) if match else None


def base_of(name: str) -> str:
    """The name of the full snapshot without which a snapshot cannot be read, "" where it is full itself."""
    match = _NAME.fullmatch(name)
    return match[3] or "" if match else ""


def _spec(folder: Place, name: str) -> dict[str, Any]:
    return places.ARRAY | {"kvstore": places.kvstore(folder / name)}


class Together(Protocol):
    """The processes of a trainer, each of which writes its own shards of a snapshot. leads: whether this is process 0, which
    returns once all have written."""

    @property
    def leads(self) -> bool: ...

    def tell(self, name: str, content: Sums) -> None:
        """Tells process 0 that this process has written its part of `name`."""

    def told(self, name: str) -> Sequence[Sums]:
        """What the others have told, once all of them have."""


class _Alone:
    leads = True

    def tell(self, name: str, content: Sums) -> None:
        pass

    def told(self, name: str) -> Sequence[Sums]:
        return []


def write(
    folder: Place,
    params: Params,
    *,
    dtype: str,
    durable: bool = True,
    beside: Mapping[str, bytes] | None = None,
    together: Together | None = None,
    base: deltas.Base | None = None,
) -> None:
    """Writes what this process holds of one snapshot, and returns in process 0 once all processes have written their shards.

    Args:
      folder: a new one, below at most one that is not there. It is removed where the write fails. The name of a delta's names
      the base.
      params: arrays on device or host. dtype: on disk.
      durable: whether to wait until a local device has the bytes. If not, a loss of power may damage the snapshot.
      beside: name -> content of further files.
      together: the processes that hold shards of `params`, all of which call this; None: this one holds all of them.
      base: for a delta: the base as this process wrote it, of the shardings and, where they are on disk, the dtype of `params`.

    Raises OSError: the storage refused.
    """
    several, together = together is not None, together or _Alone()
    try:
        places.make_folder(folder, below=2)
        for name, content in (beside or {}).items() if together.leads else ():
            places.write_bytes(folder / name, content)
        with file_systems.holding(folder) as held:
            stores = _make_arrays(held, params, dtype=dtype, durable=durable, base=base, several=several)
            written = [_write_shards(stores, params, base)]
        if not together.leads:
            together.tell(folder.name, written[0])
            return
        written += together.told(folder.name)
        if base is not None:
            sums = {name: {chunk: crc for each in written for chunk, crc in each[name].items()} for name in written[0]}
            places.write_bytes(folder / DELTA, json.dumps({"dtype": dtype, "sums": sums}).encode())
        if durable and isinstance(folder, Path):
            places.sync_folder(folder.parent)
    except BaseException as error:
        if together.leads:
            places.remove_tree(folder)
        if isinstance(error, places.STORAGE_ERRORS):  # tensorstore mostly raises ValueError, which here would mean a mistake
            raise places.failure(folder, f"snapshot {folder} could not be written: {error}") from error
        raise


def commit(folder: Place) -> None:
    """Makes the folder of a reference policy count, once it is written."""
    layout.write_json(folder / COMMIT, {})


def _make_arrays(
    folder: Place, params: Params, *, dtype: str, durable: bool, base: deltas.Base | None, several: bool
) -> dict[str, ts.TensorStore]:
    """Parameter -> its array on disk. Args: several: other processes make the same arrays."""
    context = places.context(folder)
    opened: dict[str, Any] = {}
    plain: list[dict[str, Any]] = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
    for name, array in parameters.flatten(params).items():
        shard = array.sharding.shard_shape(array.shape) if isinstance(array, jax.Array) else array.shape
        spec = _spec(folder, name) | {
            "metadata": {
                "shape": list(array.shape),
                "data_type": dtype if base is None else deltas.data_type(dtype),
                "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": _chunk(array.shape, shard, dtype)}},
                "codecs": plain if base is None else deltas.codecs(dtype),
            },
        }
        if isinstance(folder, Path):
            spec["context"] = {"file_io_sync": durable}
        # Where the reply to a request is lost, an object store meets the second request with the array of the first.
        may_be_there = several or not isinstance(folder, Path)
        opened[name] = ts.open(spec, create=True, open=may_be_there, context=context)
    for future in opened.values():
        future.exception()  # all of them end before a failed draft can be removed
    return {name: future.result() for name, future in opened.items()}


def _write_shards(stores: Mapping[str, ts.TensorStore], params: Params, base: deltas.Base | None) -> Sums:
    started: list[Any] = []
    sums: Sums = {}
    try:
        for name, array in parameters.flatten(params).items():
            sums[name] = {}
            for number, (index, block) in enumerate(_host_shards(array)):
                if base is not None:
                    begin = [axis.start or 0 for axis in index]
                    chunk = cast(tuple[int, ...], stores[name].chunk_layout.read_chunk.shape)
                    sums[name] |= deltas.sums(block, chunk, begin=begin)
                    block = deltas.difference(block, base.blocks[name][number])
                part = ts.cast(stores[name], block.dtype)[index]
                started.append(part.write(block, can_reference_source_data_indefinitely=True))
    finally:
        # Every write that has begun must end before a failed draft can be removed.
        for future in started:
            future.exception()
    for future in started:
        future.result()
    return sums


def as_base(name: str, params: Params) -> deltas.Base:
    """What this process keeps of a full snapshot, to write deltas of it. Args: name: of its folder; params: as they were
    written, in the dtype on disk."""
    flat = parameters.flatten(params)
    return deltas.Base(name, {each: [block for _, block in _host_shards(array)] for each, array in flat.items()})


def _chunk(whole: tuple[int, ...], shard: tuple[int, ...], dtype: str) -> list[int]:
    """The shape of the chunks of an array, cut along its first axes; a shard is made of whole chunks."""
    chunk = list(shard)
    for axis, size in enumerate(shard):
        pieces = -(-math.prod(chunk) * jnp.dtype(dtype).itemsize // CHUNK_BYTES)
        length = -(-size // max(pieces, 1))
        while size != whole[axis] and size % length:
            length += 1
        chunk[axis] = length
    return chunk


def _host_shards(array: Any) -> list[tuple[Any, np.ndarray]]:
    """(index, host block) of every shard that this process owns; a replicated block comes once."""
    if isinstance(array, jax.Array):
        return [(shard.index, np.asarray(shard.data)) for shard in array.addressable_shards if shard.replica_id == 0]
    return [((slice(None),) * array.ndim, np.asarray(array))]


def _where_it_is(folder: Place) -> Place:
    return folder


def _open_base(folder: Place, name: str) -> ts.TensorStore:
    return ts.open(_spec(folder, name), open=True, context=places.reading_context(folder)).result()


def open_arrays(
    folder: Place,
    specs: Specs,
    *,
    held: deltas.Held | None = None,
    nearby: Callable[[Place], Place] = _where_it_is,
) -> Params:
    """The parameters of a snapshot as tensorstore arrays, which read only the slices that a caller asks for.

    Args: held: see `load`. nearby: gives for the folder of a snapshot the place at which to open it, see host_copies.py.

    Raises Damaged: a parameter is not there or unreadable, names it; the whole snapshot may have been removed. ValueError: a
    parameter has another shape than the model; names it. OSError: the storage failed.
    """
    here, held = nearby(folder), held or deltas.Held()
    context = places.reading_context(here)
    opened = {name: ts.open(_spec(here, name), open=True, context=context) for name in parameters.flatten(specs)}
    base = base_of(folder.name)
    delta = _read_delta(here) if base else {}
    place_of_base = functools.cache(lambda: nearby(folder.parent / base))
    if base or held.snapshot:
        held.take(base or folder.name)

    def open_one(name: str, spec: parameters.ParamSpec) -> ts.TensorStore:
        try:
            store = opened[name].result()
        except places.STORAGE_ERRORS as error:
            raise _refusal(folder, f"parameter {name} is missing or unreadable", error) from error
        if store.shape != spec.shape:
            raise ValueError(f"{folder}: parameter {name} has shape {store.shape}, the model needs {spec.shape}")
        if base:
            of_base = functools.cache(lambda: _open_base(place_of_base(), name))
            values = held.reader(name, of_base, spec.shape, delta["dtype"])
            return deltas.rebuilt(store, values, delta["sums"].get(name, {}), delta["dtype"])
        if held.snapshot:
            dtype = store.dtype.name
            return deltas.computed(held.reader(name, lambda: store, spec.shape, dtype), like=store, dtype=dtype)
        return store

    return parameters.map_specs(open_one, specs)


def _read_delta(folder: Place) -> dict[str, Any]:
    """The content of delta.json. Raises Damaged, OSError."""
    try:
        delta = json.loads(places.read_bytes(folder / DELTA))
        return {"dtype": jnp.dtype(delta["dtype"]).name, "sums": dict(delta["sums"])}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _refusal(folder, f"{DELTA} is missing or unreadable", error) from error


def _refusal(folder: Place, sentence: str, error: Exception) -> Exception:
    """The error for a snapshot that cannot be read: Damaged, or an OSError after which a retry may succeed."""
    said = OSError(f"{folder}: {sentence}: {error}")
    return said if processes.is_storage_failure(said) else Damaged(str(said))


def load(
    folder: Place,
    specs: Specs,
    shardings: Params,
    *,
    dtype: str = "float32",
    held: deltas.Held | None = None,
    nearby: Callable[[Place], Place] = _where_it_is,
) -> Params:
    """Restores a snapshot in `shardings`; every device reads its own shard only.

    Args: specs: of the snapshot. shardings: a tree of the same structure. dtype: of the result, whatever the dtype on disk.
    held: where the caller keeps a full snapshot for the deltas that it reads next; None: a delta is read with its base.
    nearby: as of `open_arrays`.

    Raises as `open_arrays`; Damaged also where the bytes of a parameter are damaged.
    """
    arrays = open_arrays(folder, specs, held=held, nearby=nearby)
    stores = {name: ts.cast(store, dtype) for name, store in parameters.flatten(arrays).items()}
    sharding_of, flat = parameters.flatten(shardings), parameters.flatten(specs)
    # Reads run ahead of the parameter that is being put on the devices, by _READ_AHEAD_BYTES at most.
    reads: dict[str, dict[str, tuple[np.ndarray, ts.WriteFutures]]] = {}
    waiting = list(flat)

    def start_read(store: ts.TensorStore) -> tuple[np.ndarray, ts.WriteFutures]:
        block = parameters.aligned_empty(store.shape, dtype)
        return block, ts.array(block).write(store)

    def finish_read(name: str, index: Any) -> np.ndarray:
        block, done = reads[name][str(index)]
        done.result()
        return block

    def start_reads() -> None:
        ahead = sum(stores[name].size * stores[name].dtype.numpy_dtype.itemsize for name in reads)
        while waiting and (not reads or ahead < _READ_AHEAD_BYTES):
            name = waiting.pop(0)
            indices = {
                str(index): index for index in sharding_of[name].addressable_devices_indices_map(flat[name].shape).values()
            }
            reads[name] = {key: start_read(stores[name][index]) for key, index in indices.items()}
            ahead += stores[name].size * stores[name].dtype.numpy_dtype.itemsize

    def read(name: str, spec: parameters.ParamSpec) -> jax.Array:
        start_reads()
        try:
            loaded = jax.make_array_from_callback(spec.shape, sharding_of[name], functools.partial(finish_read, name))
        except places.STORAGE_ERRORS as error:
            raise _refusal(folder, f"parameter {name} is damaged", error) from error
        del reads[name]
        return loaded

    return parameters.map_specs(read, specs)


def fingerprint(folder: Place) -> str:
    """16 hex digits over every parameter's name, shape and bytes on disk: the id of a reference policy."""
    digest = hashlib.blake2b(digest_size=8)
    for name in places.files_in(folder):
        if name != COMMIT:
            digest.update(name.encode())
            digest.update(places.read_bytes(folder / name))
    return digest.hexdigest()


def adopt(draft: Path, folder: Place) -> None:
    """Moves a committed snapshot from a local draft to `folder`, where there is no snapshot yet."""
    if isinstance(folder, Path) and draft.parent == folder.parent:
        draft.rename(folder)
    else:
        places.copy_tree(draft, folder, last=COMMIT)
        shutil.rmtree(draft)
