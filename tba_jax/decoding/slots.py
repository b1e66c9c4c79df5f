"""Slots on the device: the state of a decode loop (decode_loop.py) that refills its slots while it runs.

Slots stand in J groups of W. A group has U prompts at a time in its buffers, and its slots may continue any of them. Each buffer
has K places, one for a sample of its prompt. A slot continues the sample of one place, and then takes the next place that waits.
The own caches are rings with one position for all slots: a step writes each cache in one place, and a slot attends to as many of
the last entries as it has made. While all samples are short, the first entries of the caches alone are read (Ring).

B = J·W; X = U·K places of a group.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import chex
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from tba_jax import sharding
from tba_jax.decoding import sampling as sampling_lib
from tba_jax.models import kv_cache
from tba_jax.models.config import DecoderConfig, ResponseSpace

# Prompts are prefilled at one of these parts of the longest length, the shortest that holds them, but not below _SHORTEST.
_BUCKETS = (8, 4, 2, 1)
_SHORTEST = 32
# Up to this many samples of a query, a group has half as many slots as samples; beyond, a quarter. With these shares log-normal
# lengths of sigma 0.8 keep slots busy; more and smaller groups would have more prompts to read in each step.
_HALF_UP_TO = 24
# On TPUs, caches have a multiple of _TILE entries, and a part that a loop reads, where heads share no keys, fills the columns of
# tiles: else XLA copies all caches into another layout at every call of the decode loop.
_TILE, _TILE_COLUMNS = 16, 128


@dataclasses.dataclass(frozen=True)
class LaneSizes:
    """groups: J; width: W, slots of a group; buffers: U, prompts of a group; arrivals: I, prompts of one prefill call."""

    groups: int
    width: int
    buffers: int
    arrivals: int


def lane_sizes(slots: int, samples: int, ways: int, *, lockstep: bool = False, what: str = "") -> LaneSizes:
    """The sizes of each lane.

    Args: ways: lanes; lockstep: see Engine; what: how messages call the slots.

    Raises ValueError: the slots cannot be divided by the ways, or only into far smaller groups than wanted; names the numbers.
    """
    what = what or f"slots={slots}"
    if samples < 1:
        raise ValueError(f"samples={samples} of a query must be at least 1")
    if slots < ways or slots % ways:
        raise ValueError(f"{what} cannot be divided by the {ways} ways of the mesh's data axis")
    lane, width = slots // ways, samples
    if not lockstep or lane % samples:  # else all samples of a query begin at once, and read its prompt together
        most = max(1, samples // (2 if samples <= _HALF_UP_TO else 4))
        width = max(width for width in range(1, most + 1) if lane % width == 0)
        if lane > most and 2 * width <= most and most > 2:
            raise ValueError(
                f"{what} over {ways} ways of the mesh are {lane} each, which divide into groups of {width} only; "
                f"a multiple of {most} lets the {samples} samples of a query share its prompt"
            )
    groups = lane // width
    # A group of one slot needs no second prompt: no slot waits for another.
    buffers = 1 if width == 1 else 2
    return LaneSizes(groups, width, buffers, max(1, groups * buffers // 16))


def buckets(prompt_length: int) -> tuple[int, ...]:
    """Lengths at which prompts are prefilled, ascending; the last is prompt_length."""
    shorter = {-(-prompt_length // part) for part in _BUCKETS[:-1]}
    return (*sorted(length for length in shorter if _SHORTEST <= length < prompt_length), prompt_length)


def short_buckets(prompt_length: int) -> tuple[int, ...]:
    """Lengths at which what follows a parked turn is prefilled, ascending. A longer part is prefilled with all before it."""
    longest = buckets(prompt_length)[0]
    return tuple(sorted({max(longest // part, min(_SHORTEST, longest)) for part in (16, 4, 1)}))


def in_tiles(entries: int, *, tiled: bool) -> int:
    """The entries of a cache that holds at least so many. Args: tiled: see SlotsConfig."""
    return -(-entries // _TILE) * _TILE if tiled else entries


def heads_together(kv_heads: int, head_size: int, ways: int, *, tiled: bool) -> int:
    """The fewest heads whose sizes add up to whole columns of tiles; 1 where no such number divides the heads of a device.

    Args: ways: devices that heads are divided over, if their number divides the heads; tiled: see SlotsConfig.
    """
    together = _TILE_COLUMNS // math.gcd(_TILE_COLUMNS, head_size)
    of_device = kv_heads // ways if kv_heads % ways == 0 else kv_heads
    return together if tiled and of_device % together == 0 else 1


def windows(entries: int, chunk: int, *, tiled: bool = False) -> tuple[int, ...]:
    """Windows of the own caches, ascending: quarters, each at least a chunk; the last is the whole."""
    quarter = max(-(-entries // 4), chunk)
    quarter = -(-quarter // _TILE_COLUMNS) * _TILE_COLUMNS if tiled else quarter
    return (*range(quarter, entries, quarter), entries)


# The status of a sample after a token.
RUNNING, FINISHED, CUT = 0, 1, 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlotsConfig:
    """Static sizes: groups J, width W, buffers U, places K of a buffer, longest prompt, longest response.

    chunk: most decode steps of one call; stop_accept: the accepting state of the stop strings' table, -1 without any.
    tiled: the devices hold arrays in tiles, as TPUs do. Caches then fill tiles, and the loop reads parts of them where they lie;
      elsewhere XLA would copy a part at every step, and the loop gets a copy that is made once a call.
    together: the key and value heads that lie side by side in an entry of the own caches, so that it fills the columns of tiles.
    """

    model: DecoderConfig
    graphdef: nnx.GraphDef
    space: ResponseSpace
    groups: int
    width: int
    buffers: int
    places: int
    prompt_length: int
    response_length: int
    chunk: int
    stop_accept: int = -1
    tiled: bool = False
    together: int = 1

    @property
    def prompt_entries(self) -> int:
        """The entries S of a buffer, at least the longest prompt."""
        return in_tiles(self.prompt_length, tiled=self.tiled)

    @property
    def own_entries(self) -> int:
        """The entries R of a slot's ring, at least those of a response; its last token predicts nothing and needs none."""
        return in_tiles(max(self.response_length - 1, 1), tiled=self.tiled)

    def cache_shape(self, rows: int, entries: int, together: int = 1) -> tuple[int, ...]:
        """[rows, G/t, entries, t·H], the shape of keys or values. Args: together: t."""
        return rows, self.model.kv_heads // together, entries, together * self.model.head_size


