"""The train state, the optimiser and its schedules (learning rates; β, γ, τ), and one step for any loss.

The functions `make_…` take the section `learner` of a config; `make_schedule` and `make_adamw` also the section `training` of
supervised training, whose settings have the same names.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import chex
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

from tba_jax import sharding as sharding_lib
from tba_jax.models import parameters
from tba_jax.models.parameters import Definition, Params
from tba_jax.models.policy import Policy, PolicyWithHeads
from tba_jax.objectives import OBJECTIVES

Schedule = Callable[[jax.Array], jax.Array]
# Parts of what is trained (PolicyWithHeads) -> the optimiser of each: "policy", and the heads that an RL objective has.
Optimizers = dict[str, optax.GradientTransformation]


@flax.struct.dataclass
class TrainState:
    """What an update changes.

    step: int32[], updates done, refused ones included; skipped: int32[], updates refused because they were not finite, for
    which neither the optimisers nor their learning rates go on;
    params: float32 master weights by part, {"policy": what is trained of it (Policy), "log_z_head": …, "value_head": …};
    opt_state: of each part's optimiser;
    graphdef: of the module that they belong to, policy.PolicyWithHeads; static.
    """

    step: chex.Array
    skipped: chex.Array
    params: Params
    opt_state: dict[str, Any]
    graphdef: nnx.GraphDef = flax.struct.field(pytree_node=False)

    def model(self, params: Params, frozen: Params) -> PolicyWithHeads:
        """The module in a traced function, differentiable in `params`, which are like those of the state.

        Args: frozen: the part of the policy that is not trained, see Policy.for_training.
        """
        return parameters.module(self.graphdef, parameters.merge({"policy": frozen}, params))


def _definition(policy: Policy, optimizers: Optimizers) -> Definition[PolicyWithHeads]:
    return policy.with_heads(log_z_head="log_z_head" in optimizers, value_head="value_head" in optimizers)


def init_state(policy: Policy, params: Params, optimizers: Optimizers) -> TrainState:
    """The state of step 0, with heads of zeros. Args: params: what is trained of the policy."""
    definition = _definition(policy, optimizers)
    parts = {"policy": params}
    for head in [part for part in optimizers if part != "policy"]:
        parts[head] = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), parameters.shapes(definition.specs[head]))
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        skipped=jnp.zeros((), jnp.int32),
        params=parts,
        opt_state={part: optimizer.init(parts[part]) for part, optimizer in optimizers.items()},
        graphdef=definition.graphdef,
    )


def state_shapes(policy: Policy, optimizers: Optimizers, mesh: Mesh) -> TrainState:
    """The train state as jax.ShapeDtypeStruct with shardings: the moments of a parameter are sharded as it is."""
    shapes = jax.eval_shape(lambda params: init_state(policy, params, optimizers), parameters.shapes(policy.trained_specs))
    specs = _definition(policy, optimizers).specs | {"policy": policy.trained_specs}
    everywhere = sharding_lib.replicated(mesh)
    sharding_of = parameters.shardings(specs, mesh)
    moments = {
        name: optax.tree_map_params(
            optimizer,
            lambda _, sharding: sharding,
            shapes.opt_state[name],
            sharding_of[name],
            transform_non_params=lambda _: everywhere,
        )
        for name, optimizer in optimizers.items()
    }
    shardings = dataclasses.replace(shapes, step=everywhere, skipped=everywhere, params=sharding_of, opt_state=moments)
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)


def _warm_up(count: jax.Array, warmup_steps: int) -> jax.Array:
    """Linear from 1/warmup_steps at the first update to 1 at update number warmup_steps. Args: count: updates done before."""
    return jnp.minimum(1.0, (count + 1) / max(1, warmup_steps))


def constant(*, peak: float, steps: int, warmup_steps: int = 0, decay_steps: int = 0, decay: str = "linear") -> Schedule:
    """Linear warm-up over warmup_steps, then constant."""
    return lambda count: peak * _warm_up(count, warmup_steps)


def linear(*, peak: float, steps: int, warmup_steps: int = 0, decay_steps: int = 0, decay: str = "linear") -> Schedule:
    """Linear warm-up over warmup_steps, then linear to 0 after update number `steps`."""
    return lambda count: peak * jnp.clip((steps - count) / max(1, steps - warmup_steps), 0.0, _warm_up(count, warmup_steps))


def wsd(*, peak: float, steps: int, warmup_steps: int = 0, decay_steps: int = 0, decay: str = "linear") -> Schedule:
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


def policy_rates(c: Any) -> np.ndarray:
    """float32[learner.steps]: the policy's learning rate by the number of updates done before. Args: c: the section learner."""
    schedule = make_schedule(c, peak=c.learning_rate, steps=c.schedule_steps or c.steps)
    return np.asarray(jax.vmap(lambda count: jnp.asarray(schedule(count), jnp.float32))(jnp.arange(c.steps)))


def make_schedule(c: Any, *, peak: float, steps: int) -> Schedule:
    """The schedule of a learning rate that ends at `steps`."""
    parts = dict(warmup_steps=c.warmup_steps, decay_steps=c.decay_steps, decay=c.decay)
    return SCHEDULES[c.schedule](peak=peak, steps=steps, **parts)


def make_adamw(c: Any, schedule: Schedule, *, weight_decay: float) -> optax.GradientTransformation:
    betas = dict(beta1=c.adam_beta1, beta2=c.adam_beta2)
    return adamw(schedule, **betas, epsilon=c.adam_epsilon, weight_decay=weight_decay, clip_norm=c.clip_norm)


def make_optimizers(c: Any) -> Optimizers:
    objective = OBJECTIVES[c.objective]
    rates = {"policy": c.learning_rate}
    if objective.log_z_head:
        rates["log_z_head"] = c.log_z_learning_rate
    if objective.value_head:
        rates["value_head"] = c.value_learning_rate
    steps = c.schedule_steps or c.steps
    return {
        part: make_adamw(c, make_schedule(c, peak=peak, steps=steps), weight_decay=c.weight_decay if part == "policy" else 0.0)
        for part, peak in rates.items()
    }


def restart_moments(opt_state: optax.OptState) -> optax.OptState:
    """The state of an optimiser with Adam's moments, and their count, as at the beginning; schedules go on."""

    def is_adam(node: object) -> bool:
        return isinstance(node, optax.ScaleByAdamState)

    return jax.tree.map(lambda node: jax.tree.map(jnp.zeros_like, node) if is_adam(node) else node, opt_state, is_leaf=is_adam)


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

    Args: gradient: micro-batch -> (gradient like params, whatever else is kept of it). micros: see `split`. Returns the sum, and
    what is kept of each micro-batch, stacked.
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
    # An optimiser may overflow where its gradient did not. The new weights are computed twice, and not kept the first time: once
    # all is decided the state changes in place, without a second copy of it.
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
    params, opt_state = {}, {}
    for part, optimizer in optimizers.items():
        update = optax.with_extra_args_support(optimizer).update
        updates, opt_state[part] = update(gradient.by_part[part], state.opt_state[part], state.params[part], unit=gradient.unit)
        params[part] = optax.apply_updates(state.params[part], updates)
    return dataclasses.replace(state, step=state.step + 1, params=params, opt_state=opt_state)
