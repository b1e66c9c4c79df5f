"""Policy snapshots on shared storage: the wire from the trainer to searchers and evaluators, and the reference store.

A snapshot is a folder of tensorstore arrays, one per parameter; a writer's shard is made of whole chunks. `commit.json`, written
last, makes it visible; a local folder also appears as a whole, by being renamed. A reader restores straight into its own
sharding, whatever mesh wrote it. One that is damaged is told of once, and not read again until it is published again.

A snapshot is full, or the lossless difference from one full snapshot before it, its base (deltas.py): `commit.json` names the
base, `sums.json` has a checksum of every chunk that a reader must come to. A delta is never the base of another.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import logging
import math
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore as ts

from tba_jax.models import parameters
from tba_jax.models.parameters import Params, Specs
from tba_jax.run import processes
from tba_jax.storage import deltas, file_systems, layout, places
from tba_jax.storage.places import Place

log = logging.getLogger(__name__)

COMMIT, SUMS = "commit.json", "sums.json"
# Chunks are read and checked side by side, and a reader of another mesh reads no more of them than it must.
_READ_AHEAD_BYTES, CHUNK_BYTES = 1 << 28, 1 << 22
# Storage that damages everything must not fill the memory with sentences.
_MOST_SENTENCES = 64

T = TypeVar("T")
# Parameter -> chunk -> checksum.
Sums = dict[str, dict[str, int]]


class Damaged(ValueError):
    """A snapshot is visible and cannot be read, although the storage answers: a part of it is missing or not what was written."""


@dataclasses.dataclass(frozen=True)
class SnapshotInfo:
    """The facts that a snapshot holds with its parameters. step: of the trainer; epoch: of its lease; beside: name -> content of
    further files, which become visible and are removed with the parameters."""

    step: int
    epoch: int
    beside: Mapping[str, bytes] = dataclasses.field(default_factory=dict)


def _spec(folder: Place, name: str) -> dict[str, Any]:
    return places.ARRAY | {"kvstore": places.kvstore(folder / name)}


class Others(Protocol):
    """The other processes of a trainer, each of which writes its own shards of a snapshot."""

    def start(self, folder: Place, step: int, *, durable: bool, base: int | None) -> None:
        """Lets them write their shards of the weights of a step into `folder`, where the arrays are made.
        Args: base: the step of the snapshot from which the differences are; None: this one is full."""

    def wait(self, step: int) -> Sequence[Sums]:
        """Returns what `write_shards` returned to each of them. Raises OSError where one of them could not."""


def save(
    folder: Place,
    params: Params,
    info: SnapshotInfo,
    *,
    dtype: str,
    durable: bool = True,
    check: Callable[[], object] = lambda: None,
    others: Others | None = None,
    base: deltas.Base | None = None,
) -> None:
    """Writes one snapshot; it becomes visible as a whole at the end.

    Args:
      folder: the final place. A snapshot that a trainer of the same or an earlier epoch left there is replaced.
      params: arrays on device or host. dtype: on disk.
      durable: whether to wait until a local device has the bytes. If not, a loss of power may damage the snapshot.
      check: called right before the snapshot becomes visible; where it raises, nothing is.
      others: the other processes that hold shards of `params`; None: this one holds all of them.
      base: the full snapshot of this trainer from which the difference is written, of `params` with the same shardings that
        have `dtype` already; None: this snapshot is full.

    Raises OSError: the storage refused. ValueError: a trainer of a later epoch has written this step. Nothing is visible then.
    """
    _refuse_later_epoch(folder, info)
    draft = folder
    if isinstance(folder, Path):
        draft = folder.parent / f".{folder.name}.{uuid.uuid4().hex[:8]}"
        places.make_folder(draft, below=2)
    else:
        _remove(folder)
    try:
        try:
            sums = _write(draft, params, info, dtype=dtype, durable=durable, others=others, base=base)
        except places.STORAGE_ERRORS as error:  # tensorstore mostly raises ValueError, which here would mean a user's mistake
            raise OSError(f"snapshot {folder} could not be written: {error}") from error
        check()
        _refuse_later_epoch(folder, info)
        if base is not None:
            layout.write_json(draft / SUMS, sums)
        of_base = {} if base is None else {"base": base.name}
        layout.write_json(draft / COMMIT, {"step": info.step, "epoch": info.epoch, "dtype": dtype, **of_base})
        if isinstance(draft, Path) and isinstance(folder, Path):
            if folder.exists():
                _remove(folder)
            draft.rename(folder)
            places.sync_folder(folder.parent)
    except BaseException:
        if isinstance(draft, Path):  # an object store has no draft: its place may be another trainer's by now
            shutil.rmtree(draft, ignore_errors=True)
        raise


def _write(
    folder: Place,
    params: Params,
    info: SnapshotInfo,
    *,
    dtype: str,
    durable: bool,
    others: Others | None,
    base: deltas.Base | None,
) -> Sums:
    """Makes the files and arrays of a snapshot, and returns the checksums once all processes have written their shards."""
    for name, content in info.beside.items():
        places.write_bytes(folder / name, content)
    with file_systems.holding(folder) as held:
        stores = _make_arrays(held, params, dtype=dtype, durable=durable, base=base)
        if others is not None:
            others.start(folder, info.step, durable=durable, base=None if base is None else base.step)
        sums = _write_shards(stores, params, base)
    for more in others.wait(info.step) if others is not None else ():
        sums = {name: chunks | more.get(name, {}) for name, chunks in sums.items()}
    return sums


def _refuse_later_epoch(folder: Place, info: SnapshotInfo) -> None:
    try:
        there = layout.read_json(folder / COMMIT)["epoch"]
    except (FileNotFoundError, ValueError, KeyError):
        return
    if there > info.epoch:
        raise ValueError(f"{folder} was published under epoch {there}, this trainer's is {info.epoch}: it has been replaced")


def write_shards(folder: Place, params: Params, *, dtype: str, durable: bool, base: deltas.Base | None = None) -> Sums:
    """Writes what this process holds of a snapshot whose arrays process 0 has made in `folder`, and returns the checksums of its
    chunks, none of a full one. Args, Raises: as `save`."""
    try:
        with file_systems.holding(folder) as held:
            stores = _make_arrays(held, params, dtype=dtype, durable=durable, base=base, there=True)
            return _write_shards(stores, params, base)
    except places.STORAGE_ERRORS as error:
        raise OSError(f"snapshot {folder} could not be written: {error}") from error


def _make_arrays(
    folder: Place, params: Params, *, dtype: str, durable: bool, base: deltas.Base | None, there: bool = False
) -> dict[str, ts.TensorStore]:
    """Parameter -> its array on disk. Args: there: another process has made the arrays."""
    context = places.context(folder)
    codecs: list[dict[str, Any]] = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
    data_type = dtype
    if base is not None:
        codecs, data_type = deltas.codecs(dtype), deltas.data_type(dtype)
    opened: dict[str, Any] = {}
    for name, array in parameters.flatten(params).items():
        shard = array.sharding.shard_shape(array.shape) if isinstance(array, jax.Array) else array.shape
        spec = _spec(folder, name) | {
            "metadata": {
                "shape": list(array.shape),
                "data_type": data_type,
                "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": _chunk(array.shape, shard, dtype)}},
                "codecs": codecs,
            },
        }
        if isinstance(folder, Path):
            spec["context"] = {"file_io_sync": durable}
        # Where the reply to a request is lost, an object store meets the second request with the array of the first.
        is_there = there or not isinstance(folder, Path)
        opened[name] = ts.open(spec, create=not there, open=is_there, context=context)
    for future in opened.values():
        future.exception()  # all of them end before a failed draft can be removed
    return {name: future.result() for name, future in opened.items()}


def _write_shards(stores: Mapping[str, ts.TensorStore], params: Params, base: deltas.Base | None) -> Sums:
    """Returns the checksums of what was written as a difference."""
    started: list[Any] = []
    sums: Sums = {}
    try:
        for name, array in parameters.flatten(params).items():
            sums[name] = {}
            for number, (index, block) in enumerate(_host_shards(array)):
                part = stores[name][index]
                if base is not None:
                    begin = [axis.start or 0 for axis in index]
                    chunk = cast(tuple[int, ...], stores[name].chunk_layout.read_chunk.shape)
                    sums[name] |= deltas.sums(block, chunk, begin=begin)
                    block = deltas.difference(block, base.blocks[name][number])
                started.append(ts.cast(part, block.dtype).write(block, can_reference_source_data_indefinitely=True))
    finally:
        # Every write that has begun must end before a failed draft can be removed.
        for future in started:
            future.exception()
    for future in started:
        future.result()
    return sums


def base_of(params: Params, *, step: int, name: str) -> deltas.Base:
    """What this process keeps of a full snapshot of `params`, to write differences from it. Args: as deltas.Base."""
    flat = parameters.flatten(params)
    return deltas.Base(step, name, {each: [block for _, block in _host_shards(array)] for each, array in flat.items()})


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


def open_arrays(folder: Place, specs: Specs, *, commit: bytes = b"", held: deltas.Held | None = None) -> Params:
    """The parameters of a snapshot as tensorstore arrays, which read only the slices that a caller asks for.

    Args: commit: what commit.json said before; b"": it is read now. held: see `load`.

    Raises:
      FileNotFoundError: there is no committed snapshot in `folder` (it may have been pruned).
      Damaged: a parameter is not there or unreadable, names it; or commit.json is no JSON.
      ValueError: a parameter has another shape than the model; names it. OSError: the storage failed.
    """
    commit = commit or _commit(folder)
    said = json.loads(commit)
    context = places.reading_context(folder)
    opened = {name: ts.open(_spec(folder, name), open=True, context=context) for name in parameters.flatten(specs)}
    base, sums = said.get("base", ""), _sums(folder, commit) if "base" in said else {}
    held = held or deltas.Held()
    if base or held.is_used:
        held.take(base or folder.name)

    def open_one(name: str, spec: parameters.ParamSpec) -> ts.TensorStore:
        try:
            store = opened[name].result()
        except places.STORAGE_ERRORS as error:
            raise _refusal(folder, f"parameter {name} is missing or unreadable", error, commit) from error
        if store.shape != spec.shape:
            raise ValueError(f"{folder}: parameter {name} has shape {store.shape}, the model needs {spec.shape}")
        if base:
            of_base = functools.cache(lambda: ts.open(_spec(folder.parent / base, name), open=True, context=context).result())
            read = held.reader(name, of_base, spec.shape, said["dtype"])
            return deltas.rebuilt(store, read, sums.get(name, {}), said["dtype"])
        if held.is_used:
            read = held.reader(name, lambda: store, spec.shape, said["dtype"])
            return deltas.computed(read, like=store, dtype=said["dtype"])
        return store

    return parameters.map_specs(open_one, specs)


def _sums(folder: Place, commit: bytes) -> Sums:
    """The checksums of a delta. Raises: as `open_arrays`."""
    try:
        return layout.read_json(folder / SUMS)
    except (FileNotFoundError, ValueError) as error:
        raise _refusal(folder, f"{SUMS} is missing or unreadable", error, commit) from error


def _commit(folder: Place) -> bytes:
    """The content of commit.json. Raises FileNotFoundError without one, Damaged where it is no JSON."""
    content = layout.read_file(folder / COMMIT)
    try:
        json.loads(content)
    except ValueError as error:
        raise Damaged(f"{folder / COMMIT} is not valid JSON: {error}") from error
    return content


def _refusal(folder: Place, sentence: str, error: Exception, commit: bytes) -> Exception:
    """The error for a snapshot that cannot be read: Damaged if it is, else one after which a retry may succeed.

    Args: commit: what commit.json said before.
    """
    said = OSError(f"{folder}: {sentence}: {error}")
    if processes.is_storage_failure(said):
        return said
    _check_is_there(folder, commit)
    return Damaged(str(said))


def _check_is_there(folder: Place, commit: bytes) -> None:
    """Raises FileNotFoundError where a snapshot is not the one any more that had this commit.json."""
    if not places.exists(folder / COMMIT):
        raise FileNotFoundError(f"snapshot {folder} was removed while it was read")
    if places.read_bytes(folder / COMMIT) != commit:
        raise FileNotFoundError(f"snapshot {folder} was written again while it was read")


def load(folder: Place, specs: Specs, shardings: Params, *, dtype: str = "float32", held: deltas.Held | None = None) -> Params:
    """Restores a snapshot in `shardings`; every device reads its own shard only.

    Args: specs: of the snapshot. shardings: a tree of the same structure. dtype: of the result, whatever the dtype on disk.
    held: where the caller keeps a full snapshot for the deltas that it reads next; None: a delta is read with its base.

    Raises as `open_arrays`; FileNotFoundError also where the snapshot was pruned or published again meanwhile, Damaged where the
    bytes of a parameter are damaged.
    """
    commit = _commit(folder)
    loaded = _load(folder, specs, shardings, dtype=dtype, commit=commit, held=held)
    _check_is_there(folder, commit)  # else some arrays may be of one snapshot, and some of another
    return loaded


def _load(folder: Place, specs: Specs, shardings: Params, *, dtype: str, commit: bytes, held: deltas.Held | None) -> Params:
    arrays = open_arrays(folder, specs, commit=commit, held=held)
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
            raise _refusal(folder, f"parameter {name} is damaged", error, commit) from error
        del reads[name]
        return loaded

    return parameters.map_specs(read, specs)


def committed_steps(policies: Place) -> list[int]:
    """Steps with a visible snapshot, ascending."""
    return layout.as_steps(places.folders_with(policies, COMMIT))


def is_committed(policies: Place, step: int) -> bool:
    """Whether a step's snapshot is visible."""
    return places.exists(policies / layout.step_name(step) / COMMIT)