@flax.struct.dataclass
class Samples:
    """The requests for the samples of places. Leaves [..., K] with the places of a buffer last.

    key: uint32[..., K, 2]; sampling: leaves [..., K]; limit: int32[..., K], the most response tokens, including tokens that are
    given with the prompt; 0 where a place holds nothing.
    """

    key: chex.Array
    sampling: sampling_lib.Sampling
    limit: chex.Array


@flax.struct.dataclass
class Prompts:
    """The prompts in the buffers: prefill writes them, decoding reads them.

    cache: per layer (keys, values) [J, G, U·S, H]; samples: leaves [J, U, K];
    length: int32[J, U], tokens in the cache; given: int32[J, U], how many of them, the last ones, are the response's beginning;
    token, stop_state: int32[J, U, K], the first generated token of each sample, and the stop strings' state after it.
    """

    cache: kv_cache.Cache
    samples: Samples
    length: chex.Array
    given: chex.Array
    token: chex.Array
    stop_state: chex.Array


@flax.struct.dataclass
class Slots:
    """The running state. own: per layer (keys, values) [B, G, R, H], or [B, G/t, R, t·H] with t heads `together`.

    place: int32[J, W], the place in 0..X-1 that a slot continues, -1 where it is idle; count: int32[J, W], response tokens so
    far, `token` the last of them; stop_state: int32[J, W]; waiting: bool[J, X], places whose samples have not begun.
    """

    own: kv_cache.Cache
    place: chex.Array
    count: chex.Array
    token: chex.Array
    stop_state: chex.Array
    waiting: chex.Array


@flax.struct.dataclass
class Tokens:
    """Generated tokens, one for each sample that an array's position stands for.

    token; status: int32, RUNNING, FINISHED or CUT after it; policy_logprob, behavior_logprob: float32.
    """

    token: chex.Array
    status: chex.Array
    policy_logprob: chex.Array
    behavior_logprob: chex.Array


@flax.struct.dataclass
class Trace:
    """What each slot did in each step of a call, leaves [chunk, J, W]. place: int32, -1 where it was idle; count: int32, the
    response index of its token; tokens: that token."""

    place: chex.Array
    count: chex.Array
    tokens: Tokens


@flax.struct.dataclass
class Arrivals:
    """Prompts to be prefilled, I at a time, each into one buffer. group, buffer: int32[I]; valid: bool[I], false on padding.

    tokens: int32[I, P], right-padded, P at most S, those after the first `kept`, int32[I], which the buffer holds already;
    length, given: int32[I]; stop_state: int32[I], after the given tokens; samples: leaves [I, K].
    """

    group: chex.Array
    buffer: chex.Array
    valid: chex.Array
    tokens: chex.Array
    kept: chex.Array
    length: chex.Array
    given: chex.Array
    stop_state: chex.Array
    samples: Samples


def are_tiled(mesh: Mesh) -> bool:
    """Whether the devices of a mesh hold arrays in tiles."""
    return mesh.devices.flat[0].platform == "tpu"


