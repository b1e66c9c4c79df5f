"""One optimiser step for any loss, and the check that everything in it is finite."""

import dataclasses
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import optax

from tba_jax import sharding
from tba_jax.learner.state import Optimizers, TrainState
from tba_jax.models.parameters import Params
from tba_jax.packing.row_layout import Limits

# What a forward pass costs beside a forward and a backward pass, by what the backward pass computes again.
SCORING_SHARE = {"none": 1 / 3, "dots": 1 / 3, "full": 1 / 4}


def limits(tokens: int, *, prompt: int, response: int, queries: int, completions: int, ways: int, shares: bool) -> Limits:
    """What micro-batches hold.

    Args:
      tokens: learner.micro_batch_tokens, 0: the whole batch, whatever its rows' lengths. prompt, response: P and R.
      ways: see sharding.row_ways. shares: see row_layout.Limits.

    Raises:
      ValueError: the mesh does not divide the batch, or `tokens` do not hold a row for each data way; names the setting.
    """
    batch = queries * completions
    sharding.check_ways(batch, ways, what="learner.queries × learner.completions", mesh="learner.mesh")
    row_tokens = prompt + response
    if tokens and tokens < ways * row_tokens:
        each = f" for each of the {ways} ways of learner.mesh" if ways > 1 else ""
        raise ValueError(
            f"learner.micro_batch_tokens={tokens} does not hold one row{each}: a row has task.prompt_length + "
            f"task.response_length = {row_tokens} tokens; at least {ways * row_tokens}, or 0 for the whole batch"
        )
    sizes = dict(rows=batch, group=completions, prompt=prompt, response=response)
    return Limits(**sizes, shares=shares, tokens=tokens // ways, ways=ways)


def split(tree: Any, rows: int) -> Any:
    """[B, ...] -> [B / rows, rows, ...]: micro-batches of `rows` rows.

    Rows are dealt out with a stride, so that each micro-batch takes its share from every device that rows are split over.
    """
    return jax.tree.map(lambda x: x.reshape(rows, -1, *x.shape[1:]).swapaxes(0, 1), tree)


def join(tree: Any) -> Any:
    """The inverse of `split`: [B / rows, rows, ...] -> [B, ...]."""
    return jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(-1, *x.shape[2:]), tree)


def accumulate(gradient: Callable[[Any], tuple[Params, Any]], params: Params, micros: Any) -> tuple[Params, Any]:
    """Sums the gradients of micro-batches; only one micro-batch's gradient is in memory.

    Args:
      gradient: micro-batch -> (gradient like params, whatever else is kept of it).
      micros: see `split`.

    Returns:
      the sum, and what is kept of each micro-batch, stacked.
    """

    def add(sums: Params, micro: Any) -> tuple[Params, Any]:
        of_micro, kept = gradient(micro)
        return jax.tree.map(jnp.add, sums, of_micro), kept

    return jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), micros)


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
