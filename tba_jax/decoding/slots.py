"""The decode loop on the device: slots that are refilled while they run.

Slots stand in J groups of W. A group has `buffers` prompts at a time: the slots of a group may continue any of them, so that
those that finish early begin the next prompt's samples while the others finish. Each buffer has K places, one for a sample of
its prompt; a slot continues the sample of one place, and when that has ended takes the next that waits. The own caches are
rings with one position for all slots: entry `step mod R` belongs to this step whatever a slot has generated so far, and a slot
attends to as many of the last entries as it has made. So a step writes each cache in one place, and nothing is ever moved.

B = J·W; K places of a buffer, one for each completion of its prompt; X = U·K places of a group.
"""

import dataclasses
import functools
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
from tba_jax.models import kv_cache, parameters, scoring
from tba_jax.models.config import DecoderConfig
from tba_jax.models.parameters import Params
from tba_jax.models.scoring import ResponseSpace

# How a sample stands after a token.
RUNNING, FINISHED, CUT = 0, 1, 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlotsConfig:
    """Static sizes: groups J, width W, buffers U, places K of a buffer, prompts S (cache entries of one), responses R.

    graphdef: of the decoder, see kv_cache.define;
    chunk: most decode steps of one call; stop_accept: the accepting state of the stop strings' table, -1 without any.
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


@flax.struct.dataclass
class Samples:
    """What places hold, as it was asked for. Leaves [..., K] with the places of a buffer last.

    key: uint32[..., K, 2]; sampling: leaves [..., K]; limit: int32[..., K], response tokens at most, those given with the
    prompt included; 0 where a place holds nothing.
    """

    key: chex.Array
    sampling: sampling_lib.Sampling
    limit: chex.Array


@flax.struct.dataclass
class Prompts:
    """What decoding reads and prefill writes. cache: per layer (keys, values) [J, G, U·S, H]; samples: leaves [J, U, K].

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
    """The running state. own: per layer (keys, values) [B, G, R, H]; step: int32[], decode steps so far.

    place: int32[J, W], the place in 0..X-1 that a slot continues, -1 where it is idle; count: int32[J, W], response tokens so
    far, `token` the last of them; stop_state: int32[J, W]; waiting: bool[J, X], places whose samples have not begun.
    """

    own: kv_cache.Cache
    step: chex.Array
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


def own_entries(config: SlotsConfig) -> int:
    """Of the ring of a slot. The last response token needs none: nothing is predicted from it."""
    return max(config.response_length - 1, 1)


def init(config: SlotsConfig) -> tuple[Prompts, Slots]:
    """Empty buffers and idle slots."""
    c, m = config, config.model
    J, U, K, W, G, H = c.groups, c.buffers, c.places, c.width, m.kv_heads, m.head_size

    def cache(rows: int, entries: int) -> kv_cache.Cache:
        def zeros() -> jax.Array:
            return sharding.constrain(jnp.zeros((rows, G, entries, H), m.compute_dtype), "QGSH")

        return tuple((zeros(), zeros()) for _ in range(m.layers))

    def whole(*shape: int) -> jax.Array:
        return jnp.zeros(shape, jnp.int32)

    samples = Samples(
        key=jnp.zeros((J, U, K, 2), jnp.uint32),
        sampling=sampling_lib.Sampling(
            temperature=jnp.ones((J, U, K)), top_k=whole(J, U, K), top_p=jnp.ones((J, U, K)), min_p=jnp.zeros((J, U, K))
        ),
        limit=whole(J, U, K),
    )
    prompts = Prompts(
        cache=cache(J, U * c.prompt_length),
        samples=samples,
        length=whole(J, U),
        given=whole(J, U),
        token=whole(J, U, K),
        stop_state=whole(J, U, K),
    )
    slots = Slots(
        own=cache(J * W, own_entries(c)),
        step=whole(),
        place=jnp.full((J, W), -1, jnp.int32),
        count=whole(J, W),
        token=whole(J, W),
        stop_state=whole(J, W),
        waiting=jnp.zeros((J, U * K), bool),
    )
    return prompts, slots


