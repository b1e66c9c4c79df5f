"""Parameters on every wire: a plain nested dict of arrays whose dotted names are the paths of the module that they belong to.

`define` extracts from a module, without weights, the graph definition, from which a traced function rebuilds the module.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from tba_jax import sharding
from tba_jax.schemas import flatten

_ALIGNMENT = 64  # bytes: JAX takes over a host buffer that is aligned so, and copies any other

M = TypeVar("M", bound=nnx.Module)

Params = dict[str, Any]
# The same nesting as Params, with a ParamSpec at every leaf.
Specs = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParamSpec:
    """One parameter, as its module states it.

    axes: logical axes of its dimensions (sharding.RULES); adapter: whether it belongs to a LoRA adapter.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    dtype: str = "float32"
    adapter: bool = False


def parameter(
    letters: str,
    sizes: Mapping[str, int],
    initializer: nnx.Initializer,
    rngs: nnx.Rngs,
    kind: type[nnx.Variable] = nnx.Param,
) -> Any:
    """A float32 parameter whose dimensions are these letters. Args: sizes: letter -> size; kind: nnx.LoRAParam for adapters."""
    shape = tuple(sizes[letter] for letter in letters)
    return kind(initializer(rngs.params(), shape, jnp.float32), axes=sharding.logical_axes(letters))


def stack(make: Callable[[nnx.Rngs], M], count: int, rngs: nnx.Rngs) -> M:
    """`count` modules in the form of one: each of its parameters has a first axis "layers". See `scan`."""
    graphdefs = []

    def one(key: jax.Array) -> nnx.State:
        graphdef, state = nnx.split(make(nnx.Rngs(key)))
        graphdefs.append(graphdef)
        return state

    state = jax.vmap(one)(jax.random.split(rngs.params(), count))  # traces `one` once
    (graphdef,) = graphdefs
    return nnx.merge(graphdef, _map_variables(lambda v: v.replace(axes=("layers", *v.get_metadata("axes"))), state))


def unstack(stacked: M, count: int) -> nnx.List:
    """The modules of a stack, one by one."""
    graphdef, state = nnx.split(stacked)

    def one(layer: int) -> M:
        return nnx.merge(graphdef, _map_variables(lambda v: v.replace(v[...][layer], axes=v.get_metadata("axes")[1:]), state))

    return nnx.List([one(layer) for layer in range(count)])


def _map_variables(function: Callable[[nnx.Variable], nnx.Variable], state: nnx.State) -> nnx.State:
    return jax.tree.map(function, state, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))


def scan(
    function: Callable[[M, jax.Array, Any], tuple[jax.Array, Any]],
    stacked: M,
    x: jax.Array,
    *,
    along: Any = None,
    dtype: str,
    policy: Callable[..., Any] | None,
    unroll: bool = False,
) -> tuple[jax.Array, Any]:
    """x after x, z = function(module, x, y) for each module of a stack in turn, and all z, stacked; z may be None.

    Args:
      along: arrays whose first axis is the stack; y is the slice of one module. None: y is None.
      dtype: the stack is cast to it once, so that what is gathered in the loop is already small.
      policy: of jax.checkpoint: what each module keeps for the backward pass; None: everything.
      unroll: whether the compiled program has each module's operations by themselves, and no loop.
    """
    graphdef, state = nnx.split(stacked)

    def step(x: jax.Array, layer: tuple[Params, Any]) -> tuple[jax.Array, Any]:
        params, y = layer
        return function(nnx.merge(graphdef, params), x, y)

    body = step if policy is None else jax.checkpoint(step, policy=policy)
    return jax.lax.scan(body, x, (cast(nnx.to_pure_dict(state), dtype), along), unroll=unroll)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Definition(Generic[M]):
    """A module without its weights: `module(definition.graphdef, params)` is the module with them.

    make: makes the module with random weights; graphdef: hashable, so it may be static under jit; specs: of all parameters.
    """

    make: Callable[[nnx.Rngs], M]
    graphdef: nnx.GraphDef
    specs: Specs

    def init(self, key: jax.Array) -> Params:
        """Random float32 parameters. Jit with out_shardings=shardings(specs, mesh) to create them sharded."""
        return pure(self.make(nnx.Rngs(key)))

    def shardings(self, mesh: Mesh) -> Params:
        return shardings(self.specs, mesh)


