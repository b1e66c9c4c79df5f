"""Parameters as a nested dict of arrays, and the table that describes each of them once: shape, logical axes, init."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from tba_jax import mesh as mesh_lib

_ALIGNMENT = 64  # bytes: JAX takes over a host buffer that is aligned so, and copies any other

Params = dict[str, Any]
# The same nesting as Params, with a ParamSpec at every leaf.
Specs = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParamSpec:
    """One parameter.

    shape; axes: logical axes of its dimensions (mesh.RULES); init_mean, init_std: of its normal initialisation; inputs: for
    the weight of a linear map, how many dimensions (after "layers") it contracts with its input, else 0.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    init_mean: float = 0.0
    init_std: float = 0.0
    inputs: int = 0


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"layers": {"up": {"weight": x}}} -> {"layers.up.weight": x}. Works for parameters, specs and shardings alike."""
    leaves: dict[str, Any] = {}
    for name, value in tree.items():
        leaves |= flatten(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return leaves


def unflatten(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `flatten`."""
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


def merge(first: Mapping[str, Any], second: Mapping[str, Any]) -> Params:
    """Both trees in one; a leaf that both have is taken from `second`."""
    return unflatten(flatten(first) | flatten(second))


def shapes(specs: Specs, dtype: str = "float32") -> Params:
    """The parameters as jax.ShapeDtypeStruct, without allocating anything."""
    return map_specs(lambda _, spec: jax.ShapeDtypeStruct(spec.shape, jnp.dtype(dtype)), specs)


def shardings(specs: Specs, mesh: Mesh) -> Params:
    """NamedSharding of every parameter. Raises ValueError where a mesh axis does not divide a dimension."""
    return map_specs(lambda name, spec: mesh_lib.sharding(mesh, spec.axes, spec.shape, name=name), specs)


def check_divides(sizes: Mapping[str, int], specs: Specs) -> None:
    """Raises ValueError where `shardings` would, without devices. sizes: mesh axis -> size."""
    map_specs(lambda name, spec: mesh_lib.check_divides(sizes, spec.axes, spec.shape, name=name), specs)


def count(specs: Specs) -> int:
    return sum(math.prod(spec.shape) for spec in flatten(specs).values())


def init(key: jax.Array, specs: Specs) -> Params:
    """Random float32 parameters. Jit with out_shardings=shardings(specs, mesh) to create them sharded."""

    def draw(name: str, spec: ParamSpec) -> jax.Array:
        mean = jnp.full(spec.shape, spec.init_mean, jnp.float32)
        if spec.init_std == 0.0:
            return mean
        name_key = jax.random.fold_in(key, np.uint32(hash_name(name)))
        return mean + spec.init_std * jax.random.normal(name_key, spec.shape, jnp.float32)

    return map_specs(draw, specs)


def hash_name(name: str) -> int:
    """A 32-bit FNV-1a hash: a parameter's init depends on its name alone, not on what else the model has."""
    value = 2166136261
    for byte in name.encode():
        value = ((value ^ byte) * 16777619) & 0xFFFFFFFF
    return value


def cast(params: Params, dtype: str) -> Params:
    """Floating-point parameters in the compute dtype; the float32 master weights stay with the caller.

    Integer weights stay integers, and their scales float32: rounded to bfloat16 they would err as much as the integers do.
    """

    def convert(name: str, leaf: jax.Array) -> jax.Array:
        keep = not jnp.issubdtype(leaf.dtype, jnp.floating) or name.endswith(".quant_scale")
        return leaf if keep else leaf.astype(dtype)

    return unflatten({name: convert(name, leaf) for name, leaf in flatten(params).items()})


def aligned_empty(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """dtype[shape], uninitialised, at an address that JAX' CPU backend takes over without a copy."""
    size = math.prod(shape) * jnp.dtype(dtype).itemsize
    buffer = np.empty(size + _ALIGNMENT, np.uint8)
    start = -buffer.ctypes.data % _ALIGNMENT
    return buffer[start : start + size].view(jnp.dtype(dtype)).reshape(shape)