def shardings(config: SlotsConfig, mesh: Mesh) -> tuple[Prompts, Slots]:
    """Of what `init` gives: caches split over groups and heads where the mesh divides them, all else whole."""
    c, m = config, config.model

    def cache(rows: int, entries: int) -> Any:
        one = sharding.computed_sharding(mesh, "QGSH", (rows, m.kv_heads, entries, m.head_size))
        return ((one, one),) * m.layers

    prompts, slots = jax.tree.map(lambda _: sharding.replicated(mesh), jax.eval_shape(functools.partial(init, config)))
    return (
        dataclasses.replace(prompts, cache=cache(c.groups, c.buffers * c.prompt_length)),
        dataclasses.replace(slots, own=cache(c.groups * c.width, own_entries(c))),
    )


def _draw(
    logits: jax.Array,
    samples: Samples,
    count: jax.Array,
    stop_state: jax.Array,
    stop_table: jax.Array | None,
    config: SlotsConfig,
) -> tuple[Tokens, jax.Array]:
    """Token `count` of B responses (leaves [B]), and the stop strings' states after it."""
    space = config.space
    uniform = jax.vmap(lambda key, t: jax.random.uniform(jax.random.fold_in(jax.random.wrap_key_data(key), t)))(
        samples.key, count
    )
    drawn = sampling_lib.draw(
        scoring.restrict(logits, count, space), uniform, samples.sampling, scoring_temperature=space.temperature
    )
    finished = drawn.token == space.eos_id
    if stop_table is not None:
        stop_state = stop_table[stop_state, drawn.token]
        finished |= stop_state == config.stop_accept
    status = jnp.where(finished, FINISHED, jnp.where(count + 1 >= samples.limit, CUT, RUNNING))
    return Tokens(drawn.token, status, drawn.policy_logprob, drawn.behavior_logprob), stop_state


def prefill(
    params: Params,
    prompts: Prompts,
    slots: Slots,
    oldest_first: jax.Array,
    arrivals: Arrivals,
    restart: jax.Array,
    stop_table: jax.Array | None,
    *,
    config: SlotsConfig,
) -> tuple[Prompts, Slots, Tokens]:
    """Runs prompts, draws the first token of each of their samples, and puts them into buffers whose samples have all ended.

    Args:
      params: see kv_cache.unstack; the caller donates prompts and slots.
      oldest_first: int32[J, U], the buffers of each group in the order in which they were filled.
      restart: bool[]; all slots are idle, and the rings begin anew at entry 0.
      stop_table: int32[states, V], see StopStrings; None without stop strings.

    Returns:
      the new state, and the first tokens: leaves [I, K].
    """
    a, c = arrivals, config
    I, K = a.tokens.shape[0], c.places
    logits, cache = kv_cache.prefill(parameters.module(c.graphdef, params), a.tokens, a.length)

    def per_sample(x: jax.Array) -> jax.Array:
        return jnp.repeat(x, K, axis=0)

    first, stop_state = _draw(
        per_sample(logits),
        jax.tree.map(lambda x: x.reshape(I * K, *x.shape[2:]), a.samples),
        per_sample(a.given),
        per_sample(a.stop_state),
        stop_table,
        c,
    )
    first, stop_state = jax.tree.map(lambda x: x.reshape(I, K), (first, stop_state))
    # Padding is put nowhere.
    group = jnp.where(a.valid, a.group, c.groups)

    def put(whole: jax.Array, new: jax.Array) -> jax.Array:
        return whole.at[group, a.buffer].set(new, mode="drop")

    def put_cache(whole: jax.Array, new: jax.Array) -> jax.Array:
        """One contiguous write an arrival: as one scatter it would be written element by element."""
        for i in range(I):
            start = (a.group[i], 0, a.buffer[i] * c.prompt_length, 0)
            old = jax.lax.dynamic_slice(whole, start, (1, *new.shape[1:]))
            whole = jax.lax.dynamic_update_slice(whole, jnp.where(a.valid[i], new[i][None], old), start)
        return whole

    new_prompts = Prompts(
        cache=jax.tree.map(put_cache, prompts.cache, cache),
        samples=jax.tree.map(put, prompts.samples, a.samples),
        length=put(prompts.length, a.length),
        given=put(prompts.given, a.given),
        token=put(prompts.token, first.token),
        stop_state=put(prompts.stop_state, stop_state),
    )
    begins = (a.samples.limit > 0) & (first.status == RUNNING)
    waiting = put(slots.waiting.reshape(c.groups, c.buffers, K), begins).reshape(slots.waiting.shape)
    slots = dataclasses.replace(slots, waiting=waiting, step=jnp.where(restart, 0, slots.step))
    return new_prompts, _fill_idle(slots, new_prompts, oldest_first, c), first


