"""Forward passes of frozen models over texts of any length: texts of similar length share a pass, and passes have few shapes."""

import dataclasses
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from tba_jax import sharding
from tba_jax.models import decoder, encoder, hardware, parameters
from tba_jax.models.config import DecoderConfig, EncoderConfig
from tba_jax.models.hugging_face import load
from tba_jax.models.parameters import Definition, Params
from tba_jax.programs import Program, shaped

Config = DecoderConfig | EncoderConfig

_SHORTEST = 16  # tokens of the shortest pass


def definition(config: Config) -> Definition[Any]:
    return encoder.define(config) if isinstance(config, EncoderConfig) else decoder.define(config)


def most_tokens(config: Config) -> int:
    """The tokens of the longest text that a model takes."""
    return config.position_limit if isinstance(config, EncoderConfig) else config.max_positions


def on_device(config: Any, mesh: Mesh, *, setting: str) -> Any:
    """The config as the devices of a mesh compute it. setting: of the model's folder."""
    return hardware.on_device(config, mesh.devices.flat[0], section=setting.rpartition(".")[0])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Forward:
    """A pass. mesh: over which rows are split; weights: a tree of jax.ShapeDtypeStruct with shardings; function: jitted,
    (weights, tokens int32[rows, T], length int32[rows]) -> float32[rows, …]."""

    config: Config
    mesh: Mesh
    weights: Params
    function: sharding.OnMesh

    def program(self, *, rows: int, length: int) -> Program:
        """A call with so many rows of so many tokens."""
        shapes = jax.ShapeDtypeStruct((rows, length), jnp.int32), jax.ShapeDtypeStruct((rows,), jnp.int32)
        return Program(function=self.function, arguments=(self.weights, *shaped(shapes, sharding.rows_sharding(self.mesh))))


def make(config: Config, score: Callable[..., jax.Array], mesh: Mesh) -> Forward:
    """Compiles and allocates nothing. Args: score: (module, tokens int32[rows, T], length int32[rows]) -> float32[rows, …]."""
    defined = definition(config)

    def forward(weights: Params, tokens: jax.Array, length: jax.Array) -> jax.Array:
        return score(parameters.module(defined.graphdef, weights), tokens, length)

    weights = parameters.sharded_shapes(defined.specs, mesh, dtype=config.compute_dtype)
    rows, shardings = sharding.rows_sharding(mesh), jax.tree.map(lambda x: x.sharding, weights)
    jitted = jax.jit(forward, in_shardings=(shardings, rows, rows), out_shardings=rows)
    return Forward(config=config, mesh=mesh, weights=weights, function=sharding.on_mesh(mesh, jitted))


class Loaded:
    """A pass with the weights of a folder. Several threads may call it at once; a lock lets one pass run at a time."""

    def __init__(self, forward: Forward, folder: Path, *, rows: int, limit: int, pad_id: int = 0):
        """Args: rows, limit, pad_id: see in_passes."""
        shardings = jax.tree.map(lambda x: x.sharding, forward.weights)
        self.params = load.load_params(folder, forward.config, shardings, dtype=forward.config.compute_dtype)
        self.forward, self._lock = forward, threading.Lock()
        self._shape = dict(rows=rows, limit=limit, pad_id=pad_id)

    def __call__(self, encoded: Sequence[Sequence[int]]) -> np.ndarray:
        """float32[n, …]: see in_passes."""
        with self._lock:
            return in_passes(encoded, self._pass, **self._shape)

    def _pass(self, tokens: np.ndarray, length: np.ndarray) -> np.ndarray:
        return np.asarray(self.forward.function(self.params, *sharding.put_rows(self.forward.mesh, (tokens, length))))


def padded_length(longest: int, limit: int) -> int:
    """The length of a pass whose longest text has `longest` tokens: a multiple of 1/8 of the next power of two, at most `limit`,
    so that a long pass is less than 1.25 times as long as its longest text, and few programs are compiled."""
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

    Args: encoded: token ids of n texts, n at least 1, each of at most `limit` tokens. score: one pass, (tokens int32[rows, T],
      right-padded; length int32[rows]) -> float32[rows, ...]; the last is filled up with copies of its last text.
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
