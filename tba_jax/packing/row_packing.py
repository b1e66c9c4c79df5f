"""Packing: rows as sequences of segments, which a model computes; row_layout.py says where each one lies.

Segments of one sequence do not attend to each other, and positions count from the beginning of the row.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import chex
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from tba_jax.packing import row_layout
from tba_jax.packing.row_layout import Lengths, Limits, Plan, Way


@flax.struct.dataclass
class Sequences:
    """M sequences of S tokens for each of W ways, over which devices divide rows. Token t of row b's response has number b·R + t.

    tokens: int32[W, M, S]. segments: int32[W, M, S], the number of a segment in its sequence, from 1 on; 0: padding.
    positions: int32[W, M, S], in the row. Both are None where a sequence holds one row, from its beginning on.
    prefix: int32[W, M], the sequence of the same way that holds the prompts of a sequence's responses. parents: int32[W, M, S],
    the segment there that a token's segment continues; 0: none. Both are None where rows lie apart.
    states, targets, numbers: int32[W, M, places], the response tokens of a way, spread evenly, and then padding: the place in the
    way's M·S tokens whose hidden state predicts a token, its id, and its number, B·R for padding.
    """

    tokens: chex.Array
    segments: chex.Array | None
    positions: chex.Array | None
    prefix: chex.Array | None
    parents: chex.Array | None
    states: chex.Array
    targets: chex.Array
    numbers: chex.Array


@flax.struct.dataclass
class Packed:
    """A batch of B rows in n micro-batches.

    micro_batches: leaves [n, W, M, …]. count: int32[], how many of them hold rows: the first ones. of_row: int32[B], the number
    of the micro-batch that holds a row.
    """

    micro_batches: Sequences
    count: chex.Array
    of_row: chex.Array


def of_rows(
    tokens: np.ndarray,
    prompt_length: np.ndarray,
    response_length: np.ndarray,
    *,
    limits: Limits,
    second_pass: float = 0.0,
) -> tuple[Packed, Plan]:
    """The rows in micro-batches, and where they lie there. See row_layout.plan."""
    lengths = row_layout.lengths_of(tokens, prompt_length, response_length)
    made = row_layout.plan(lengths, limits, second_pass=second_pass)
    return pack(tokens, lengths, plan=made, limits=limits), made


def summed(function: Callable[[Sequences, jax.Array], Any], packed: Packed) -> Any:
    """Σ function(micro-batch, its number) over the micro-batches that hold rows; one result is in memory beside the sum.

    Args: function: of leaves [M, …] and int32[] to a tree of arrays.
    """

    def of(number: jax.Array) -> Any:
        return function(jax.tree.map(lambda x: x[number], packed.micro_batches), number)

    if packed.micro_batches.tokens.shape[0] == 1:
        return of(jnp.int32(0))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(of, jnp.int32(0)))
    return jax.lax.fori_loop(0, packed.count, lambda number, sums: jax.tree.map(jnp.add, sums, of(number)), zeros)


def empty(limits: Limits, sequences: int) -> Packed:
    """Micro-batches of so many sequences, zeros. None of them holds a row."""
    n, W = limits.micro_batches(sequences), limits.ways
    shape = n, W, sequences // W, limits.length
    made: dict[str, Any] = {field.name: np.zeros(shape, np.int32) for field in dataclasses.fields(Sequences)}
    listed = *shape[:3], limits.places(sequences)
    made |= {name: np.zeros(listed, np.int32) for name in ("states", "targets")}
    made["numbers"] = np.full(listed, limits.rows * limits.response, np.int32)
    made |= {"prefix": np.zeros(shape[:3], np.int32)} if limits.shares else {"prefix": None, "parents": None}
    return Packed(micro_batches=Sequences(**made), count=np.int32(0), of_row=np.zeros(limits.rows, np.int32))


def pack(tokens: np.ndarray, lengths: Lengths, *, plan: Plan, limits: Limits) -> Packed:
    """The rows where the plan has them. Args: tokens: int32[B, T], as in trajectory."""
    packed = empty(limits, plan.sequences)
    of_row = packed.of_row
    for number, part in enumerate(plan.parts):
        for way, its in enumerate(part):
            of_row[[piece.row for laid in its for piece in laid.pieces]] = number
            _write(jax.tree.map(lambda x, at=(number, way): x[at], packed.micro_batches), its, tokens, lengths, limits)
    return dataclasses.replace(packed, count=np.int32(len(plan.parts)))


def _write(made: Any, way: Way, tokens: np.ndarray, lengths: Lengths, limits: Limits) -> None:
    """Writes the sequences of a way. Args: made: Sequences with leaves [M, …]."""
    segment_of: dict[int, int] = {}  # of a prompt, in its sequence
    last: dict[int, int] = {}  # the place of a prompt's last token, which predicts the first one of its responses
    listed: list[tuple[int, int, int]] = []
    for number, laid in enumerate(way):
        begin = number * limits.length
        for segment, (row, first, size) in enumerate(laid.pieces, 1):
            its = np.arange(begin, begin + size)
            query, prompt = int(lengths.query[row]), int(lengths.prompt[row])
            made.tokens.flat[its] = tokens[row, first : first + size]
            made.segments.flat[its] = segment
            made.positions.flat[its] = first + np.arange(size)
            if not first:
                segment_of[query], last[query] = segment, begin + prompt - 1
            elif limits.shares:
                made.parents.flat[its] = segment_of[query]
            if first or not limits.shares:
                listed.append((row, last[query], begin + prompt - first))
            begin += size
        if limits.shares:
            made.prefix[number] = laid.prefix
    if listed:
        _list_responses(made, np.array(listed).T, tokens, lengths, limits)


def _list_responses(made: Any, listed: np.ndarray, tokens: np.ndarray, lengths: Lengths, limits: Limits) -> None:
    """Writes which response tokens a way has.

    Args: listed: int[3, n], rows, and the places of the states that predict the first token of each, and the second.
    """
    sizes = lengths.response[listed[0]]
    row, first, second = np.repeat(listed, sizes, axis=1)
    t = np.arange(len(row)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    # Evenly over the sequences: what comes after the longest list is not computed.
    where = np.divmod(np.arange(len(row)), max(1, -(-len(row) // len(made.tokens))))
    made.states[where] = np.where(t == 0, first, second + t - 1)
    made.targets[where] = tokens[row, lengths.prompt[row] + t]
    made.numbers[where] = row * limits.response + t
