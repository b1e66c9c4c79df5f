"""The programs of a lane, jitted with their shardings and donations, for all of its slots and for fewer.

When no prompts are left, slots go idle one after the other while the longest samples still run, and a decode step computes idle
slots as well. As soon as the running samples fit into a half or a quarter of the slots, they move there: a decode step then
computes and reads so much less.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.stages import Wrapped

from tba_jax import sharding
from tba_jax.decoding import decode_loop
from tba_jax.decoding import slots as slots_lib
from tba_jax.decoding.slots import Prompts, Slots, SlotsConfig
from tba_jax.models import kv_cache

# A move takes the time of two or three decode steps, and the first one compiles a decode loop.
WORTHWHILE_STEPS = 32


def narrower(config: SlotsConfig) -> list[SlotsConfig]:
    """The sizes with a half and a quarter of the slots: groups of half the width, or half the groups where the width is one."""
    found = [config]
    for _ in range(2):
        groups, width = found[-1].groups, found[-1].width
        if groups * width == 1:
            break
        groups, width = (groups, -(-width // 2)) if width > 1 else (-(-groups // 2), width)
        found.append(dataclasses.replace(found[-1], groups=groups, width=width))
    return found[1:]


def holds(config: SlotsConfig, running: np.ndarray) -> bool:
    """Whether slots of these sizes hold the running samples. Args: running: int[J], samples of each group."""
    return bool(np.count_nonzero(running) <= config.groups and running.max(initial=0) <= config.width)


def move(prompts: Prompts, slots: Slots, groups: jax.Array, *, config: SlotsConfig) -> tuple[Prompts, Slots, jax.Array]:
    """The state of some groups, each with its first `width` slots that run, but for the caches: see `move_cache`.

    Args:
      prompts, slots: without caches.
      groups: int32[J'], the groups that stay, J' = config.groups. No sample of another group runs, and none waits.
      config: the sizes afterwards.

    Returns: the state; and int32[J'·W'], the row of the own caches that each slot had.
    """
    place = slots.place[groups]
    width = place.shape[1]
    columns = jnp.argsort(place < 0, axis=1, stable=True)[:, : config.width]

    def moved(x: jax.Array) -> jax.Array:
        return jnp.take_along_axis(x[groups], columns, axis=1)

    waiting = slots.waiting[groups]
    of_slots = jax.tree.map(moved, dataclasses.replace(slots, own=(), waiting=()))
    rows = groups[:, None] * width + columns
    return jax.tree.map(lambda x: x[groups], prompts), dataclasses.replace(of_slots, waiting=waiting), rows.reshape(-1)


def move_cache(cache: tuple[jax.Array, ...], rows: jax.Array) -> tuple[jax.Array, ...]:
    """The keys and values [rows', ...] of a layer. Args: rows: int32[rows'], where they were."""
    return tuple(jnp.take(x, rows, axis=0) for x in cache)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Programs:
    """Jitted functions; the mesh is the context of their calls (sharding.on_mesh).

    init: () -> (prompts, slots). prefill: decode_loop.prefill, which takes the memory of prompts and slots. decode:
    decode_loop.decode, which takes that of slots. rotate: decode_loop.rotate, which takes that of the own cache of a layer.
    unstack: kv_cache.unstack. move: move; move_prompt, move_own: move_cache of a layer: they bring the state
    of wider slots into these sizes.
    """

    init: Wrapped
    prefill: Wrapped
    decode: Wrapped
    rotate: Wrapped
    unstack: Wrapped
    move: Wrapped
    move_prompt: Wrapped
    move_own: Wrapped


def make(config: SlotsConfig, mesh: Mesh) -> Programs:
    """Nothing is compiled or allocated here."""
    whole = sharding.replicated(mesh)
    prompts, slots = slots_lib.shardings(config, mesh)

    def program(function: Callable[..., Any], **options: Any) -> Wrapped:
        return jax.jit(functools.partial(function, config=config), **options)

    static = ("buffers", "window")
    return Programs(
        init=program(slots_lib.init, out_shardings=(prompts, slots)),
        prefill=program(decode_loop.prefill, donate_argnums=(1, 2), out_shardings=(prompts, slots, whole)),
        decode=program(decode_loop.decode, donate_argnums=2, static_argnames=static, out_shardings=(slots, whole)),
        rotate=jax.jit(decode_loop.rotate, donate_argnums=0, static_argnames="window", out_shardings=slots.own[0]),
        unstack=jax.jit(functools.partial(kv_cache.unstack, config=config.model)),
        move=program(move, out_shardings=whole),
        move_prompt=jax.jit(move_cache, out_shardings=prompts.cache[0]),
        move_own=jax.jit(move_cache, out_shardings=slots.own[0]),
    )
