"""One optimiser step for any loss, and the check that everything in it is finite."""

import dataclasses
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import optax

from tba_jax.learner.state import Optimizers, TrainState
from tba_jax.models.parameters import Params


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gradient:
    """The loss on a batch, float32[], and its gradient by part, like TrainState.params.

    unit: float32[], the factor that brings the gradient into the unit of learner.clip_norm (Objective.reward_unit);
    finite: bool[], whether all else that the batch gave is finite; measurements: arrays by name.
    """

    loss: chex.Array
    by_part: Params
    finite: chex.Array | bool = True
    measurements: dict[str, jax.Array]
    unit: chex.Array | float = 1.0


# (state, the frozen part of the policy, batch) -> Gradient
GradientOf = Callable[[TrainState, Params, Any], Gradient]


def step(
    state: TrainState, frozen: Params, batch: Any, *, gradient_of: GradientOf, optimizers: Optimizers
) -> tuple[TrainState, dict[str, jax.Array]]:
    """The state after one step, and measurements: loss, grad_norm (of the policy's part before clipping, in `unit`), finite,
    skipped_steps, and the measurements of the gradient.

    `finite`, float32[], is 0 if the loss, the gradient, the new weights or the batch's results are not finite. The state then
    changes only in `step` and `skipped`.
    """
    gradient = gradient_of(state, frozen, batch)
    grad_norm = gradient.unit * optax.tree.norm(gradient.by_part["policy"])
    of_heads = [optax.tree.norm(tree) for name, tree in gradient.by_part.items() if name != "policy"]
    finite = gradient.finite & jnp.all(jnp.isfinite(jnp.stack([gradient.loss, grad_norm, *of_heads])))
    # The squares of the new weights too: an optimiser may overflow where its gradient did not. The new weights are computed
    # twice, and not kept the first time: once all is decided the state changes in place, without a second copy of it.
    tried = jax.tree.leaves(_descend(state, gradient, optimizers).params)
    finite &= jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf * leaf)) for leaf in tried]))
    new = jax.lax.cond(
        finite,
        lambda state, grads: _descend(state, dataclasses.replace(gradient, by_part=grads), optimizers),
        lambda state, _: dataclasses.replace(state, step=state.step + 1, skipped=state.skipped + 1),
        state,
        gradient.by_part,
    )
    return new, {
        "loss": gradient.loss,
        "grad_norm": grad_norm,
        "finite": finite.astype(jnp.float32),
        "skipped_steps": new.skipped.astype(jnp.float32),
        **gradient.measurements,
    }


def _descend(state: TrainState, gradient: Gradient, optimizers: Optimizers) -> TrainState:
    """Each part of what is trained, moved by its own optimiser."""
    params, opt_state = {}, {}
    for part, optimizer in optimizers.items():
        update = optax.with_extra_args_support(optimizer).update
        updates, opt_state[part] = update(gradient.by_part[part], state.opt_state[part], state.params[part], unit=gradient.unit)
        params[part] = optax.apply_updates(state.params[part], updates)
    return dataclasses.replace(state, step=state.step + 1, params=params, opt_state=opt_state)