def latest_step(policies: Place, *, newer_than: int = -1) -> int | None:
    """The newest step above `newer_than` with a visible snapshot; looks at no more folders than it must."""
    steps = layout.steps_in(policies, newer_than=newer_than)
    return next((step for step in reversed(steps) if is_committed(policies, step)), None)


def load_step(policies: Place, step: int, specs: Specs, shardings: Params, **how: Any) -> Params:
    """The snapshot of a step. Args, Raises: see `load`."""
    return load(policies / layout.step_name(step), specs, shardings, **how)


def prune(
    policies: Place, *, keep: int, keep_every: int, final_step: int, scores: Callable[[], Mapping[int, float]] = dict
) -> list[int]:
    """Removes old snapshots: all but the newest `keep` (0: keeps all), step 0, multiples of keep_every, final_step, and the best.

    Args: scores: gives step -> held-out score. The best is of the steps that have a snapshot (see results.best).
    """
    if not keep:
        return []
    there = committed_steps(policies)
    removed = [step for step in there[:-keep] if step % keep_every and step != final_step]
    scored = scores() if removed else {}
    if not scored.keys().isdisjoint(removed):
        best = max((step for step in there if step in scored), key=lambda step: (scored[step], step))
        removed = [step for step in removed if step != best]
    for step in removed:
        remove(policies, step)
    return removed


