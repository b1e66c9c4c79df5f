"""Packing: rows as sequences of segments: a model computes what rows hold, a prompt once for its rows, and little padding.

Segments of one sequence do not attend to each other, and positions count from the beginning of the row. Which of two layouts is
used follows from the attention kernel (scoring.shares_prompts):

- Shared prompts. A prompt is one segment, and the response of each of its rows another one, in the same sequence or in a later
  one, whose tokens attend to the prompt and to their own response.
- Rows apart. Each row is one segment, with a prompt of its own.
"""

import bisect
import dataclasses
import functools
import heapq
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import chex
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

# Micro-batches have so many different numbers of sequences at most: so many shapes of any one program.
_SHAPES = 8
# The most sequences of a micro-batch are at most so many times the fewest.
_SPREAD = 8
# A micro-batch more costs about as much as so many tokens: its gradient is added to the others'.
_MICRO_BATCH_TOKENS = 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """What micro-batches may hold.

    rows: B, `group` consecutive ones are a query's. prompt, response: P and R, the most tokens of each. shares: whether rows
    share their prompts. tokens: most of a micro-batch on each of `ways` devices; it holds a row at least, and 0: it may hold all.
    """

    rows: int
    group: int
    prompt: int
    response: int
    shares: bool
    tokens: int = 0
    ways: int = 1

    @functools.cached_property
    def length(self) -> int:
        """S, tokens of a sequence. Longer ones would leave less room unused, and attend to more that they do not read.

        With shared prompts it is even: cuDNN takes no mask of an odd number of tokens in training.
        """
        longest = max(self.prompt, self.response)
        return longest + longest % 2 if self.shares else max(1, self.prompt + self.response - 1)

    @functools.cached_property
    def _rows_of_way(self) -> int:
        """Rows of a micro-batch with all rows on a way: whole queries where there are as many as ways."""
        rows = -(-self.rows // self.ways)
        of_query = min(self.group, rows)
        return -(-rows // of_query) * of_query

    @functools.cached_property
    def _whole(self) -> int:
        """Sequences of a micro-batch on each way that hold all rows, however long they are."""
        if not self.shares:
            return -(-self.rows // self.ways)
        queries = self.rows // self.group
        # A way has whole queries, or equal parts of one; else it may have rows of as many queries as rows.
        divided = queries >= self.ways or self.ways % queries == 0
        of_query = min(self.group, self._rows_of_way) if divided else 1
        beside, alone = (self.length - self.prompt) // self.response, self.length // self.response
        return self._rows_of_way // of_query * (1 + -(-max(0, of_query - beside) // alone))

    @functools.cached_property
    def sequences(self) -> int:
        """The most sequences of a micro-batch, a multiple of `ways`. Full rows fill the fewest micro-batches with them evenly."""
        most = max(2 if self.shares else 1, self.tokens // self.length)
        if not self.tokens or most >= self._whole:
            return self.ways * self._whole
        queries = -(-self.rows // (self.ways * self.group))
        of_query = self._whole // queries
        if most >= of_query:
            most = of_query * -(-queries // -(-queries // (most // of_query)))
        return self.ways * most

    @functools.cached_property
    def full_rows(self) -> int:
        """The rows of P + R tokens that `tokens` hold on all ways, at most all and at least one on each way."""
        most = max(1, self.tokens // (self.prompt + self.response)) if self.tokens else self.rows
        return min(self.rows, self.ways * most)

    @functools.cached_property
    def shapes(self) -> tuple[int, ...]:
        """The numbers of sequences that micro-batches have, ascending: the largest ones, or some in even ratios."""
        most = self.sequences // self.ways
        fewest = -(-most // _SPREAD)
        if most - fewest < _SHAPES:
            return tuple(self.ways * each for each in range(max(1, most - _SHAPES + 1), most + 1))
        ratio = (most / fewest) ** (1 / (_SHAPES - 1))
        return tuple(sorted({self.ways * math.ceil(most / ratio**power) for power in range(_SHAPES)}))

    def micro_batches(self, sequences: int) -> int:
        """n: as many micro-batches of so many sequences as hold all rows, however long, where a group's rows share a prompt."""
        each = sequences // self.ways
        if each >= self._whole:
            return 1
        return -(-self.rows // (self.ways * max(1, each // 2 if self.shares else each)))

    def places(self, sequences: int) -> int:
        """The response tokens that each of so many sequences lists at most: those of a way are spread evenly over them."""
        return min(self.length, -(-self._rows_of_way * self.response * self.ways // sequences))

    def rounded(self, sequences: int) -> int:
        """The next larger number of sequences that micro-batches have."""
        return self.shapes[bisect.bisect_left(self.shapes, sequences)]


@dataclasses.dataclass(frozen=True)
class Lengths:
    """int[B] each: tokens of each row's prompt and response, and a number that rows of equal prompts have in common. trained:
    bool[B, R], the response tokens that are listed, None: all."""

    prompt: np.ndarray
    response: np.ndarray
    query: np.ndarray
    trained: np.ndarray | None = None


class Piece(NamedTuple):
    """A segment: `size` tokens of a row, from its token `first` on. A prompt is of the first row that has it."""

    row: int
    first: int
    size: int


class Laid(NamedTuple):
    """A sequence. prefix: the number, within its way, of the sequence that holds the prompts of its responses."""

    prefix: int
    pieces: list[Piece]


# A micro-batch is one list of sequences for each way.
Way = list[Laid]
Parts = list[list[Way]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Where the rows of a batch lie. sequences: W·M. whole_groups: whether the rows of each query are in one micro-batch.
    computed_tokens: of the sequences; useful_tokens: those of them that are of rows."""

    parts: Parts
    sequences: int
    whole_groups: bool
    computed_tokens: int
    useful_tokens: int

    @property
    def useful(self) -> float:
        """The share of the computed tokens that are of rows."""
        return self.useful_tokens / self.computed_tokens


def lengths_of(tokens: np.ndarray, prompt_length: np.ndarray, response_length: np.ndarray) -> Lengths:
    """Args: as in trajectory: tokens int32[B, T], lengths int32[B]."""
    numbers: dict[bytes, int] = {}
    query = [
        numbers.setdefault(row[:size].tobytes(), len(numbers)) for row, size in zip(tokens, prompt_length.tolist(), strict=True)
    ]
    return Lengths(prompt_length, response_length, np.array(query))


def plan(lengths: Lengths, limits: Limits, *, second_pass: float) -> Plan:
    """Where rows lie. Whole groups stay together where that costs less than to score all rows in a pass of its own.

    Args: second_pass: what that pass costs, as a share of the update without it.

    Raises ValueError: a row is longer than the limits say, or the rows of a group have different prompts and do not fit.
    """
    for name, most in (("prompt", limits.prompt), ("response", limits.response)):
        if (longest := getattr(lengths, name).max()) > most:
            raise ValueError(f"a {name} of {longest} tokens is longer than the {most} that sequences are made for")
    found = _cheapest(lengths, limits, group=limits.group)
    whole_groups = found is not None
    # Parts of a query with shared prompts go together where the whole of it does not.
    smaller = [size for size in range(limits.group - 1, 0, -1) if limits.group % size == 0 and (limits.shares or size == 1)]
    passes = 1 + second_pass if whole_groups else 1
    for size in smaller:
        least = passes * _tokens(range(limits.rows), lengths, limits)
        if found is not None and (len(found) == 1 or _cost(found, lengths, limits) <= least):
            break
        apart = _cheapest(lengths, limits, group=size)
        if apart and (found is None or passes * _cost(apart, lengths, limits) < _cost(found, lengths, limits)):
            found, whole_groups, passes = apart, False, 1
    parts = found or _dealt(lengths, limits)
    if math.isinf(_cost(parts, lengths, limits)):
        stranger = f"some of {limits.group} consecutive rows have other prompts"
        raise ValueError(f"{stranger}: {limits.rows} rows do not fit micro-batches")
    sequences = limits.rounded(limits.ways * max(len(way) for part in parts for way in part))
    return Plan(
        parts=parts,
        sequences=sequences,
        whole_groups=whole_groups or len(parts) == 1 or limits.group == 1,
        computed_tokens=len(parts) * sequences * limits.length,
        useful_tokens=sum(piece.size for part in parts for way in part for laid in way for piece in laid.pieces),
    )


def _cost(parts: Parts, lengths: Lengths, limits: Limits) -> float:
    """The cost of micro-batches, in tokens that a model computes; infinite where they are more or larger than they may be."""
    ways = [way for part in parts for way in part]
    sequences = limits.ways * max(map(len, ways))
    if sequences > limits.sequences:
        return math.inf
    rounded = limits.rounded(sequences)
    listed = max(lengths.response[_rows(way)].sum() for way in ways)
    if len(parts) > limits.micro_batches(rounded) or listed * limits.ways > limits.places(rounded) * rounded:
        return math.inf
    return _cost_of(len(parts), sequences, limits)


def _rows(way: Way) -> list[int]:
    return list({piece.row for laid in way for piece in laid.pieces})


def _cost_of(count: int, sequences: int, limits: Limits) -> int:
    """The cost of `count` micro-batches of which the largest holds so many sequences."""
    return count * (limits.rounded(sequences) * limits.length + _MICRO_BATCH_TOKENS)


def _cheapest(lengths: Lengths, limits: Limits, *, group: int) -> Parts | None:
    """The cheapest micro-batches that hold the rows, `group` consecutive rows in one; None where a group does not fit one."""
    groups = [range(begin, begin + group) for begin in range(0, limits.rows, group)]
    of_groups = [_tokens(rows, lengths, limits) for rows in groups]
    fewest = -(-_tokens(range(limits.rows), lengths, limits) // limits.length)  # sequences
    tried = sorted({min(-(-fewest // sequences) + more, len(groups)) for sequences in limits.shapes for more in (0, 1)})
    found, cost = None, math.inf
    more = sorted({int(count) for count in np.geomspace(tried[-1], len(groups), 12)} - set(tried))
    for count in (*tried, *more):
        if found and count > tried[-1]:
            break
        least = -(-fewest // count)
        if least > limits.sequences or _cost_of(count, least, limits) >= cost:
            continue
        parts = [_ways(rows, lengths, limits) for rows in _divide(groups, of_groups, count)]
        if (its := _cost(parts, lengths, limits)) < cost:
            found, cost = parts, its
    return found


def _tokens(rows: Iterable[int], lengths: Lengths, limits: Limits) -> int:
    if not limits.shares:
        return int(_apart(lengths)[list(rows)].sum())
    prompts = {lengths.query[row]: lengths.prompt[row] for row in rows}
    return int(sum(prompts.values()) + lengths.response[list(rows)].sum())


def _apart(lengths: Lengths) -> np.ndarray:
    """int[B]: the tokens of each row with its prompt. The last one of a row predicts nothing that is scored."""
    return np.maximum(lengths.prompt + lengths.response - 1, 1)


def _divide(groups: Sequence[Sequence[int]], tokens: Sequence[int], count: int) -> list[list[int]]:
    """The rows of groups in `count` parts of about equally many tokens. Args: tokens: of each group."""
    parts: list[list[int]] = [[] for _ in range(count)]
    emptiest = [(0, part) for part in range(count)]  # a heap
    for each in sorted(range(len(groups)), key=lambda each: -tokens[each]):
        taken, part = emptiest[0]
        parts[part] += groups[each]
        heapq.heapreplace(emptiest, (taken + tokens[each], part))
    return parts


def _dealt(lengths: Lengths, limits: Limits) -> Parts:
    """Micro-batches of as many rows as fit however long they are: all, or a few."""
    each = -(-limits.rows // limits.ways)
    ways = [range(begin, min(limits.rows, begin + each)) for begin in range(0, limits.ways * each, each)]
    whole = [[_fill(rows, lengths, limits) for rows in ways]]
    if _cost(whole, lengths, limits) < math.inf:
        return whole
    count = max(map(limits.micro_batches, limits.shapes[-2:]))
    dealt = [range(part, limits.rows, count) for part in range(count)]
    return [[_fill(rows[way :: limits.ways], lengths, limits) for way in range(limits.ways)] for rows in dealt]


def _ways(rows: Sequence[int], lengths: Lengths, limits: Limits) -> list[Way]:
    """The rows of a micro-batch in sequences, which ways divide."""
    if not limits.shares:
        filled = [Laid(0, laid.pieces) for laid in _fill(rows, lengths, limits)]
        return [filled[way :: limits.ways] for way in range(limits.ways)]
    of_query = _by_query(rows, lengths)
    # The rows of a query go to several ways only where there are fewer queries than ways.
    cuts = -(-limits.ways // len(of_query))
    chunks = [its[cut::cuts] for its in of_query.values() for cut in range(cuts) if its[cut::cuts]]
    divided = _divide(chunks, [_tokens(chunk, lengths, limits) for chunk in chunks], limits.ways)
    return [_fill(rows, lengths, limits) for rows in divided]


def _by_query(rows: Iterable[int], lengths: Lengths) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for row in rows:
        found.setdefault(int(lengths.query[row]), []).append(row)
    return found


def _fill(rows: Sequence[int], lengths: Lengths, limits: Limits) -> Way:
    """Sequences of rows. Responses lie in the sequence of their prompts, and in sequences that hold responses alone."""
    if not limits.shares:
        sizes = _apart(lengths)
        return [Laid(0, [Piece(row, 0, int(sizes[row])) for row in its]) for its in _best_fit(rows, sizes, limits.length)]
    of_query = _by_query(rows, lengths)
    tried = [_together(of_query, lengths, limits.length, sequences=sequences) for sequences in (1, 2, 4, len(rows))]
    return min((_with_prompts_together(of_query, bins, lengths, limits.length) for bins in tried), key=len)


def _with_prompts_together(of_query: Mapping[int, list[int]], bins: Iterable[list[int]], lengths: Lengths, length: int) -> Way:
    """Sequences of rows. Args: of_query: rows of each query; bins: queries whose prompts lie in one sequence."""
    way: Way = []
    for queries in bins:
        prompts = [Piece(of_query[query][0], 0, int(lengths.prompt[of_query[query][0]])) for query in queries]
        continuing = [row for query in queries for row in of_query[query]]
        filled = _best_fit(continuing, lengths.response, length, begun=sum(prompt.size for prompt in prompts))
        responses = [[Piece(row, int(lengths.prompt[row]), int(lengths.response[row])) for row in its] for its in filled]
        way += [Laid(len(way), pieces) for pieces in (prompts + responses[0], *responses[1:])]
    return way


def _together(of_query: Mapping[int, list[int]], lengths: Lengths, length: int, *, sequences: int) -> list[list[int]]:
    """Queries whose prompts fit one sequence, and whose rows so many sequences (best fit, decreasing)."""
    prompts = {query: int(lengths.prompt[rows[0]]) for query, rows in of_query.items()}
    sizes = {query: prompts[query] + int(lengths.response[rows].sum()) for query, rows in of_query.items()}
    found: list[tuple[int, int, list[int]]] = []  # tokens left of all sequences, and of the one with prompts
    for query in sorted(sizes, key=lambda query: (-sizes[query], query)):
        fits = [(left, i) for i, (left, room, _) in enumerate(found) if left >= sizes[query] and room >= prompts[query]]
        left, room, its = found.pop(min(fits)[1]) if fits else (max(sizes[query], sequences * length), length, [])
        found.append((left - sizes[query], room - prompts[query], [*its, query]))
    return [its for *_, its in found]


def _best_fit(rows: Iterable[int], sizes: np.ndarray, length: int, *, begun: int = 0) -> list[list[int]]:
    """Rows in sequences of `length`: the longest first, each in the fullest sequence that has room for it (best fit, decreasing).

    Args: begun: there is a first sequence, of which so many tokens are taken; 0: there is none.
    """
    found: list[list[int]] = [[]] if begun else []
    rooms = [(length - begun, 0)] if begun else []  # (tokens left, sequence), ascending
    for row in sorted(rows, key=lambda row: (-sizes[row], row)):
        size = int(sizes[row])
        at = bisect.bisect_left(rooms, (size, 0))
        left, sequence = rooms.pop(at) if at < len(rooms) else (length, len(found))
        if sequence == len(found):
            found.append([])
        found[sequence].append(row)
        bisect.insort(rooms, (left - size, sequence))
    return found


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
    trained: np.ndarray | None = None,
    second_pass: float = 0.0,
) -> tuple[Packed, Plan]:
    """The rows in micro-batches, and where they lie there. See plan. Args: trained: see Lengths."""
    lengths = dataclasses.replace(lengths_of(tokens, prompt_length, response_length), trained=trained)
    made = plan(lengths, limits, second_pass=second_pass)
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
    if lengths.trained is not None:
        row, first, second, t = (x[lengths.trained[row, t]] for x in (row, first, second, t))
    # Evenly over the sequences: what comes after the longest list is not computed.
    where = np.divmod(np.arange(len(row)), max(1, -(-len(row) // len(made.tokens))))
    made.states[where] = np.where(t == 0, first, second + t - 1)
    made.targets[where] = tokens[row, lengths.prompt[row] + t]
    made.numbers[where] = row * limits.response + t
