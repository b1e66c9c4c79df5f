"""Packing: rows laid end to end in sequences, so that a model computes what rows hold and next to no padding.

A row takes `prompt_length + response_length − 1` tokens of a sequence: its last token predicts nothing that is scored. Rows of
one sequence are segments, which do not attend to each other, and each row's positions begin at 0. Where rows lie follows from
their lengths alone.
"""

import bisect
import dataclasses
import functools
import heapq
import math
from collections.abc import Callable, Sequence
from typing import Any

import chex
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

# Micro-batches of packed sequences have so many different numbers of sequences at most. One more shape, that of as many sequences
# as may be with one row each, makes 8 shapes of any one program.
_SHAPES = 7
# The most sequences of a micro-batch are at most so many times the fewest, which many micro-batches approximate any number with.
_SPREAD = 16
# A micro-batch more costs about as much as so many tokens: its gradient is added to the others'.
_MICRO_BATCH_TOKENS = 256

# A micro-batch as sequences, a sequence as numbers of rows.
Parts = list[list[list[int]]]


@flax.struct.dataclass
class Sequences:
    """M sequences of S tokens that hold rows of a batch. Response token t of row b has the number b·R + t.

    tokens: int32[M, S]. segments: int32[M, S], the number of a row in its sequence, from 1 on; 0: padding. positions:
    int32[M, S], in the row. Both are None where a sequence holds one row, from its beginning on.
    states, targets, numbers: int32[M, places], the response tokens of a sequence one after the other, and then padding: the place
    in the sequence whose hidden state predicts a token, its id, and its number, B·R for padding. There are S places, or R where a
    sequence holds one row.
    """

    tokens: chex.Array
    segments: chex.Array | None
    positions: chex.Array | None
    states: chex.Array
    targets: chex.Array
    numbers: chex.Array


