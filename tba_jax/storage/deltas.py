"""The lossless difference of two arrays of one shape and dtype, for snapshots of which few values change.

The bit patterns are taken as unsigned integers and subtracted, modulo their range: a value that moved to its neighbour differs
by 1 or −1, and every pattern comes back, that of −0.0 and of each NaN too. The differences 0, −1, 1, −2, … become 0, 1, 2, 3, …
("zigzag"), so that nearly all of their bits are 0, and their bits lie side by side on disk, plane by plane, where zstd finds
them. Of a policy at a learning rate of 1e-6 that leaves 1 to 8 % of the bytes (benchmarks/RESULTS.md, "Deltas").
"""

import itertools
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

# Values that are subtracted at a time: they and what comes of them fit into a core's cache.
_PIECE = 1 << 16


def data_type(dtype: str) -> str:
    """The dtype of a difference of arrays of `dtype`: unsigned integers of the same size."""
    return f"uint{8 * jnp.dtype(dtype).itemsize}"


def codecs(dtype: str) -> list[dict[str, Any]]:
    """Zarr 3 codecs of differences of arrays of `dtype`, with a checksum of the bytes on disk.

    Of what tensorstore has, bit planes with zstd 1 are the smallest and next to the fastest; zstd 3 gains nothing.
    """
    planes = {"cname": "zstd", "clevel": 1, "shuffle": "bitshuffle", "typesize": jnp.dtype(dtype).itemsize, "blocksize": 0}
    return [
        {"name": "bytes", "configuration": {"endian": "little"}},
        {"name": "blosc", "configuration": planes},
        {"name": "crc32c"},
    ]


def _pieces(*arrays: np.ndarray) -> Iterator[tuple[np.ndarray, ...]]:
    flat = [array.reshape(-1) for array in arrays]
    for begin in range(0, flat[0].size, _PIECE):
        yield tuple(each[begin : begin + _PIECE] for each in flat)


def _bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view(data_type(str(array.dtype)))


def difference(block: np.ndarray, base: np.ndarray) -> np.ndarray:
    """uint[…], 0 where a value is that of `base`. Args: block, base: of one shape and dtype."""
    new, old = _bits(block), _bits(base)
    result = np.empty_like(new)
    sign = 8 * new.itemsize - 1
    for there, ours, out in _pieces(old, new, result):
        moved = ours - there
        np.negative(moved >> sign, out=out)
        np.bitwise_xor(moved << 1, out, out=out)
    return result


def restore(base: np.ndarray, difference: np.ndarray) -> np.ndarray:
    """The block that `difference` was made of, bit by bit. Args: as it was made of and returned."""
    old = _bits(base)
    result = np.empty_like(old)
    for there, zigzag, out in _pieces(old, np.ascontiguousarray(difference), result):
        np.negative(zigzag & 1, out=out)
        np.bitwise_xor(zigzag >> 1, out, out=out)
        np.add(there, out, out=out)
    return result.view(base.dtype)


def sums(block: np.ndarray, chunk: Sequence[int], *, begin: Sequence[int]) -> dict[str, int]:
    """Chunk -> CRC-32 of its values in C order, of every chunk of a block. A chunk is named by its place in the grid, "1/0".

    Args: block: made of whole chunks, where the array does not end before; chunk: shape of a chunk; begin: of the block in its
    array.
    """
    axes = list(zip(begin, chunk, block.shape, strict=True))
    places = [range(start // size, -(-(start + length) // size)) for start, size, length in axes]

    def part(place: Sequence[int]) -> np.ndarray:
        return block[
            tuple(slice(p * size - start, (p + 1) * size - start) for p, (start, size, _) in zip(place, axes, strict=True))
        ]

    return {"/".join(map(str, place)): zlib.crc32(_bits(part(place))) for place in itertools.product(*places)}


def differing(found: Mapping[str, int], written: Mapping[str, int]) -> str:
    """The first chunk whose sum is not the one that was written, "" where there is none."""
    return next((place for place, crc in found.items() if written.get(place) != crc), "")