def define(make: Callable[[nnx.Rngs], M]) -> Definition[M]:
    """The definition of the module that `make` makes; nothing is allocated."""
    graphdef, state = nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(0))))
    specs = {
        ".".join(map(str, path)): ParamSpec(
            shape=variable.shape,
            axes=variable.get_metadata("axes"),
            dtype=str(variable.dtype),
            adapter=isinstance(variable, nnx.LoRAParam),
        )
        for path, variable in nnx.to_flat_state(state)
    }
    return Definition(make=make, graphdef=graphdef, specs=unflatten(specs))


def module(graphdef: nnx.GraphDef[M], params: Params) -> M:
    """The module with these parameters, in a traced function. nnx.merge only counts leaves; this compares their names as well.

    Raises ValueError: names a parameter that is missing or unknown.
    """
    made = nnx.merge(graphdef, params)
    wanted, given = ({path for path, _ in jax.tree.leaves_with_path(tree)} for tree in (pure(made), params))
    if different := sorted(map(jax.tree_util.keystr, wanted ^ given)):
        raise ValueError(f"the parameters are not those of the {type(made).__name__}: {different[0]} is missing or unknown")
    return made


def pure(model: nnx.Module) -> Params:
    """The parameters of a module as a plain nested dict."""
    return nnx.to_pure_dict(nnx.state(model))


def unflatten(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of schemas.flatten."""
    tree: dict[str, Any] = {}
    for name, value in leaves.items():
        *path, last = name.split(".")
        node = tree
        for part in path:
            node = node.setdefault(part, {})
        node[last] = value
    return tree


def map_specs(function: Callable[[str, ParamSpec], Any], specs: Specs) -> Params:
    """function(dotted name, ParamSpec) at every leaf."""
    return unflatten({name: function(name, spec) for name, spec in flatten(specs).items()})


def select(keep: Callable[[ParamSpec], bool], specs: Specs) -> Specs:
    """The specs for which keep(spec) is true."""
    return unflatten({name: spec for name, spec in flatten(specs).items() if keep(spec)})


def merge(first: Mapping[str, Any], second: Mapping[str, Any]) -> Params:
    """The union of both trees; a leaf that both have is taken from `second`."""
    return unflatten(flatten(first) | flatten(second))


def shapes(specs: Specs) -> Params:
    """The parameters as jax.ShapeDtypeStruct, without allocating anything."""
    return map_specs(lambda _, spec: jax.ShapeDtypeStruct(spec.shape, spec.dtype), specs)


def shardings(specs: Specs, mesh: Mesh) -> Params:
    """NamedSharding of every parameter. Raises ValueError where a mesh axis does not divide a dimension."""
    return map_specs(lambda name, spec: sharding.sharding(mesh, spec.axes, spec.shape, name=name), specs)


def sharded_shapes(specs: Specs, mesh: Mesh, *, dtype: str) -> Params:
    """The parameters on a mesh as jax.ShapeDtypeStruct. Args: dtype: of all of them. Raises: as `shardings`."""
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, dtype, sharding=s), shapes(specs), shardings(specs, mesh))


def check_divides(sizes: Mapping[str, int], specs: Specs) -> None:
    """Raises the ValueError of `shardings`, but needs no devices. sizes: mesh axis -> size."""
    map_specs(lambda name, spec: sharding.check_divides(sizes, spec.axes, spec.shape, name=name), specs)


def count(specs: Specs) -> int:
    return sum(math.prod(spec.shape) for spec in flatten(specs).values())


def cast(params: Params, dtype: str) -> Params:
    """Floating-point parameters in the compute dtype; the float32 master weights stay with the caller.

    Integer weights stay integers, and their scales float32: rounded to bfloat16 they would err as much as the integers do.
    """

    def convert(name: str, leaf: jax.Array) -> jax.Array:
        keep = not jnp.issubdtype(leaf.dtype, jnp.floating) or name.endswith(".quant_scale")
        return leaf if keep else leaf.astype(dtype)

    return unflatten({name: convert(name, leaf) for name, leaf in flatten(params).items()})


def aligned_empty(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """dtype[shape], uninitialised, at an aligned address: JAX' CPU backend makes an array of it without a copy."""
    size = math.prod(shape) * jnp.dtype(dtype).itemsize
    buffer = np.empty(size + _ALIGNMENT, np.uint8)
    start = -buffer.ctypes.data % _ALIGNMENT
    return buffer[start : start + size].view(jnp.dtype(dtype)).reshape(shape)
