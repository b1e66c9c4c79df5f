"""The optimiser and its schedules: AdamW with global-norm clipping; constant, linear and WSD learning rates; β, γ, τ."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

Schedule = Callable[[jax.Array], jax.Array]


def _warm_up(count: jax.Array, warmup_steps: int) -> jax.Array:
    """Linear from 1/warmup_steps at the first update to 1 at update number warmup_steps. Args: count: updates done before."""
    return jnp.minimum(1.0, (count + 1) / max(1, warmup_steps))


def constant(*, peak: float, steps: int, warmup_steps: int, decay_steps: int, decay: str) -> Schedule:
    """Linear warm-up over warmup_steps, then constant."""
    return lambda count: peak * _warm_up(count, warmup_steps)


def linear(*, peak: float, steps: int, warmup_steps: int, decay_steps: int, decay: str) -> Schedule:
    """Linear warm-up over warmup_steps, then linear to 0 after update number `steps`."""
    return lambda count: peak * jnp.clip((steps - count) / max(1, steps - warmup_steps), 0.0, _warm_up(count, warmup_steps))


def wsd(*, peak: float, steps: int, warmup_steps: int, decay_steps: int, decay: str) -> Schedule:
    """Warm-up, stable, decay: linear up over warmup_steps, constant, then to 0 over the last decay_steps of `steps`."""

    def schedule(count: jax.Array) -> jax.Array:
        progress = jnp.clip((count - (steps - decay_steps)) / max(1, decay_steps), 0.0, 1.0)
        return peak * _warm_up(count, warmup_steps) * DECAYS[decay](progress)

    return schedule


# The learning rate over its peak, by the share of the decay that is done.
DECAYS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + jnp.cos(jnp.pi * progress)),
}

# By the number of updates done before: the first update has count 0, and the last one steps − 1.
SCHEDULES = {"constant": constant, "linear": linear, "wsd": wsd}


def linear_then_constant(*, start: float, end: float, steps: int) -> Schedule:
    """Linear from start to end over `steps` trainer steps, then end (β, γ and τ of the TBA paper). steps = 0: always `end`."""
    if not steps:
        return optax.constant_schedule(end)
    ramp = optax.linear_schedule(start, end, steps)
    return lambda step: jnp.where(step >= steps, end, ramp(step))  # rounding would leave the ramp beside its end


def clip_by_norm(clip_norm: float) -> optax.GradientTransformationExtraArgs:
    """g ← g · min( 1, clip_norm / ‖u g‖ ), with the factor u of the step, float32[] (`update(…, unit=u)`; default: 1)."""

    def update(grads: optax.Updates, state: Any, params: Any = None, *, unit: jax.Array | float = 1.0, **_: Any) -> Any:
        return optax.clip_by_global_norm(clip_norm / unit).update(grads, state, params)

    return optax.GradientTransformationExtraArgs(optax.clip_by_global_norm(clip_norm).init, update)


def adamw(
    schedule: Schedule, *, beta1: float, beta2: float, epsilon: float, weight_decay: float, clip_norm: float
) -> optax.GradientTransformationExtraArgs:
    """AdamW after `clip_by_norm` (clip_norm = 0: no clipping). Norm scales and biases are not decayed."""

    def decayed(params: optax.Params) -> optax.Params:
        return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key in ("weight", "lora_a", "lora_b"), params)

    clip = [clip_by_norm(clip_norm)] if clip_norm else []
    return optax.chain(*clip, optax.adamw(schedule, b1=beta1, b2=beta2, eps=epsilon, weight_decay=weight_decay, mask=decayed))


def restart_moments(opt_state: optax.OptState) -> optax.OptState:
    """The state of an optimiser with Adam's moments, and their count, as at the beginning; schedules go on."""

    def is_adam(node: object) -> bool:
        return isinstance(node, optax.ScaleByAdamState)

    return jax.tree.map(lambda node: jax.tree.map(jnp.zeros_like, node) if is_adam(node) else node, opt_state, is_leaf=is_adam)