def remove(policies: Place, step: int) -> None:
    """Removes the snapshot of a step. Only the trainer may call it."""
    _remove(policies / layout.step_name(step))


def _remove(folder: Place) -> None:
    places.remove(folder / COMMIT)  # first the commit: no reader takes up a half-removed snapshot
    places.remove_tree(folder)


def sweep(policies: Place) -> None:
    """Removes the drafts and uncommitted folders that killed processes left. Only the trainer may call it."""
    names, committed = places.names_in(policies), set(places.folders_with(policies, COMMIT))
    for folder in (policies / name for name in names if name not in committed or name[0] == "."):
        # While a local folder is away, its snapshots look uncommitted: this listing raises then.
        if not (isinstance(folder, Path) and folder.is_dir() and COMMIT in os.listdir(folder)) or folder.name[0] == ".":
            places.remove_tree(folder)


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


def lagging(steps: Sequence[int], *, lag: int) -> list[int]:
    """The steps, of published ones in ascending order, that are at least `lag` older than the newest; step 0 where none is."""
    return [step for step in steps if step <= max(0, steps[-1] - lag)]


class DamagedSnapshots:
    """What one role knows of the damaged snapshots of a run."""

    def __init__(self, policies: Place, *, follows: str):
        """Args: follows: what the role does without a damaged snapshot, in part of a sentence."""
        self._policies, self._follows = policies, follows
        # The newest published step, −1 before the first; only kept by `load_newest` under a lag.
        self.newest = -1
        # Step -> the version of its commit.json as it was read. One that is forgotten would be read again and again.
        self._found: dict[int, bytes] = {}
        # Step -> the sentence about it, of the newest steps.
        self._sentences: dict[int, str] = {}

    def above(self, step: int) -> str:
        """A sentence about the newest snapshot that was found damaged, "" where there is none above this step."""
        sentences = dict(self._sentences)  # another thread may read snapshots meanwhile
        newest = max(sentences, default=step)
        return sentences[newest] if newest > step else ""

    def without(self, steps: Iterable[int]) -> list[int]:
        """The steps whose snapshots are not known to be damaged, or have been published again since. Keeps their order."""
        asked = list(steps)
        known = {step: (self._commit(step), self._found[step]) for step in asked if step in self._found}
        for step, version in places.changed(known).items():
            if not isinstance(version, OSError):  # of a storage that does not answer, which says nothing
                del self._found[step]
                self._sentences.pop(step, None)
        return [step for step in asked if step not in self._found]

    def attempt(self, step: int, read: Callable[[], T]) -> T | None:
        """What `read` returns, which reads the snapshot of a step; None where that is damaged, which is said once.

        Raises: as `read`, but for Damaged.
        """
        version = places.changed({step: (self._commit(step), b"")}).get(step)
        if isinstance(version, OSError):
            raise version
        try:
            return read()
        except Damaged as error:
            self._note(step, version or b"", error)
            return None

    def load_newest(
        self, specs: Specs, shardings: Params, *, newer_than: int, lag: int = 0, dtype: str = "float32"
    ) -> tuple[int, Params] | None:
        """The newest whole snapshot above the step `newer_than`, None where there is none. Args: lag: see `lagging`.

        Where one is damaged, the one before is taken; where one vanishes while it is read, this looks again.
        """
        damaged: set[int] = set()
        while True:
            above = layout.steps_in(self._policies, newer_than=newer_than)
            while lag and above and not is_committed(self._policies, above[-1]):
                above.pop()  # it is being written
            self.newest = above[-1] if lag and above else self.newest
            asked = self.without(step for step in reversed(lagging(above, lag=lag)) if step not in damaged)
            step = next((step for step in asked if is_committed(self._policies, step)), None)
            if step is None:
                return None
            load = functools.partial(load_step, self._policies, step, specs, shardings, dtype=dtype)
            with contextlib.suppress(FileNotFoundError):
                if (loaded := self.attempt(step, load)) is not None:
                    return step, loaded
                damaged.add(step)

    def _commit(self, step: int) -> Place:
        return self._policies / layout.step_name(step) / COMMIT

    def _note(self, step: int, version: bytes, error: Damaged) -> None:
        folder = self._policies / layout.step_name(step)
        sentence = (
            f"the snapshot of step {step} is damaged: {error}. {self._follows}; a trainer that resumes at this step publishes it "
            f"again, and to be rid of it, remove {folder}"
        )
        log.warning("%s", sentence)
        self._found[step], self._sentences[step] = version, sentence
        for oldest in sorted(self._sentences)[:-_MOST_SENTENCES]:
            del self._sentences[oldest]
