"""The decode loop on the device: prompts are prefilled into buffers, and slots continue their samples (slots.py)."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.stages import Wrapped

from tba_jax import sharding
from tba_jax.decoding import sampling
from tba_jax.decoding import slots as slots_lib
from tba_jax.decoding.slots import CUT, FINISHED, RUNNING, Arrivals, Prompts, Samples, Slots, SlotsConfig, Tokens, Trace
from tba_jax.models import kv_cache, parameters, scoring
from tba_jax.models.decoder import Decoder
from tba_jax.models.parameters import Params


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
    is_last = count + 1 >= samples.limit
    uniform = jax.vmap(lambda key, t: jax.random.uniform(jax.random.fold_in(jax.random.wrap_key_data(key), t)))(
        samples.key, count
    )
    logits = scoring.restrict(logits, count, space)
    forced = (space.eos_id, is_last) if space.force_eos else None
    drawn = sampling.draw(
        logits, uniform, samples.sampling, scoring_temperature=space.temperature, tiled=config.tiled, forced=forced
    )
    finished = drawn.drawn == space.eos_id
    if stop_table is not None:
        stop_state = stop_table[stop_state, drawn.token]
        finished |= stop_state == config.stop_accept
    status = jnp.where(finished, FINISHED, jnp.where(is_last, CUT, RUNNING))
    return Tokens(drawn.token, status, drawn.policy_logprob, drawn.behavior_logprob), stop_state


@jax.named_scope("prefill")
def prefill(
    params: Params,
    prompts: Prompts,
    slots: Slots,
    oldest_first: jax.Array,
    arrivals: Arrivals,
    stop_table: jax.Array | None,
    *,
    config: SlotsConfig,
    after: bool = False,
) -> tuple[Prompts, Slots, Tokens]:
    """Runs prompts, draws the first token of each of their samples, and puts them into buffers whose samples have all ended.

    Args:
      params: see kv_cache.unstack; the caller donates prompts and slots.
      oldest_first: int32[J, U], the buffers of each group in the order in which they were filled.
      stop_table: int32[states, V], see StopStrings; None without stop strings.
      after: static; whether the buffers of the arrivals hold their first tokens (Arrivals.kept).

    Returns the new state, and the first tokens: leaves [I, K].
    """
    a, c = arrivals, config
    I, K = a.tokens.shape[0], c.places
    model = parameters.module(c.graphdef, params)
    if after:
        logits, cache = kv_cache.prefill_after(model, a.tokens, a.kept, a.length, _take(prompts.cache, a, c))
    else:
        logits, cache = kv_cache.prefill(model, a.tokens, a.length)
    logits, given, stop_state = (jnp.repeat(x, K, axis=0) for x in (logits, a.given, a.stop_state))
    samples = jax.tree.map(lambda x: x.reshape(I * K, *x.shape[2:]), a.samples)
    drawn = _draw(logits, samples, given, stop_state, stop_table, c)
    first, stop_state = jax.tree.map(lambda x: x.reshape(I, K), drawn)
    new_prompts = _put(prompts, a, cache, first, stop_state, c)
    begins = (a.samples.limit > 0) & (first.status == RUNNING)
    group = jnp.where(a.valid, a.group, c.groups)
    waiting = slots.waiting.reshape(c.groups, c.buffers, c.places).at[group, a.buffer].set(begins, mode="drop")
    slots = dataclasses.replace(slots, waiting=waiting.reshape(slots.waiting.shape))
    return new_prompts, _fill_idle(slots, new_prompts, oldest_first, c), first


def _take(cache: kv_cache.Cache, arrivals: Arrivals, config: SlotsConfig) -> kv_cache.Cache:
    """The caches of the buffers that the arrivals are for, [I, G, S, H]."""
    c, a = config, arrivals

    def take(whole: jax.Array) -> jax.Array:
        return whole.reshape(*whole.shape[:2], c.buffers, c.prompt_entries, -1)[a.group, :, a.buffer]

    return jax.tree.map(take, cache)


def _put(
    prompts: Prompts, arrivals: Arrivals, cache: kv_cache.Cache, first: Tokens, stop_state: jax.Array, config: SlotsConfig
) -> Prompts:
    """The buffers with the arrivals in them. Padding of the arrivals is dropped."""
    a, c = arrivals, config
    group = jnp.where(a.valid, a.group, c.groups)

    def put(whole: jax.Array, new: jax.Array) -> jax.Array:
        return whole.at[group, a.buffer].set(new, mode="drop")

    def put_cache(whole: jax.Array, new: jax.Array) -> jax.Array:
        """Writes each arrival in one piece: one scatter for all would write element by element."""
        for i in range(a.tokens.shape[0]):
            start = (a.group[i], 0, a.buffer[i] * c.prompt_entries, 0)
            old = jax.lax.dynamic_slice(whole, start, (1, *new.shape[1:]))
            whole = jax.lax.dynamic_update_slice(whole, jnp.where(a.valid[i], new[i][None], old), start)
        return whole

    return Prompts(
        cache=jax.tree.map(put_cache, prompts.cache, cache),
        samples=jax.tree.map(put, prompts.samples, a.samples),
        length=put(prompts.length, a.length),
        given=put(prompts.given, a.given),
        token=put(prompts.token, first.token),
        stop_state=put(prompts.stop_state, stop_state),
    )


def _fill_idle(slots: Slots, prompts: Prompts, oldest_first: jax.Array, config: SlotsConfig) -> Slots:
    """Idle slots begin samples that wait, those of each group's oldest buffer first."""
    c = config
    X = c.buffers * c.places
    idle = slots.place < 0
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


