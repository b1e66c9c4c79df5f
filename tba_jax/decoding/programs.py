"""The programs of a lane, jitted with their shardings and donations: for lanes, and for what compiles without devices."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh
from jax.stages import Wrapped

from tba_jax import sharding
from tba_jax.decoding import decode_loop, narrowing
from tba_jax.decoding import slots as slots_lib
from tba_jax.decoding.slots import SlotsConfig
from tba_jax.models import kv_cache


@dataclasses.dataclass(frozen=True, kw_only=True)
class Programs:
    """Jitted functions; the mesh is the context of their calls (sharding.on_mesh).

    init: () -> (prompts, slots). prefill: decode_loop.prefill, which takes the memory of prompts and slots. decode:
    decode_loop.decode, which takes that of slots. rotate: decode_loop.rotate, which takes that of the own cache of a layer.
    unstack: kv_cache.unstack. move: narrowing.move; move_prompt, move_own: narrowing.move_cache of a layer: they bring the state
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
        move=program(narrowing.move, out_shardings=whole),
        move_prompt=jax.jit(narrowing.move_cache, out_shardings=prompts.cache[0]),
        move_own=jax.jit(narrowing.move_cache, out_shardings=slots.own[0]),
    )
