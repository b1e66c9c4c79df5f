"""What training holds on its devices: the state, and a batch of rows."""

import dataclasses
import functools
from typing import Any

import chex
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from tba_jax import mesh as mesh_lib
from tba_jax import trajectory
from tba_jax.models import heads, parameters
from tba_jax.models.parameters import Params
from tba_jax.models.policy import Policy


@flax.struct.dataclass
class TrainState:
    """What an update changes.

    step: int32[], updates done, refused ones included; skipped: int32[], updates refused because they were not finite, for
    which neither the optimiser nor its learning rate goes on;
    params: what is trained of the policy, float32 master weights (Policy), and its optimiser's state; log_z: the head that
    learns log Z(x) (heads.log_partition) and its optimiser's state, {} and () where the objective needs none.
    """

    step: chex.Array
    skipped: chex.Array
    params: Params
    opt_state: Any
    log_z: Params
    log_z_opt_state: Any


@flax.struct.dataclass
class ValuedTrainState(TrainState):
    """Of an objective with a value head: value_head, the head that learns V (heads.state_values), and its optimiser's state.

    A class of its own, so that checkpoints of the other objectives hold what they always held.
    """

    value_head: Params
    value_head_opt_state: Any


def value_head_of(state: TrainState) -> Params:
    """{} where there is none."""
    return state.value_head if isinstance(state, ValuedTrainState) else {}


@flax.struct.dataclass
class Batch:
    """B = Q·K rows on the device, rows of one query consecutive. Shapes and units as in trajectory.Rows.

    moving_ref_logprobs: as ref_logprobs, which are those of the run's initial reference, by the reference of the step; None
    where the reference does not move. state_values: see ObjectiveInputs; None where rows have no column of that name.
    """

    prompt_tokens: chex.Array
    prompt_length: chex.Array
    response_tokens: chex.Array
    response_length: chex.Array
    ref_logprobs: chex.Array
    policy_logprobs: chex.Array
    behavior_logprobs: chex.Array
    policy_step: chex.Array
    reward: chex.Array
    moving_ref_logprobs: chex.Array | None = None
    state_values: chex.Array | None = None


def batch_from_rows(rows: trajectory.Rows) -> Batch:
    """The columns that an update needs, still on the host."""
    columns = {field.name for field in dataclasses.fields(Batch)} - {"moving_ref_logprobs"}
    if "state_values" not in rows:
        columns.remove("state_values")
    return Batch(**{name: np.asarray(rows[name]) for name in columns})


@dataclasses.dataclass(frozen=True)
class Optimizers:
    """Of the policy, and of the log Z head and the value head (None: there is none)."""

    policy: optax.GradientTransformation
    log_z: optax.GradientTransformation | None = None
    value_head: optax.GradientTransformation | None = None


def init_state(
    params: Params, optimizers: Optimizers, *, log_z: Params | None = None, value_head: Params | None = None
) -> TrainState:
    """The state of step 0.

    Args:
      params: what is trained of the policy. log_z, value_head: parameters of the heads (heads.log_z_specs,
        heads.value_head_specs), where there is one.
    """
    fields = dict(
        step=jnp.zeros((), jnp.int32),
        skipped=jnp.zeros((), jnp.int32),
        params=params,
        opt_state=optimizers.policy.init(params),
        log_z=log_z or {},
        log_z_opt_state=optimizers.log_z.init(log_z) if optimizers.log_z is not None else (),
    )
    if optimizers.value_head is None:
        return TrainState(**fields)
    return ValuedTrainState(**fields, value_head=value_head or {}, value_head_opt_state=optimizers.value_head.init(value_head))


def initial_heads(policy: Policy, optimizers: Optimizers) -> dict[str, Params]:
    """What the heads that have an optimiser begin with, as init_state takes them."""
    found = {}
    if optimizers.log_z is not None:
        found["log_z"] = heads.initial_log_z(policy.model)
    if optimizers.value_head is not None:
        found["value_head"] = heads.initial_value_head(policy.model)
    return found


def state_shapes(policy: Policy, optimizers: Optimizers, mesh: Mesh) -> TrainState:
    """The train state as jax.ShapeDtypeStruct with shardings: the moments of a parameter are sharded as it is."""
    of_heads = jax.eval_shape(functools.partial(initial_heads, policy, optimizers))
    shapes = jax.eval_shape(
        functools.partial(init_state, optimizers=optimizers), parameters.shapes(policy.trained_specs), **of_heads
    )
    everywhere = mesh_lib.replicated(mesh)

    def moments(optimizer: optax.GradientTransformation, opt_state: Any, shardings: Params) -> Any:
        return optax.tree_map_params(
            optimizer, lambda _, sharding: sharding, opt_state, shardings, transform_non_params=lambda _: everywhere
        )

    trained = policy.trained_shardings(mesh)
    shardings = dataclasses.replace(
        shapes,
        step=everywhere,
        skipped=everywhere,
        params=trained,
        opt_state=moments(optimizers.policy, shapes.opt_state, trained),
    )
    if optimizers.log_z is not None:
        head = parameters.shardings(heads.log_z_specs(policy.model), mesh)
        shardings = dataclasses.replace(
            shardings, log_z=head, log_z_opt_state=moments(optimizers.log_z, shapes.log_z_opt_state, head)
        )
    if isinstance(shapes, ValuedTrainState):
        head = parameters.shardings(heads.value_head_specs(policy.model), mesh)
        shardings = dataclasses.replace(
            shardings, value_head=head, value_head_opt_state=moments(optimizers.value_head, shapes.value_head_opt_state, head)
        )
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)