@dataclasses.dataclass(frozen=True)
class _Call:
    """What all steps of one call of `decode` read: samples: leaves [J, X, ...]; prompt_length: int32[J, X], without the given
    tokens; in_prompt: bool[J, buffers, S]; cache: per layer (keys, values) [J, G, buffers·S or more, H]."""

    config: SlotsConfig
    model: Decoder
    prompts: Prompts
    samples: Samples
    prompt_length: jax.Array
    in_prompt: jax.Array
    cache: kv_cache.Cache
    buffers: int
    window: int

    def of_place(self, place: jax.Array, x: jax.Array) -> jax.Array:
        """[J, X, ...] -> [B, ...], of the place of each slot."""
        J, W = self.config.groups, self.config.width
        index = place.reshape(J, W, *([1] * (x.ndim - 2)))
        return jnp.take_along_axis(x, index, axis=1).reshape(J * W, *x.shape[2:])


@jax.named_scope("decode")
def decode(
    params: Params,
    prompts: Prompts,
    slots: Slots,
    oldest_first: jax.Array,
    position: jax.Array,
    enough: jax.Array,
    stop_table: jax.Array | None,
    *,
    config: SlotsConfig,
    buffers: int,
    window: int,
) -> tuple[Slots, Trace]:
    """At most `chunk` decode steps; ends sooner when all slots are idle, or when `enough` buffers are free for new prompts.

    Args:
      slots: donated. position: int32[], the entry of the own caches that the first step writes to, modulo `window`.
      enough: int32[]; more than there are: goes on until the slots are idle.
      buffers, window: static: the first buffers of each group (1 to U) are read, and the others must be free; the first entries
        of the own caches are the ring that is read and written, and no sample makes more entries.
    """
    c, whole = config, slots.own
    call = _Call(
        config=c,
        samples=jax.tree.map(lambda x: x.reshape(c.groups, c.buffers * c.places, *x.shape[3:]), prompts.samples),
        prompt_length=jnp.repeat(prompts.length - prompts.given, c.places, axis=1),
        in_prompt=jnp.arange(c.prompt_entries) < prompts.length[:, :buffers, None],
        cache=prompts.cache if c.tiled else _cut(prompts.cache, buffers * c.prompt_entries),
        model=parameters.module(c.graphdef, params),
        prompts=prompts,
        buffers=buffers,
        window=window,
    )
    if not c.tiled:  # once a call: a slice that the loop read would be copied at every step
        slots = dataclasses.replace(slots, own=_cut(slots.own, window))

    def step(state: tuple[Slots, Trace, jax.Array, jax.Array]) -> tuple[Slots, Trace, jax.Array, jax.Array]:
        slots, trace, t, _ = state
        slots, did = _step(call, slots, (position + t) % window, stop_table)
        trace = jax.tree.map(lambda whole, new: jax.lax.dynamic_update_index_in_dim(whole, new, t, 0), trace, did)
        ended = (did.place >= 0) & (slots.place < 0)
        slots = jax.lax.cond(jnp.any(ended), lambda s: _fill_idle(s, prompts, oldest_first, c), lambda s: s, slots)
        return slots, trace, t + 1, _free_buffers(slots, c)

    def goes_on(state: tuple[Slots, Trace, jax.Array, jax.Array]) -> jax.Array:
        slots, _, t, free = state
        return (t < c.chunk) & (free < enough) & jnp.any(slots.place >= 0)

    start = slots, _empty_trace(c), jnp.zeros((), jnp.int32), _free_buffers(slots, c)
    slots, trace, _, _ = jax.lax.while_loop(goes_on, step, start)
    if window < c.own_entries and not c.tiled:
        own = jax.tree.map(lambda old, new: jax.lax.dynamic_update_slice(old, new, (0, 0, 0, 0)), whole, slots.own)
        slots = dataclasses.replace(slots, own=own)
    return slots, trace


