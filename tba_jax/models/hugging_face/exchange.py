"""The import of a checkpoint by several processes: each reads its part of the files once, and the devices exchange the parts.

A device's slices of a tensor are seldom one piece of the file: where the model's width is divided, they are a part of every row,
and whoever reads them touches the whole file. So every device is given one run of each tensor instead, as it lies in the file;
a program of the whole mesh turns the runs into parameters in their shardings.
"""

import functools
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tba_jax.models.hugging_face.files import Stored
from tba_jax.models.parameters import ParamSpec

log = logging.getLogger(__name__)

# A parameter that a tensor holds: its name, the number of its layer (None: it has no layers), and how it lies in the tensor.
Part = tuple[str, int | None, Stored]


def load(
    tensors: Sequence[tuple[Any, Sequence[Part]]],
    specs: Mapping[str, ParamSpec],
    shardings: Mapping[str, NamedSharding],
    *,
    sizes: Mapping[str, int],
    dtype: str,
) -> dict[str, jax.Array]:
    """Parameters in their shardings; to be called by all processes of the mesh.

    While a tensor becomes parameters, a device may hold all of it.

    Args:
      tensors: each with `map()`, `name`, `path` and `shape`, and the parameters that it holds.
      specs, shardings: of each parameter. sizes: letter of the axis table -> size. dtype: of the parameters.

    Raises:
      ValueError: a tensor holds a number that is not finite; names it and its file.
    """
    (mesh,) = {each.mesh for each in shardings.values()}
    assert isinstance(mesh, Mesh)
    known: dict[Any, Any] = {}  # programs, which the layers of a parameter share
    loaded: dict[str, jax.Array] = {}
    finite: list[tuple[Any, jax.Array]] = []
    read = whole = 0
    for tensor, parts in tensors:
        runs, bytes_read = _runs(tensor, mesh)
        read, whole = read + bytes_read, whole + math.prod(tensor.shape) * runs.dtype.itemsize
        for path, layer, stored in parts:
            key = path, stored, tensor.shape, runs.dtype
            if key not in known:
                known[key] = _programs(specs[path], shardings[path], stored, tensor.shape, sizes=sizes, dtype=dtype)
            into, zeros = known[key]
            buffer = loaded.pop(path) if path in loaded else zeros()
            loaded[path], is_finite = into(buffer, runs, 0 if layer is None else layer)
            finite.append((tensor, is_finite))
        del runs
    log.info("process %d read %d of the %d bytes of the checkpoint's tensors", jax.process_index(), read, whole)
    for tensor, is_finite in finite:
        if not bool(np.asarray(is_finite)):
            raise ValueError(f"{tensor.path}: {tensor.name} holds numbers that are not finite")
    return loaded


def _runs(tensor: Any, mesh: Mesh) -> tuple[jax.Array, int]:
    """The tensor's elements in the order of the file, a run on each device of the mesh; and the bytes that this process read."""
    elements = tensor.map().reshape(-1)
    each = -(-elements.size // mesh.size)
    read = 0

    def run(index: tuple[slice, ...] | None) -> np.ndarray:
        nonlocal read
        assert index is not None
        start = index[0].start or 0
        found = np.array(elements[start : start + each])
        read += found.nbytes
        return np.pad(found, (0, each - found.size))

    divided = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    return jax.make_array_from_callback((each * mesh.size,), divided, run), read


def _programs(
    spec: ParamSpec,
    sharding: NamedSharding,
    stored: Stored,
    shape: tuple[int, ...],
    *,
    sizes: Mapping[str, int],
    dtype: str,
) -> tuple[Any, Any]:
    """(parameter so far, runs, layer) to (parameter with what the tensor holds of it, whether it is finite); and () to zeros."""
    has_layers = spec.axes[0] == "layers"

    def into(buffer: jax.Array, runs: jax.Array, layer: jax.Array) -> tuple[jax.Array, jax.Array]:
        view = stored.view(runs[: math.prod(shape)].reshape(shape), sizes)
        values = view.astype(dtype)
        whole = jax.lax.dynamic_update_index_in_dim(buffer, values, layer, 0) if has_layers else values
        return whole, jnp.isfinite(view).all()

    zeros = functools.partial(jnp.zeros, spec.shape, dtype)
    whole = NamedSharding(sharding.mesh, PartitionSpec())
    return jax.jit(into, donate_argnums=0, out_shardings=(sharding, whole)), jax.jit(zeros, out_shardings=sharding)