def _fill_idle(slots: Slots, prompts: Prompts, oldest_first: jax.Array, config: SlotsConfig) -> Slots:
    """Idle slots begin samples that wait, those of each group's oldest buffer first."""
    c = config
    X = c.buffers * c.places
    idle = slots.place < 0
    # Waiting places in the order in which they are to begin.
    order = (oldest_first[:, :, None] * c.places + jnp.arange(c.places)).reshape(c.groups, X)
    waits = jnp.take_along_axis(slots.waiting, order, axis=1)
    takes = idle[:, :, None] & waits[:, None, :] & (jnp.cumsum(idle, axis=1)[:, :, None] == jnp.cumsum(waits, axis=1)[:, None, :])
    begins = jnp.any(takes, axis=2)
    place = jnp.where(begins, jnp.take_along_axis(order, jnp.argmax(takes, axis=2), axis=1), slots.place)

    def begun(first: jax.Array, now: jax.Array) -> jax.Array:
        return jnp.where(begins, jnp.take_along_axis(first, jnp.maximum(place, 0), axis=1), now)

    given = jnp.repeat(prompts.given, c.places, axis=1)
    taken = jnp.zeros((c.groups, X), bool).at[jnp.arange(c.groups)[:, None], jnp.where(begins, place, X)].set(True, mode="drop")
    return dataclasses.replace(
        slots,
        place=place,
        count=begun(given + 1, slots.count),
        token=begun(prompts.token.reshape(c.groups, X), slots.token),
        stop_state=begun(prompts.stop_state.reshape(c.groups, X), slots.stop_state),
        waiting=slots.waiting & ~taken,
    )


