"""Device meshes, and the table that maps logical axes of arrays to mesh axes."""

import contextlib
import functools
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

MESH_AXES = ("data", "fsdp", "tensor")

# Logical axis -> mesh axes it is split over. Every array in the project is sharded by this table alone.
RULES: dict[str, tuple[str, ...]] = {
    "rows": ("data", "fsdp"),
    "vocab": ("tensor",),
    "embed": ("fsdp",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "ffn": ("tensor",),
    "experts": ("tensor",),
    "expert_ffn": (),
    "layers": (),
    "head": (),
    "positions": (),
    "token_types": (),
    "labels": (),
    "rank": (),
}

# Axes that stay whole where their mesh axes do not divide them, instead of being refused: GPT-2's vocabulary of 50257 is odd.
_MAY_STAY_WHOLE = ("vocab",)

# Letter of the axis table -> logical axis of a parameter's dimension, where the parameter rests.
_AT_REST = {
    "L": "layers",
    "D": "embed",
    "N": "heads",
    "G": "kv_heads",
    "H": "head",
    "F": "ffn",
    "e": "experts",
    "f": "expert_ffn",
    "E": "ffn",
    "V": "vocab",
    "S": "positions",
    "A": "token_types",
    "C": "labels",
    "r": "rank",
}

# Letter of the axis table -> logical axis, where a value is computed. Width is whole there: parameters, which are split over
# fsdp where they rest, are gathered for their use, and activations are split by rows. Letters that are not named are whole.
_COMPUTED = {"B": "rows", "Q": "rows", "t": "rows", "N": "heads", "G": "kv_heads", "F": "ffn", "V": "vocab", "e": "experts"}

# JAX' name of host memory that devices copy from and to.
PINNED_HOST = "pinned_host"


def mesh_shape(sizes: tuple[int, int, int], devices: int, *, setting: str) -> tuple[int, int, int]:
    """Resolves (data, fsdp, tensor), where one data size of -1 means "all the devices that are left".
    Raises ValueError: the sizes do not make up the number of devices; names both numbers and the setting."""
    data, fsdp, tensor = sizes
    if data == -1 and fsdp * tensor > 0 and devices % (fsdp * tensor) == 0:
        data = devices // (fsdp * tensor)
    if min(data, fsdp, tensor) < 1 or data * fsdp * tensor != devices:
        raise ValueError(
            f"{setting} data={sizes[0]} × fsdp={fsdp} × tensor={tensor} does not make up the {devices} devices of this role"
        )
    return data, fsdp, tensor


def make_mesh(sizes: tuple[int, int, int], *, setting: str, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh over `devices` (default: all of this process' world) with axes MESH_AXES.

    A process that makes a mesh of several CPU devices no longer uses JAX' compilation cache, see `_leave_compilation_cache`.
    """
    devices = jax.devices() if devices is None else devices
    shape = mesh_shape(sizes, len(devices), setting=setting)
    if len(devices) > 1 and devices[0].platform == "cpu":
        _leave_compilation_cache()
    return jax.make_mesh(shape, MESH_AXES, axis_types=(AxisType.Auto,) * 3, devices=devices)


def _leave_compilation_cache() -> None:
    """From now on, this process compiles its programs itself.

    XLA loses the order of the collectives of a CPU program where it reads the program from the cache (jaxlib 0.10.2): then
    devices wait for each other in different collectives, and processes mix up their data.
    """
    if jax.config.jax_enable_compilation_cache:  # type: ignore[attr-defined]
        jax.config.update("jax_enable_compilation_cache", False)
        compilation_cache.reset_cache()  # JAX reads the setting at the first compilation of a process, and after this call


def policy_devices(task_devices: int, devices: Sequence[jax.Device] | None = None) -> Sequence[jax.Device]:
    """The devices of a role (None: this process') for its policy: all but the last `task_devices`, which task_mesh has."""
    devices = jax.devices() if devices is None else devices
    return devices[: len(devices) - task_devices]


def task_mesh(task_devices: int, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The mesh of the models that a task scores with: the last `task_devices` devices of a role (None: this process'); 0: all,
    beside the policy."""
    devices = (jax.devices() if devices is None else devices)[-task_devices:]
    return make_mesh((len(devices), 1, 1), setting="task_devices", devices=devices)


def logical_axes(letters: str) -> tuple[str, ...]:
    """The logical axes of a parameter whose dimensions are these letters of the axis table: "DNH" -> embed, heads, head."""
    return tuple(_AT_REST[letter] for letter in letters)


def partition_spec(axes: Sequence[str | None], whole: Sequence[str] = ()) -> PartitionSpec:
    """The partition of an array whose dimensions carry these logical axes (None, or named in `whole`: replicated).
    Raises ValueError: an axis is not in RULES, or two dimensions claim the same mesh axis."""
    parts: list[tuple[str, ...] | None] = []
    for axis in axes:
        if axis is not None and axis not in RULES:
            raise ValueError(f"unknown logical axis {axis!r}; known: {sorted(RULES)}")
        parts.append(RULES[axis] or None if axis is not None and axis not in whole else None)
    used = [name for part in parts if part for name in part]
    if len(used) != len(set(used)):
        raise ValueError(f"logical axes {list(axes)} map two dimensions to the same mesh axis: {used}")
    return PartitionSpec(*parts)


def sharding(mesh: Mesh, axes: Sequence[str | None], shape: Sequence[int], *, name: str) -> NamedSharding:
    """The sharding of the array called `name`.
    Raises ValueError: a dimension is not divisible by the mesh axes it is split over; names both numbers."""
    check_divides(dict(mesh.shape), axes, shape, name=name)
    sizes = zip(axes, shape, strict=True)
    whole = [axis for axis, size in sizes if axis in _MAY_STAY_WHOLE and size % _ways(dict(mesh.shape), axis)]
    return NamedSharding(mesh, partition_spec(axes, whole))


def _ways(sizes: Mapping[str, int], axis: str | None) -> int:
    """Parts that the mesh splits a logical axis into. sizes: mesh axis -> size."""
    return math.prod(sizes[mesh_axis] for mesh_axis in RULES[axis]) if axis is not None else 1


def check_divides(sizes: Mapping[str, int], axes: Sequence[str | None], shape: Sequence[int], *, name: str) -> None:
    """Raises ValueError where a dimension is not divisible by the mesh axes it is split over. sizes: mesh axis -> size."""
    for size, axis in zip(shape, axes, strict=True):
        if axis not in _MAY_STAY_WHOLE and size % (ways := _ways(sizes, axis)):
            raise ValueError(f"{name}: axis {axis!r} of size {size} is not divisible by {ways} (mesh axes {RULES[axis or '']})")


def constrain(x: jax.Array, axes: str) -> jax.Array:
    """Splits an intermediate value over the mesh of the context (`on_mesh`) as its letters say; without a mesh, x as it is.
    Args: axes: one letter of the axis table for each dimension of x. A dimension that its mesh axes do not divide stays whole."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return x
    return jax.lax.with_sharding_constraint(x, _computed_partition(dict(mesh.shape), axes, x.shape))


def by_device(function: Callable[..., Any], *args: jax.Array | None, axes: Sequence[str], result: str | tuple[str, ...]) -> Any:
    """function(*args), where each device of the mesh of the context (`on_mesh`) computes its own part by itself.

    The compiler splits no kernel over devices: without this, each device would need the whole of the arguments.

    Args: axes: for each argument, one letter of the axis table for each of its dimensions, split as in `constrain`; those of
    None are not read. Heads are split where N and G both can be. result: the letters of the result, each of which an argument has
    too; a tuple, if the result is one.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return function(*args)
    split: dict[str, Any] = {}
    for letters, x in zip(axes, args, strict=True):
        if x is not None:
            split |= dict(zip(letters, _computed_partition(dict(mesh.shape), letters, x.shape), strict=True))
    if None in (split.get("N"), split.get("G")):
        split |= {"N": None, "G": None}

    def spec(letters: str) -> PartitionSpec:
        return PartitionSpec(*(split[letter] for letter in letters))

    in_specs = tuple(None if x is None else spec(letters) for letters, x in zip(axes, args, strict=True))
    return jax.shard_map(function, in_specs=in_specs, out_specs=jax.tree.map(spec, result), check_vma=False)(*args)


def platform() -> str:
    """The platform for which a function is traced: of the mesh of the context (`on_mesh`), else of this process."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def computed_sharding(mesh: Mesh, axes: str, shape: Sequence[int]) -> NamedSharding:
    """How `constrain` splits a value of this shape over a mesh: for what a program keeps between its calls."""
    return NamedSharding(mesh, _computed_partition(dict(mesh.shape), axes, shape))


def _computed_partition(sizes: Mapping[str, int], axes: str, shape: Sequence[int]) -> PartitionSpec:
    parts = []
    for letter, size in zip(axes, shape, strict=True):
        mesh_axes = RULES[_COMPUTED[letter]] if letter in _COMPUTED else ()
        parts.append(mesh_axes if mesh_axes and size % math.prod(sizes[axis] for axis in mesh_axes) == 0 else None)
    return PartitionSpec(*parts)


def row_ways(mesh: Mesh) -> int:
    """Parts that the mesh splits the rows of a batch into."""
    return _ways(dict(mesh.shape), "rows")


def data_ways(mesh: Mesh) -> list[Mesh]:
    """The mesh cut along "data": meshes of which each holds a whole copy of what is split over fsdp and tensor alone."""
    return [Mesh(mesh.devices[i : i + 1], mesh.axis_names, axis_types=mesh.axis_types) for i in range(mesh.shape["data"])]


# Device -> the lock of a thread that starts a program on it, see `OnMesh`.
_STARTING: dict[jax.Device, Any] = {}


class OnMesh:
    """See `on_mesh`.

    Threads that start programs of several devices at the same time wait for each other where they share a device. All devices
    then have the programs in the same order; in different orders, the devices would wait for ever in each other's collectives.
    """

    def __init__(self, mesh: Mesh, function: Callable[..., Any]):
        self._mesh, self._function = mesh, function
        devices = sorted(mesh.devices.flat, key=lambda device: device.id) if mesh.size > 1 else []
        self._starting = [_STARTING.setdefault(device, threading.RLock()) for device in devices]
        functools.update_wrapper(self, function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with contextlib.ExitStack() as stack:
            for lock in self._starting:
                stack.enter_context(lock)
            stack.enter_context(jax.set_mesh(self._mesh))
            return self._function(*args, **kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """The program for these arguments, not compiled yet. Args: shapes (jax.ShapeDtypeStruct) are enough."""
        with jax.set_mesh(self._mesh):
            return self._function.lower(*args, **kwargs)  # type: ignore[attr-defined]


def on_mesh(mesh: Mesh, function: Callable[..., Any]) -> OnMesh:
    """`function` (a jitted one), called and traced with `mesh` as the context that `constrain` looks up."""
    return OnMesh(mesh, function)


def rows_sharding(mesh: Mesh) -> NamedSharding:
    """Arrays whose first axis is rows (or queries); the other axes are replicated."""
    return NamedSharding(mesh, PartitionSpec(RULES["rows"]))


def sequences_sharding(mesh: Mesh) -> NamedSharding:
    """Arrays [n, W, ...] of micro-batches: each one has its parts of W ways, over which rows are divided."""
    return NamedSharding(mesh, PartitionSpec(None, *rows_sharding(mesh).spec))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def put(tree: Any, shardings: Any) -> Any:
    """Host arrays onto their devices. On a mesh of several processes each has the whole arrays, and puts its own parts.

    Args: shardings: a tree like `tree`, or like the first levels of it.
    """
    if all(each.is_fully_addressable for each in jax.tree.leaves(shardings)):
        return jax.device_put(tree, shardings)

    def put_parts(x: Any, each: NamedSharding) -> jax.Array:
        return jax.make_array_from_callback(np.shape(x), each, lambda part: np.asarray(x)[part])

    # jax.device_put would compare the arrays of all processes, in a collective that waits for all of them.
    return jax.tree.map(put_parts, tree, jax.tree.broadcast(shardings, tree))


def put_rows(mesh: Mesh, tree: Any) -> Any:
    """Host arrays [B, ...] onto the mesh, split over rows."""
    return put(tree, rows_sharding(mesh))


def check_ways(rows: int, ways: int, *, what: str, mesh: str) -> None:
    """Raises ValueError where `rows` do not divide by the `ways` that the devices of the role make up.

    Args: what: the settings that the rows are of; mesh: the setting of the mesh, such as learner.mesh.
    """
    if rows % ways:
        raise ValueError(f"{what} = {rows} rows are not divisible by the {ways} ways of {mesh}.data × {mesh}.fsdp")


def copy_program(dtype: str | None) -> Callable[[Any], Any]:
    """The program that copies a tree of arrays on their devices for a thread that writes them. Args: dtype: None: their own."""

    def copy(x: jax.Array) -> jax.Array:
        return jnp.copy(x) if dtype in (None, str(x.dtype)) else x.astype(dtype)

    @jax.named_scope("publish")
    def publish(tree: Any) -> Any:
        return jax.tree.map(copy, tree)

    return jax.jit(publish)
