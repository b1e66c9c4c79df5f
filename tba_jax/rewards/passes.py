"""Forward passes over texts of any length: texts of similar length share a pass, and passes have few shapes."""

import dataclasses
from collections.abc import Callable, Sequence
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


# Tokens of the shortest pass.
_SHORTEST = 16


def padded_length(longest: int, limit: int) -> int:
    """The length of a pass whose longest text has `longest` tokens: a multiple of 1/8 of the next power of two, at most `limit`.

    A long pass is then less than 1.25 times as long as its longest text, and each doubling of lengths compiles four programs.
    """
    step = max(_SHORTEST, (1 << max(longest - 1, 0).bit_length()) // 8)
    return min(max(_SHORTEST, -(-longest // step) * step), limit)


def in_passes(
    encoded: Sequence[Sequence[int]],
    score: Callable[[np.ndarray, np.ndarray], np.ndarray],
    *,
    rows: int,
    limit: int,
    pad_id: int = 0,
) -> np.ndarray:
    """float32[n, ...]: the scores of n texts, in the order of the texts.

    Args:
      encoded: token ids of n texts, n at least 1, each of at most `limit` tokens.
      score: one pass, (tokens int32[rows, T], right-padded; length int32[rows]) -> float32[rows, ...].
      rows: texts of a pass. The last pass is filled up with copies of its last text.
    """
    order = np.argsort([len(ids) for ids in encoded], kind="stable")
    found = []
    for start in range(0, len(order), rows):
        part = order[start : start + rows]
        texts = [encoded[i] for i in (*part, *[part[-1]] * (rows - len(part)))]
        lengths = np.array([len(ids) for ids in texts], np.int32)
        tokens = np.full((rows, padded_length(int(lengths.max()), limit)), pad_id, np.int32)
        for row, ids in zip(tokens, texts, strict=True):
            row[: len(ids)] = ids
        found.append(score(tokens, lengths)[: len(part)])
    result = np.concatenate(found)
    result[order] = result.copy()
    return result