def _step(call: _Call, slots: Slots, entry: jax.Array, stop_table: jax.Array | None) -> tuple[Slots, Trace]:
    """One token for every slot, and its trace, leaves [J, W]. Slots whose samples have ended are idle afterwards."""
    c = call.config
    J, W = c.groups, c.width
    place, active = jnp.maximum(slots.place, 0), slots.place >= 0
    count = slots.count.reshape(-1)
    given = call.of_place(place, jnp.repeat(call.prompts.given, c.places, axis=1))
    # A slot reads the buffer of its place, and as many of the last entries of its ring as it has made.
    reads = (place // c.places)[:, :, None, None] == jnp.arange(call.buffers)[:, None]
    age = (entry - jnp.arange(call.window)) % call.window
    masks = kv_cache.Masks(
        prompt=(reads & call.in_prompt[:, None]).reshape(J, W, -1), own=age[None, :] < (count - given)[:, None]
    )
    position = call.of_place(place, call.prompt_length) + count - 1
    local_masks = None
    if c.model.window:
        prompt_age = position.reshape(J, W, 1) - jnp.tile(jnp.arange(c.prompt_entries), call.buffers)
        local_masks = kv_cache.within_window(masks, c.model.window, prompt_age=prompt_age, own_age=age)
    token = slots.token.reshape(-1)
    logits, own = kv_cache.decode_step(
        call.model, token, position, entry, call.cache, slots.own, masks, local_masks, tiled=c.tiled
    )
    samples = jax.tree.map(lambda x: call.of_place(place, x), call.samples)
    tokens, stop_state = _draw(logits, samples, count, slots.stop_state.reshape(-1), stop_table, c)
    tokens, stop_state = jax.tree.map(lambda x: x.reshape(J, W), (tokens, stop_state))
    trace = Trace(place=slots.place, count=slots.count, tokens=tokens)
    slots = dataclasses.replace(
        slots,
        own=own,
        place=jnp.where(active & (tokens.status != RUNNING), -1, slots.place),
        count=slots.count + active,
        token=tokens.token,
        stop_state=stop_state,
    )
    return slots, trace


def _empty_trace(config: SlotsConfig) -> Trace:
    shape = (config.chunk, config.groups, config.width)
    zeros, logprobs = jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)
    tokens = Tokens(token=zeros, status=zeros, policy_logprob=logprobs, behavior_logprob=logprobs)
    return Trace(place=jnp.full(shape, -1, jnp.int32), count=zeros, tokens=tokens)


def rotate(own: tuple[jax.Array, ...], by: jax.Array, *, window: int) -> tuple[jax.Array, ...]:
    """The own cache of a layer, whose ring of the first `window` entries begins at another entry: entry `by` becomes entry 0.

    Args: own: keys and values [B, G, R, H], which the caller donates; by: int32[]; window: static.
    """

    def rotated(x: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice(x, jnp.roll(x[:, :, :window], -by, axis=2), (0, 0, 0, 0))

    return tuple(map(rotated, own))


def _cut(cache: kv_cache.Cache, entries: int) -> kv_cache.Cache:
    """The first entries of each cache [., G, S, H]."""
    return jax.tree.map(lambda x: x[:, :, :entries], cache)


def make_programs(config: SlotsConfig, mesh: Mesh) -> dict[str, Wrapped]:
    """The jitted functions of a lane; the mesh is the context of their calls (sharding.on_mesh). Nothing is compiled here."""
    whole = sharding.replicated(mesh)
    prompts, slots = slots_lib.shardings(config, mesh)

    def program(function: Callable[..., Any], **options: Any) -> Wrapped:
        return jax.jit(functools.partial(function, config=config), **options)

    static = ("buffers", "window")
    return dict(
        init=program(slots_lib.init, out_shardings=(prompts, slots)),
        prefill=program(prefill, donate_argnums=(1, 2), static_argnames="after", out_shardings=(prompts, slots, whole)),
        decode=program(decode, donate_argnums=2, static_argnames=static, out_shardings=(slots, whole)),
        rotate=jax.jit(rotate, donate_argnums=0, static_argnames="window", out_shardings=slots.own[0]),
        unstack=jax.jit(functools.partial(kv_cache.unstack, config=config.model)),
    )