def _free_buffers(slots: Slots, config: SlotsConfig) -> jax.Array:
    """int32[]: buffers without a sample that waits or runs."""
    c = config
    waits = jnp.any(slots.waiting.reshape(c.groups, c.buffers, c.places), axis=2)
    runs = jnp.any(slots.place[:, :, None] // c.places == jnp.arange(c.buffers), axis=1)
    return jnp.sum(~(waits | runs), dtype=jnp.int32)


def decode(
    params: Params,
    prompts: Prompts,
    slots: Slots,
    oldest_first: jax.Array,
    enough: jax.Array,
    stop_table: jax.Array | None,
    *,
    config: SlotsConfig,
    buffers: int,
    window: int,
) -> tuple[Slots, Trace]:
    """At most `chunk` decode steps; ends sooner when all slots are idle, or when `enough` buffers are free for new prompts.

    Args:
      params: see kv_cache.unstack; the caller donates slots.
      oldest_first: see prefill.
      enough: int32[]; more than there are: goes on until the slots are idle.
      buffers: static, 1 to U: those before are in use, and read. window: static, of the own caches: entries before are in use
        and read; the steps of this call stay within it, or it is the whole ring.
    """
    c = config
    J, W = c.groups, c.width
    X, R = c.buffers * c.places, own_entries(c)
    samples = jax.tree.map(lambda x: x.reshape(J, X, *x.shape[3:]), prompts.samples)
    prompt_length = jnp.repeat(prompts.length - prompts.given, c.places, axis=1)
    in_prompt = jnp.arange(c.prompt_length) < prompts.length[:, :buffers, None]
    # Cut once a call: a slice that the loop read would be copied at every step.
    prompt_cache = _cut(prompts.cache, buffers * c.prompt_length)
    whole, slots = slots.own, dataclasses.replace(slots, own=_cut(slots.own, window))
    model = parameters.module(c.graphdef, params)

    def at(place: jax.Array, x: jax.Array) -> jax.Array:
        """[J, X, ...] -> [B, ...], of the place of each slot."""
        index = place.reshape(J, W, *([1] * (x.ndim - 2)))
        return jnp.take_along_axis(x, index, axis=1).reshape(J * W, *x.shape[2:])

    def step(state: tuple[Slots, Trace, jax.Array, jax.Array]) -> tuple[Slots, Trace, jax.Array, jax.Array]:
        slots, trace, t, _ = state
        place, active = jnp.maximum(slots.place, 0), slots.place >= 0
        count = slots.count.reshape(-1)
        entry = slots.step % R
        given = at(place, jnp.repeat(prompts.given, c.places, axis=1))
        # A slot reads the buffer of its place, and as many of the last entries of its ring as it has made.
        reads = (place // c.places)[:, :, None, None] == jnp.arange(buffers)[:, None]
        age = (entry - jnp.arange(window)) % R
        masks = kv_cache.Masks(prompt=(reads & in_prompt[:, None]).reshape(J, W, -1), own=age[None, :] < (count - given)[:, None])
        position = at(place, prompt_length) + count - 1
        logits, own = kv_cache.decode_step(model, slots.token.reshape(-1), position, entry, prompt_cache, slots.own, masks)
        tokens, stop_state = _draw(
            logits, jax.tree.map(lambda x: at(place, x), samples), count, slots.stop_state.reshape(-1), stop_table, c
        )
        tokens, stop_state = jax.tree.map(lambda x: x.reshape(J, W), (tokens, stop_state))
        new_entry = Trace(place=slots.place, count=slots.count, tokens=tokens)
        trace = jax.tree.map(lambda whole, new: jax.lax.dynamic_update_index_in_dim(whole, new, t, 0), trace, new_entry)
        ended = active & (tokens.status != RUNNING)
        slots = dataclasses.replace(
            slots,
            own=own,
            step=slots.step + 1,
            place=jnp.where(ended, -1, slots.place),
            count=slots.count + active,
            token=tokens.token,
            stop_state=stop_state,
        )
        slots = jax.lax.cond(jnp.any(ended), lambda s: _fill_idle(s, prompts, oldest_first, c), lambda s: s, slots)
        return slots, trace, t + 1, _free_buffers(slots, c)

    def goes_on(state: tuple[Slots, Trace, jax.Array, jax.Array]) -> jax.Array:
        slots, _, t, free = state
        return (t < c.chunk) & (free < enough) & jnp.any(slots.place >= 0)

    start = slots, _empty_trace(c), jnp.zeros((), jnp.int32), _free_buffers(slots, c)
    slots, trace, _, _ = jax.lax.while_loop(goes_on, step, start)
    if window < R:
        own = jax.tree.map(lambda old, new: jax.lax.dynamic_update_slice(old, new, (0, 0, 0, 0)), whole, slots.own)
        slots = dataclasses.replace(slots, own=own)
    return slots, trace


def _empty_trace(config: SlotsConfig) -> Trace:
    shape = (config.chunk, config.groups, config.width)
    zeros, logprobs = jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)
    tokens = Tokens(token=zeros, status=zeros, policy_logprob=logprobs, behavior_logprob=logprobs)
    return Trace(place=jnp.full(shape, -1, jnp.int32), count=zeros, tokens=tokens)


def _cut(cache: kv_cache.Cache, entries: int) -> kv_cache.Cache:
    """The first entries of each cache [., G, S, H]."""
    return jax.tree.map(lambda x: x[:, :, :entries], cache)


def row_keys(seed: int | np.integer, writer: int | np.integer, rows: jax.Array | np.ndarray) -> jax.Array:
    """uint32[B, 2]: the random key of each row, from (run seed, writer hash uint32, row sequence number uint32[B])."""
    key = jax.random.fold_in(jax.random.key(seed), writer)
    return jax.random.key_data(jax.vmap(lambda row: jax.random.fold_in(key, row))(rows))
