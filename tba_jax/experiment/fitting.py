"""How much memory compiled programs take on a device, by the compiler's account."""

import dataclasses
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tba_jax.programs import Program

# The unit of a role's figures is the largest one that its peak reaches.
UNITS = {"GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10}
_LETTERS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40, "P": 1 << 50}
_SIZE = re.compile(r"\((\d+(?:\.\d+)?)([KMGTP]?)B?\)|\b(\d+(?:\.\d+)?)([KMGTP])i?B?\b")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fit:
    """Bytes on each device of a program and of what lies beside it.

    arguments, temporaries, outputs, aliased: see jax' CompiledMemoryStats; aliased: outputs that take the place of arguments.
    beside: by name, see Program. seconds: of tracing and compiling. refused: whether the compiler refused the program as too
    large for a device by itself: it then says one number for all, and temporaries are what of it is no argument.
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
        # Leaves by identity -> bytes. The trees are kept, so that no other leaf gets the identity of one.
        self._known: dict[frozenset[int], tuple[Any, int]] = {}

    def fit(self, name: str, program: Program) -> Fit:
        """Compiles a program and what says the size of that which lies beside it."""
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
    try:
        stats = device.memory_stats()
        return None if stats is None else stats.get("bytes_limit")
    except jax.errors.JaxRuntimeError:
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
