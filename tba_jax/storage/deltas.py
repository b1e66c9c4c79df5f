"""The lossless difference of two arrays of one shape and dtype, for snapshots of which few values change.

The bit patterns are taken as unsigned integers and subtracted, modulo their range: a value that moved to its neighbour differs
by 1 or −1, and every pattern comes back, that of −0.0 and of each NaN too. The differences 0, −1, 1, −2, … become 0, 1, 2, 3, …
("zigzag"), so that nearly all of their bits are 0, and their bits lie side by side on disk, plane by plane.
"""

import dataclasses
import itertools
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import tensorstore as ts

# Values that are subtracted at a time: they and what comes of them fit into a core's cache.
_PIECE = 1 << 16
_Read = Callable[[ts.IndexDomain], np.ndarray]


def are_written(publish: Any) -> bool:
    """Args: publish: settings. An update leaves most values of bfloat16 as they were, and hardly one of float32."""
    return publish.full_every > 1 and publish.dtype != "float32"


def data_type(dtype: str) -> str:
    """The dtype of a difference of arrays of `dtype`: unsigned integers of the same size."""
    return f"uint{8 * jnp.dtype(dtype).itemsize}"


def codecs(dtype: str) -> list[dict[str, Any]]:
    """Zarr 3 codecs of differences of arrays of `dtype`, with a checksum of the bytes on disk.

    Bit planes with zstd 1 take fewer bytes than byte planes, none, or lz4, in about the same time; zstd 3 takes twice as long.
    """
    planes = {"cname": "zstd", "clevel": 1, "shuffle": "bitshuffle", "typesize": jnp.dtype(dtype).itemsize, "blocksize": 0}
    little = {"name": "bytes", "configuration": {"endian": "little"}}
    return [little, {"name": "blosc", "configuration": planes}, {"name": "crc32c"}]


def _pieces(*arrays: np.ndarray) -> Iterator[list[np.ndarray]]:
    flat = [array.reshape(-1) for array in arrays]
    return ([each[begin : begin + _PIECE] for each in flat] for begin in range(0, flat[0].size, _PIECE))


def _bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view(data_type(str(array.dtype)))


def difference(block: np.ndarray, base: np.ndarray) -> np.ndarray:
    """uint[…], 0 where a value is that of `base`. Args: block, base: of one shape and dtype."""
    result = np.empty_like(_bits(block))
    for there, ours, out in _pieces(_bits(base), _bits(block), result):
        moved = ours - there
        np.negative(moved >> (8 * moved.itemsize - 1), out=out)
        np.bitwise_xor(moved << 1, out, out=out)
    return result


def restore(base: np.ndarray, difference: np.ndarray) -> np.ndarray:
    """The block that `difference` was made of, bit by bit. Args: as it was made of and returned."""
    result = np.empty_like(_bits(base))
    for there, zigzag, out in _pieces(_bits(base), np.ascontiguousarray(difference), result):
        np.negative(zigzag & 1, out=out)
        np.bitwise_xor(zigzag >> 1, out, out=out)
        np.add(there, out, out=out)
    return result.view(base.dtype)


def sums(block: np.ndarray, chunk: Sequence[int], *, begin: Sequence[int]) -> dict[str, int]:
    """Chunk -> CRC-32 of its values in C order, of every chunk of a block. A chunk is named by where it begins, "128,0".

    Args: block: made of whole chunks; chunk: shape of a chunk; begin: of the block in its array.
    """
    axes = [range(0, length, size) for length, size in zip(block.shape, chunk, strict=True)]
    parts = {at: tuple(slice(a, a + size) for a, size in zip(at, chunk, strict=True)) for at in itertools.product(*axes)}
    return {",".join(str(a + b) for a, b in zip(at, begin, strict=True)): _checksum(block[part]) for at, part in parts.items()}


def _checksum(block: np.ndarray) -> int:
    return zlib.crc32(_bits(block).data)


@dataclasses.dataclass(frozen=True)
class Base:
    """What this process wrote of a full snapshot. name: of its folder; blocks: parameter -> its blocks on the host."""

    name: str
    blocks: Mapping[str, Sequence[np.ndarray]]


class Held:
    """The values of one full snapshot on the host of a reader, as far as they were read: a later delta is then read alone.

    snapshot: its name, "" before the first delta is read. From then on it takes as many bytes as this process reads of it.
    """

    def __init__(self) -> None:
        self.snapshot = ""
        # Parameter -> its values, and the chunks that are there. Pages of other chunks are never touched, and take no memory.
        self._arrays: dict[str, tuple[np.ndarray, set[str]]] = {}

    def take(self, snapshot: str) -> None:
        """Forgets every other snapshot. Args: snapshot: the name of the one that is read next."""
        if snapshot != self.snapshot:
            self.snapshot, self._arrays = snapshot, {}

    def reader(self, name: str, store: Callable[[], ts.TensorStore], shape: tuple[int, ...], dtype: str) -> _Read:
        """Reads chunks of a parameter of the snapshot, each of them once. Args: store: opens its array."""
        array, there = self._arrays.setdefault(name, (np.empty(shape, jnp.dtype(dtype)), set()))

        def read(domain: ts.IndexDomain) -> np.ndarray:
            part = array[domain.index_exp]
            if (chunk := ",".join(map(str, domain.inclusive_min))) not in there:
                part[...] = store()[domain].read().result()
                there.add(chunk)
            return part

        return read


def rebuilt(delta: ts.TensorStore, base: _Read, written: Mapping[str, int], dtype: str) -> ts.TensorStore:
    """An array of `dtype`, of which each chunk is made of `delta` and the base as it is read.

    Args: base: values of the base; written: chunk -> its checksum. Reads raise ValueError where a checksum is another.
    """

    def read(domain: ts.IndexDomain) -> np.ndarray:
        values = restore(base(domain), delta[domain].read().result())
        if written.get(chunk := ",".join(map(str, domain.inclusive_min))) != _checksum(values):
            raise ValueError(f"the chunk at {chunk} is not what was written, the base is another or damaged")
        return values

    return computed(read, like=delta, dtype=dtype)


def computed(read: _Read, *, like: ts.TensorStore, dtype: str) -> ts.TensorStore:
    """An array of `dtype` with the shape and the chunks of `like`, whose chunks `read` returns."""

    def fill(domain: ts.IndexDomain, out: np.ndarray, _: Any) -> None:
        out[...] = read(domain)

    chunk = like.chunk_layout.read_chunk.shape
    layout = ts.ChunkLayout(read_chunk_shape=chunk, write_chunk_shape=chunk)
    # The threads that compute chunks wait for those that read: were they the same, all of them might wait.
    context = ts.Context({"data_copy_concurrency": {"limit": os.cpu_count() or 1}})
    return ts.virtual_chunked(fill, dtype=ts.dtype(dtype), shape=like.shape, chunk_layout=layout, context=context)