@flax.struct.dataclass
class Packed:
    """A batch of B rows in n micro-batches.

    micro_batches: leaves [n, M, …]. count: int32[], how many of them hold rows: the first ones. of_row: int32[B], the number of
    the micro-batch that holds a row.
    """

    micro_batches: Sequences
    count: chex.Array
    of_row: chex.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """What micro-batches may hold. length: S, at least the tokens of the longest row. sequences: the most of a micro-batch, a
    multiple of `ways`, over which devices divide them. rows: B; group: so many consecutive rows are a query's."""

    length: int
    sequences: int
    ways: int
    rows: int
    group: int

    @functools.cached_property
    def shapes(self) -> tuple[int, ...]:
        """The numbers of sequences that micro-batches have, ascending: all there are, or in even ratios from the most down."""
        most = self.sequences // self.ways
        if most <= _SHAPES:
            return tuple(self.ways * each for each in range(1, most + 1))
        ratio = min(_SPREAD, most) ** (1 / (_SHAPES - 1))
        return tuple(sorted({self.ways * math.ceil(most / ratio**power) for power in range(_SHAPES)}))

    def micro_batches(self, sequences: int) -> int:
        """n: as many micro-batches of so many sequences as B rows need that fill a sequence each."""
        return -(-self.rows // sequences)

    def rounded(self, sequences: int) -> int:
        """The next larger number of sequences that micro-batches have."""
        return self.shapes[bisect.bisect_left(self.shapes, sequences)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Where the rows of a batch lie. sequences: M. one_row: whether no sequence holds more than one row, and M is the most that
    it may be. whole_groups: whether the rows of each query are in one micro-batch. computed_tokens: of the sequences;
    useful_tokens: those of them that are of rows."""

    parts: Parts
    sequences: int
    one_row: bool
    whole_groups: bool
    computed_tokens: int
    useful_tokens: int

    @property
    def useful(self) -> float:
        """The share of the computed tokens that are of rows."""
        return self.useful_tokens / self.computed_tokens


def row_tokens(prompt_length: np.ndarray, response_length: np.ndarray) -> np.ndarray:
    """int[B]: the tokens of a sequence that each row takes."""
    return np.maximum(prompt_length + response_length - 1, 1)


def plan(tokens: np.ndarray, limits: Limits, *, second_pass: float) -> Plan:
    """Where rows lie. Whole groups stay together where that costs less than to score all rows in a pass of its own.

    Args: tokens: int[B], see row_tokens. second_pass: what that pass costs, as a share of the update without it.

    Raises:
      ValueError: a row is longer than a sequence.
    """
    if tokens.max() > limits.length:
        raise ValueError(f"a row of {tokens.max()} tokens does not fit a sequence of {limits.length}")
    together = _cheapest(tokens, limits, group=limits.group)
    parts = together
    if together is None or limits.sequences < limits.rows:
        apart = _cheapest(tokens, limits, group=1) or _deal(tokens, limits)
        cheaper = together is not None and _cost(together, limits) <= (1 + second_pass) * _cost(apart, limits)
        parts = together if cheaper else apart
    assert parts is not None
    sequences = limits.rounded(max(map(len, parts)))
    # Packing saves nothing here, and sequences of one row need no segments, and fewer places for response tokens.
    one_row = sequences == limits.sequences and all(sum(map(len, part)) <= sequences for part in parts)
    return Plan(
        parts=[[[row] for rows in part for row in rows] for part in parts] if one_row else parts,
        sequences=sequences,
        one_row=one_row,
        whole_groups=parts is together,
        computed_tokens=len(parts) * sequences * limits.length,
        useful_tokens=int(tokens.sum()),
    )


def _cost(parts: Parts, limits: Limits) -> int:
    """The cost of micro-batches, in tokens that a model computes."""
    return _cost_of(len(parts), max(map(len, parts)), limits)


def _cost_of(count: int, sequences: int, limits: Limits) -> int:
    """The cost of `count` micro-batches of which the largest holds so many sequences."""
    return count * (limits.rounded(sequences) * limits.length + _MICRO_BATCH_TOKENS)


def _cheapest(tokens: np.ndarray, limits: Limits, *, group: int) -> Parts | None:
    """The cheapest micro-batches that hold the rows, `group` consecutive rows in one; None where a group does not fit one."""
    of_groups = tokens.reshape(-1, group).sum(axis=1)
    fewest = -(-int(tokens.sum()) // limits.length)  # sequences
    tried = sorted({min(-(-fewest // sequences) + more, len(of_groups)) for sequences in limits.shapes for more in (0, 1)})
    found: Parts | None = None
    for count in (*tried, *range(tried[-1] + 1, len(of_groups) + 1)):
        if found and count > tried[-1]:
            break
        least = -(-fewest // count)
        if least > limits.sequences or (found and _cost_of(count, least, limits) >= _cost(found, limits)):
            continue
        parts = [_fill(rows, tokens, limits.length) for rows in _divide(of_groups, count, group=group)]
        fits = max(map(len, parts)) <= limits.sequences
        if fits and (found is None or _cost(parts, limits) < _cost(found, limits)):
            found = parts
    return found


def _divide(of_groups: np.ndarray, count: int, *, group: int) -> list[list[int]]:
    """The rows of `count` micro-batches of about equally many tokens. Args: of_groups: int[B / group], tokens."""
    parts: list[list[int]] = [[] for _ in range(count)]
    emptiest = [(0, part) for part in range(count)]  # a heap
    for each in np.argsort(-of_groups, kind="stable"):
        taken, part = emptiest[0]
        parts[part] += range(each * group, (each + 1) * group)
        heapq.heapreplace(emptiest, (taken + int(of_groups[each]), part))
    return parts


def _deal(tokens: np.ndarray, limits: Limits) -> Parts:
    """Micro-batches of equally many sequences."""
    sequences = _fill(range(len(tokens)), tokens, limits.length)
    count = -(-len(sequences) // limits.sequences)
    return [sequences[part::count] for part in range(count)]


def _fill(rows: Sequence[int], tokens: np.ndarray, length: int) -> list[list[int]]:
    """Sequences of rows: the longest rows first, each in the fullest sequence that has room for it (best fit, decreasing)."""
    found: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (tokens left, sequence), ascending
    for row in sorted(rows, key=lambda row: (-tokens[row], row)):
        size = int(tokens[row])
        at = bisect.bisect_left(rooms, (size, 0))
        left, sequence = rooms.pop(at) if at < len(rooms) else (length, len(found))
        if sequence == len(found):
            found.append([])
        found[sequence].append(row)
        bisect.insort(rooms, (left - size, sequence))
    return found


def of_rows(
    tokens: np.ndarray,
    prompt_length: np.ndarray,
    response_length: np.ndarray,
    *,
    R: int,
    limits: Limits,
    second_pass: float = 0.0,
) -> tuple[Packed, Plan]:
    """The rows in micro-batches, and where they lie there. Args: rows: see pack; second_pass: see plan. Raises: as plan."""
    made = plan(row_tokens(prompt_length, response_length), limits, second_pass=second_pass)
    return pack(tokens, prompt_length, response_length, R=R, plan=made, limits=limits), made


def alone(tokens: jax.Array, prompt_length: jax.Array, response_length: jax.Array, *, R: int) -> Packed:
    """The rows as one micro-batch of a sequence each, made where the rows are. Args: see pack; arrays of the devices, too."""
    B, places = len(tokens), jnp.arange(R)
    states = jnp.minimum(prompt_length[:, None] - 1 + places, tokens.shape[1] - 2)
    targets = jnp.take_along_axis(tokens, states + 1, axis=1)
    numbers = jnp.where(places < response_length[:, None], jnp.arange(B)[:, None] * R + places, B * R)
    made = dict(tokens=tokens[:, :-1], states=states, targets=targets, numbers=numbers)
    sequences = Sequences(**{name: leaf[None] for name, leaf in made.items()}, segments=None, positions=None)
    return Packed(micro_batches=sequences, count=jnp.int32(1), of_row=jnp.zeros(B, jnp.int32))


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
    """Micro-batches of so many sequences, zeros."""
    shape = limits.micro_batches(sequences), sequences, limits.length
    zeros = Sequences(**{field.name: np.zeros(shape, np.int32) for field in dataclasses.fields(Sequences)})
    return Packed(micro_batches=zeros, count=np.int32(0), of_row=np.zeros(limits.rows, np.int32))


def pack(
    tokens: np.ndarray, prompt_length: np.ndarray, response_length: np.ndarray, *, R: int, plan: Plan, limits: Limits
) -> Packed:
    """The rows where the plan has them. Args: as in trajectory: tokens int32[B, T], lengths int32[B]."""
    B, shape, places = len(tokens), (limits.micro_batches(plan.sequences), plan.sequences), R if plan.one_row else limits.length
    made = {name: np.zeros((*shape, limits.length), np.int32) for name in ("tokens", "segments", "positions")}
    made |= {name: np.zeros((*shape, places), np.int32) for name in ("states", "targets", "numbers")}
    made["numbers"][:] = B * R
    of_row = np.zeros(B, np.int32)
    for i, part in enumerate(plan.parts):
        for j, rows in enumerate(part):
            of_row[rows] = i
            begin = listed = 0
            for segment, row in enumerate(rows, 1):
                prompt, response = int(prompt_length[row]), int(response_length[row])
                size = max(prompt + response - 1, 1)
                its, told = (i, j, slice(begin, begin + size)), (i, j, slice(listed, listed + response))
                made["tokens"][its] = tokens[row, :size]
                made["segments"][its] = segment
                made["positions"][its] = np.arange(size)
                made["states"][told] = begin + prompt - 1 + np.arange(response)
                made["targets"][told] = tokens[row, prompt : prompt + response]
                made["numbers"][told] = row * R + np.arange(response)
                begin, listed = begin + size, listed + response
    if plan.one_row:
        del made["segments"], made["positions"]
    sequences = Sequences(**dict(segments=None, positions=None) | made)
    return Packed(micro_batches=sequences, count=np.int32(len(plan.parts)), of_row=of_row)
