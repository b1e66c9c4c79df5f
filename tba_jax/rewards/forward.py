"""The forward pass of a frozen model on a mesh, as a program."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from tba_jax import sharding
from tba_jax.models import parameters
from tba_jax.models.parameters import Definition, Params
from tba_jax.programs import Program, shaped


@dataclasses.dataclass(frozen=True, kw_only=True)
class Forward:
    """mesh: over which rows are split; weights: their shapes, dtypes and shardings, as a tree of jax.ShapeDtypeStruct; function:
    jitted, (weights, tokens int32[rows, T], length int32[rows]) -> float32[rows, …]."""

    mesh: Mesh
    weights: Params
    function: sharding.OnMesh

    @property
    def shardings(self) -> Params:
        """NamedSharding of every weight."""
        return jax.tree.map(lambda x: x.sharding, self.weights)

    def __call__(self, weights: Params, tokens: np.ndarray, length: np.ndarray) -> np.ndarray:
        """float32[rows, …]. Args: tokens: int32[rows, T], right-padded; length: int32[rows]."""
        return np.asarray(self.function(weights, *sharding.put_rows(self.mesh, (tokens, length))))

    def program(self, *, rows: int, length: int) -> Program:
        """A call with so many rows of so many tokens."""
        shapes = jax.ShapeDtypeStruct((rows, length), jnp.int32), jax.ShapeDtypeStruct((rows,), jnp.int32)
        return Program(function=self.function, arguments=(self.weights, *shaped(shapes, sharding.rows_sharding(self.mesh))))


def make(definition: Definition[Any], score: Callable[..., jax.Array], mesh: Mesh, *, dtype: str) -> Forward:
    """Nothing is compiled or allocated here.

    Args:
      score: (module, tokens int32[rows, T], length int32[rows]) -> float32[rows, …], traced. dtype: of the weights.
    """

    def forward(weights: Params, tokens: jax.Array, length: jax.Array) -> jax.Array:
        return score(parameters.module(definition.graphdef, weights), tokens, length)

    weights, rows = parameters.sharded_shapes(definition.specs, mesh, dtype=dtype), sharding.rows_sharding(mesh)
    shardings = jax.tree.map(lambda x: x.sharding, weights)
    jitted = jax.jit(forward, in_shardings=(shardings, rows, rows), out_shardings=rows)
    return Forward(mesh=mesh, weights=weights, function=sharding.on_mesh(mesh, jitted))
