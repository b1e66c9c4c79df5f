"""Slots on the device: the state of a decode loop (decode_loop.py) that refills its slots while it runs.

Slots stand in J groups of W. A group has `buffers` prompts at a time, and its slots may continue any of them. Each buffer has K
places, one for a sample of its prompt. A slot continues the sample of one place; when the sample has ended, the slot takes the
next place that waits. The own caches are rings with one position for all slots: a step writes each cache in one place, and a slot
attends to as many of the last entries as it has made. While all samples are short, the rings are the first entries of the caches,
and no others are read (sizes.Ring).

B = J·W; K places of a buffer, one for each completion of its prompt; X = U·K places of a group.
"""

import dataclasses
import functools
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
from tba_jax.decoding import sizes
from tba_jax.models import flops, kv_cache, parameters
from tba_jax.models.config import DecoderConfig, ResponseSpace
from tba_jax.models.parameters import Params

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
        return sizes.in_tiles(self.prompt_length, tiled=self.tiled)

    @property
    def own_entries(self) -> int:
        """The entries R of a slot's ring, at least those of a response; its last token predicts nothing and needs none."""
        return sizes.in_tiles(max(self.response_length - 1, 1), tiled=self.tiled)

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
    """What each slot did in each step of a call. place: int32[chunk, J, W], -1 where it was idle; count: int32, likewise, the
    response index of its token; tokens: leaves [chunk, J, W]."""

    place: chex.Array
    count: chex.Array
    tokens: Tokens


@flax.struct.dataclass
class Arrivals:
    """Prompts to be prefilled, I at a time, each into one buffer. group, buffer: int32[I]; valid: bool[I], false on padding.

    tokens: int32[I, P], right-padded, P at most S; length, given: int32[I]; stop_state: int32[I], after the given tokens;
    samples: leaves [I, K].
    """

    group: chex.Array
    buffer: chex.Array
    valid: chex.Array
    tokens: chex.Array
    length: chex.Array
    given: chex.Array
    stop_state: chex.Array
    samples: Samples


def in_tiles(mesh: Mesh) -> bool:
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


@dataclasses.dataclass
class Usage:
    """slot_steps: slots × decode steps; useful: slot-steps that gave a token of a sample. prefilled: tokens of prefill calls,
    padding included; prompt_tokens: those of prompts. flops: of prompts and of samples that have ended; bytes: see step_bytes."""

    slot_steps: int = 0
    useful: int = 0
    prefilled: int = 0
    prompt_tokens: int = 0
    flops: int = 0
    bytes: int = 0

    @property
    def idle(self) -> float:
        """Share of slot-steps that gave no token."""
        return 1 - self.useful / self.slot_steps if self.slot_steps else 0.0


def weight_bytes(weights: Params, model: DecoderConfig) -> int:
    """Bytes of the weights that a decode step reads: all but embeddings that are no head, of which it reads a row a slot."""
    unread = ("position_embedding.", *(() if model.tied_embedding else ("embedding.",)))
    read = [leaf for name, leaf in parameters.flatten(weights).items() if not name.startswith(unread)]
    return sum(leaf.size * leaf.dtype.itemsize for leaf in read)


def step_bytes(config: SlotsConfig, weights: int, *, buffers: int, window: int) -> int:
    """Bytes that a decode step must read at least: the weights and the entries of the caches, of idle slots as well."""
    c, m = config, config.model
    entries = c.groups * (buffers * c.prompt_entries + c.width * window)
    return weights + entries * 2 * m.layers * m.kv_heads * m.head_size * jnp.dtype(m.compute_dtype).itemsize


def prefill_flops(model: DecoderConfig, prompts: Sequence[int]) -> int:
    """FLOPs of prompts of these lengths."""
    return sum(flops.forward(model, positions=length, logits=1) for length in prompts)


def decode_flops(model: DecoderConfig, *, prompt: int, drawn: np.ndarray) -> int:
    """FLOPs of samples that have drawn so many tokens, int[n]; the first of each is drawn from the logits of its prompt.

    Args: prompt: the tokens that all samples of it continue.
    """
    steps = np.maximum(drawn - 1, 0)
    through = 2 * (flops.layer_weights(model) + flops.head_weights(model)) * int(steps.sum())
    return through + flops.attention(model, prompt + steps) - len(steps) * flops.attention(model, prompt)
