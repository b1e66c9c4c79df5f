"""Programs of roles, with the shapes that the roles call them with, and the memory that they take by the compiler's account."""

import contextlib
import dataclasses
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

# The unit of a role's figures is the largest one that its peak reaches.
UNITS = {"GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10}
_LETTERS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40, "P": 1 << 50}
_SIZE = re.compile(r"\((\d+(?:\.\d+)?)([KMGTP]?)B?\)|\b(\d+(?:\.\d+)?)([KMGTP])i?B?\b")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """A jitted function of a role and one call of it, without data.

    function: what the role calls; it has a method `lower`, as jax.jit and sharding.on_mesh give it.
    arguments: trees of jax.ShapeDtypeStruct with shardings; host arguments may be arrays. options: static keyword arguments.
    beside: name -> what else lies on the devices while the program runs, as such a tree, or as bytes of each device.
    room: part of its memory ("temporaries", "arguments" or a name of `beside`) -> the settings that make the part less.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    beside: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    room: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)

    def lower(self) -> Any:
        """The lowered program, a jax.stages.Lowered."""
        return self.function.lower(*self.arguments, **self.options)  # type: ignore[attr-defined]


def shaped(tree: Any, shardings: Any) -> Any:
    """The leaves of a tree (arrays or shapes) as jax.ShapeDtypeStruct. Args: shardings: one for all leaves, or a tree of them."""
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, jax.dtypes.canonicalize_dtype(x.dtype), sharding=s),
        tree,
        jax.tree.broadcast(shardings, tree),
    )


def again(tree: Any) -> Any:
    """Other arrays of the same shapes and layouts, see `with_beside`. Args: tree: of jax.ShapeDtypeStruct."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.format), tree)


def with_beside(
    programs: Mapping[str, Program], parts: Mapping[str, Any], room: Mapping[str, Sequence[str]]
) -> dict[str, Program]:
    """The programs of a role that holds `parts` all the time: beside each program lie the leaves that it does not take.

    Args: parts: name -> tree of jax.ShapeDtypeStruct. A leaf is taken by a program if it is, as an object, among its arguments.
    room: see Program; for all programs alike.
    """
    found = {}
    for name, program in programs.items():
        taken = {id(leaf) for leaf in jax.tree.leaves(program.arguments)}
        rest = {part: [leaf for leaf in jax.tree.leaves(tree) if id(leaf) not in taken] for part, tree in parts.items()}
        beside = {part: leaves for part, leaves in rest.items() if leaves}
        found[name] = dataclasses.replace(program, beside=beside | dict(program.beside), room=dict(room) | dict(program.room))
    return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fit:
    """Bytes on each device of a program and of what lies beside it.

    arguments, temporaries, outputs, aliased: as in jax' CompiledMemoryStats; aliased: outputs that take the place of arguments.
    beside: by name, see Program. seconds: of tracing and compiling. refused: the compiler refused the program as too large for a
    device, and said one number: temporaries are the part of it that is no argument.
    """

    name: str
    program: Program
    arguments: int
    temporaries: int
    outputs: int
    aliased: int
    beside: Mapping[str, int]
    refused: bool
    seconds: float = 0.0

    @property
    def peak(self) -> int:
        """All that is live together while the program runs."""
        return sum(self.parts().values())

    def parts(self) -> dict[str, int]:
        """The peak by parts."""
        own = {"arguments": self.arguments, "temporaries": self.temporaries, "outputs": self.outputs - self.aliased}
        return own | dict(self.beside)


class Measure:
    """Compiles the programs of a role on one set of devices."""

    def __init__(self) -> None:
        # Ids of leaves -> (leaves, which keep their ids, bytes).
        self._known: dict[frozenset[int], tuple[Any, int]] = {}

    def fit(self, name: str, program: Program) -> Fit:
        beside = {part: held if isinstance(held, int) else self.size(held) for part, held in program.beside.items()}
        begin, refused = time.monotonic(), False
        try:
            stats: Any = program.lower().compile().memory_analysis()
            arguments, temporaries = stats.argument_size_in_bytes, stats.temp_size_in_bytes
            outputs, aliased = stats.output_size_in_bytes, stats.alias_size_in_bytes
        except jax.errors.JaxRuntimeError as error:
            arguments = self.size([x for x in jax.tree.leaves(program.arguments) if isinstance(x, jax.ShapeDtypeStruct)])
            temporaries, outputs, aliased, refused = _wanted(error) - arguments, 0, 0, True
        own = dict(arguments=arguments, temporaries=temporaries, outputs=outputs, aliased=aliased)
        return Fit(name=name, program=program, **own, beside=beside, refused=refused, seconds=time.monotonic() - begin)

    def size(self, tree: Any) -> int:
        """Bytes of arrays of these shapes on each device, as the compiler lays them out: tiles may make them larger."""
        groups: dict[frozenset[Any], list[Any]] = {}
        for leaf in jax.tree.leaves(tree):
            groups.setdefault(frozenset(leaf.sharding.device_set), []).append(leaf)
        return sum(self._size_on_same_devices(leaves) for leaves in groups.values())

    def _size_on_same_devices(self, leaves: Sequence[Any]) -> int:
        key = frozenset(map(id, leaves))
        if key not in self._known:
            takes = jax.jit(lambda _: jnp.zeros((), jnp.int32), keep_unused=True)
            try:
                stats: Any = takes.lower(leaves).compile().memory_analysis()
                size = stats.argument_size_in_bytes
            except jax.errors.JaxRuntimeError as error:
                size = _wanted(error)
            self._known[key] = leaves, size
        return self._known[key][1]


def sizes_in(message: str) -> list[int]:
    """The sizes in bytes that a message of the compiler names: how much a program wants comes before how much there is."""
    found = (match.groups() for match in _SIZE.finditer(message))
    return [int(float(a or c) * _LETTERS[(b if a else d) or ""]) for a, b, c, d in found]


def _wanted(error: jax.errors.JaxRuntimeError) -> int:
    """The bytes that a program wants which the compiler refused. Raises the error where it is about something else."""
    sizes = sizes_in(str(error))
    if "RESOURCE_EXHAUSTED" not in str(error) or not sizes:
        raise error
    return sizes[0]


def device_memory(device: Any) -> int | None:
    """Bytes that programs may take on a device; None where the platform does not report it, as on a CPU.

    For a device that is not here, the compiler names its memory when it refuses a program that no device could hold.
    """
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        stats = device.memory_stats()
        return None if stats is None else stats.get("bytes_limit")
    too_large = jax.ShapeDtypeStruct((1 << 50,), jnp.int8, sharding=jax.sharding.SingleDeviceSharding(device))
    try:
        jax.jit(lambda x: x + 1).lower(too_large).compile()
    except jax.errors.JaxRuntimeError as error:
        sizes = sizes_in(str(error))
        return sizes[1] if "RESOURCE_EXHAUSTED" in str(error) and len(sizes) > 1 else None
    return None


def unit_of(size: int) -> str:
    return next((unit for unit, bytes_of in UNITS.items() if size >= bytes_of), "KiB")


def in_words(size: int) -> str:
    return f"{size / UNITS[unit_of(size)]:.2f} {unit_of(size)}"