def init(config: SlotsConfig) -> tuple[Prompts, Slots]:
    """Empty buffers and idle slots."""
    c, m = config, config.model
    J, U, K, W = c.groups, c.buffers, c.places, c.width

    def cache(rows: int, entries: int, together: int = 1) -> kv_cache.Cache:
        def zeros() -> jax.Array:
            return sharding.constrain(jnp.zeros(c.cache_shape(rows, entries, together), m.compute_dtype), "QGSH")

        return tuple((zeros(), zeros()) for _ in range(m.layers))

    def whole(*shape: int) -> jax.Array:
        return jnp.zeros(shape, jnp.int32)

    samples = Samples(
        key=jnp.zeros((J, U, K, 2), jnp.uint32),
        sampling=jax.tree.map(jnp.asarray, sampling_lib.constant((J, U, K), temperature=1.0)),
        limit=whole(J, U, K),
    )
    prompts = Prompts(
        cache=cache(J, U * c.prompt_entries),
        samples=samples,
        length=whole(J, U),
        given=whole(J, U),
        token=whole(J, U, K),
        stop_state=whole(J, U, K),
    )
    slots = Slots(
        own=cache(J * W, c.own_entries, c.together),
        place=jnp.full((J, W), -1, jnp.int32),
        count=whole(J, W),
        token=whole(J, W),
        stop_state=whole(J, W),
        waiting=jnp.zeros((J, U * K), bool),
    )
    return prompts, slots


def shardings(config: SlotsConfig, mesh: Mesh) -> tuple[Prompts, Slots]:
    """The shardings of `init`'s state: caches are split over groups and heads if the mesh divides them, the rest is whole."""
    c, m = config, config.model

    def cache(rows: int, entries: int, together: int = 1) -> Any:
        one = sharding.computed_sharding(mesh, "QGSH", c.cache_shape(rows, entries, together))
        return ((one, one),) * m.layers

    prompts, slots = jax.tree.map(lambda _: sharding.replicated(mesh), jax.eval_shape(functools.partial(init, config)))
    return (
        dataclasses.replace(prompts, cache=cache(c.groups, c.buffers * c.prompt_entries)),
        dataclasses.replace(slots, own=cache(c.groups * c.width, c.own_entries, c.together)),
    )


def row_keys(seed: int | np.integer, writer: int | np.integer, rows: jax.Array | np.ndarray) -> jax.Array:
    """uint32[B, 2]: the random key of each row, from (run seed, writer hash uint32, row sequence number uint32[B])."""
    key = jax.random.fold_in(jax.random.key(seed), writer)
    return jax.random.key_data(jax.vmap(lambda row: jax.random.fold_in(key, row))(rows))


class Ring:
    """The host's side of the rings of all slots: the entries of the own caches that the next call reads.

    A ring that is to become longer is rotated first where a running sample goes over its end. A ring becomes shorter without
    being moved, once the running samples lie in the shorter one.

    Attributes: window: entries that the next call reads; position: of the next step's entry, at most `window`, which is entry 0
      again or, if the ring becomes longer, the entry after.
    """

    def __init__(self, windows: Sequence[int], chunk: int, *, lockstep: bool):
        """Args: windows: that may be chosen, ascending, the last the whole caches; chunk: most steps of a call."""
        self._windows, self._chunk, self._lockstep = tuple(windows), chunk, lockstep
        self.window, self.position = self._windows[-1], 0
        # The longest windows needed in the last round and in this one: a few short samples are no reason to give up a window.
        self._needed = (self._windows[-1], 0)
        self.begin()

    def begin(self) -> None:
        """All slots are idle. In lockstep, the next samples begin together, with the shortest window."""
        self.position = 0
        if self._lockstep:
            self.window, self._needed = self._windows[0], (0, 0)
        elif self._needed[1]:
            self._needed = self._needed[1], 0

    def choose(self, longest: int) -> int:
        """Chooses the window of the next call. Returns by how many entries the rings of the window before must be rotated first.

        Args: longest: entries of the longest running sample.
        """
        needed = self._fitting(longest + self._chunk)
        self._needed = self._needed[0], max(self._needed[1], needed)
        if needed > self.window:
            by = (self.position - longest) % self.window if longest > self.position else 0
            self.window, self.position = needed, max(self.position, longest)
            return by
        kept = max(self._needed)
        if longest <= self.position <= kept:
            self.window = min(self.window, kept)
        return 0

    def advance(self, steps: int) -> None:
        """Moves the position on after a call that made `steps` decode steps."""
        self.position += steps
        if self.position > self.window:
            self.position -= self.window
            self._needed = self._needed[1], 0

    def _fitting(self, entries: int) -> int:
        return next((window for window in self._windows if window >= entries), self._windows[-1])
