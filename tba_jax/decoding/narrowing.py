"""Fewer slots for the last samples of a job.

When no prompts are left, slots go idle one after the other while the longest samples still run, and a decode step computes idle
slots as well. As soon as the running samples fit into a half or a quarter of the slots, they move there: a decode step then
computes and reads so much less.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from tba_jax.decoding.slots import Prompts, Slots, SlotsConfig

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
