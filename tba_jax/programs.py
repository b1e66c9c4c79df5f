"""Programs as a dry run compiles them: the jitted functions of a role, with the shapes that the role calls them with."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """A jitted function of a role and one call of it, without data.

    function: what the role calls; it has a method `lower`, as jax.jit and sharding.on_mesh give it.
    arguments: trees of jax.ShapeDtypeStruct with shardings; the host's part of them may be arrays.
    options: static keyword arguments.
    beside: name -> what else lies on the devices while the program runs, as such a tree, or as bytes of each device.
    room: name of a part of its memory -> names of the settings that make it less. "temporaries" and "arguments" are parts, and so
      is each name of `beside`.
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

    Args:
      parts: name -> tree of jax.ShapeDtypeStruct. A leaf is taken by a program if it is, as an object, among its arguments.
      room: see Program; for all programs alike.
    """
    found = {}
    for name, program in programs.items():
        taken = {id(leaf) for leaf in jax.tree.leaves(program.arguments)}
        rest = {part: [leaf for leaf in jax.tree.leaves(tree) if id(leaf) not in taken] for part, tree in parts.items()}
        beside = {part: leaves for part, leaves in rest.items() if leaves}
        found[name] = dataclasses.replace(program, beside=beside | dict(program.beside), room=dict(room) | dict(program.room))
    return found
