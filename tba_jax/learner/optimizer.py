"""The optimiser and its schedules: AdamW with global-norm clipping; constant, linear and WSD learning rates; β, γ, τ."""

from collections.abc import Callable

import jax
import optax

Schedule = Callable[[jax.Array], jax.Array]


def constant(*, peak: float, steps: int, warmup_steps: int, decay_steps: int) -> Schedule:
    """Linear warm-up over warmup_steps, then constant."""
    return optax.schedules.warmup_constant_schedule(0.0, peak, warmup_steps) if warmup_steps else optax.constant_schedule(peak)


def linear(*, peak: float, steps: int, warmup_steps: int, decay_steps: int) -> Schedule:
    """Linear warm-up over warmup_steps, then linear to 0 at `steps`."""
    down = optax.linear_schedule(peak, 0.0, max(1, steps - warmup_steps))
    return optax.join_schedules([optax.linear_schedule(0.0, peak, max(1, warmup_steps)), down], [warmup_steps])


def wsd(*, peak: float, steps: int, warmup_steps: int, decay_steps: int) -> Schedule:
    """Warm-up, stable, decay: linear up over warmup_steps, constant, linear to 0 over the last decay_steps."""
    down = optax.linear_schedule(peak, 0.0, max(1, decay_steps))
    rise = optax.linear_schedule(0.0, peak, max(1, warmup_steps))
    return optax.join_schedules([rise, optax.constant_schedule(peak), down], [warmup_steps, steps - decay_steps])


SCHEDULES = {"constant": constant, "linear": linear, "wsd": wsd}


def linear_then_constant(*, start: float, end: float, steps: int) -> Schedule:
    """Linear from start to end over `steps` trainer steps, then end (β, γ and τ of the TBA paper). steps = 0: always `end`."""
    if not steps:
        return optax.constant_schedule(end)
    ramp = optax.linear_schedule(start, end, steps)
    return lambda step: jax.numpy.where(step >= steps, end, ramp(step))  # rounding would leave the ramp beside its end


def adamw(
    schedule: Schedule, *, beta1: float, beta2: float, epsilon: float, weight_decay: float, clip_norm: float
) -> optax.GradientTransformation:
    """AdamW after clipping by global norm (clip_norm = 0: no clipping). Norm scales and biases are not decayed."""

    def decayed(params: optax.Params) -> optax.Params:
        return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key in ("weight", "lora_a", "lora_b"), params)

    clip = [optax.clip_by_global_norm(clip_norm)] if clip_norm else []
    return optax.chain(*clip, optax.adamw(schedule, b1=beta1, b2=beta2, eps=epsilon, weight_decay=weight_decay, mask=decayed))


def restart_moments(opt_state: optax.OptState) -> optax.OptState:
    """The state of an optimiser with Adam's moments, and their count, as at the beginning; schedules go on."""

    def is_adam(node: object) -> bool:
        return isinstance(node, optax.ScaleByAdamState)

    return jax.tree.map(
        lambda node: jax.tree.map(jax.numpy.zeros_like, node) if is_adam(node) else node, opt_state, is_leaf=is_adam
    )
