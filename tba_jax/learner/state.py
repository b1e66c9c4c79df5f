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
class Batch:
    """B = Q·K rows on the device, rows of one query consecutive. Shapes and units as in trajectory.Rows.

    moving_ref_logprobs: as ref_logprobs, which are those of the run's initial reference, by the reference of the step; None
    where the reference does not move.
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


def batch_from_rows(rows: trajectory.Rows) -> Batch:
    """The columns that an update needs, still on the host."""
    columns = [field.name for field in dataclasses.fields(Batch) if field.name != "moving_ref_logprobs"]
    return Batch(**{name: np.asarray(rows[name]) for name in columns})


@dataclasses.dataclass(frozen=True)
class Optimizers:
    """Of the policy, and of the log Z head (None: there is none)."""

    policy: optax.GradientTransformation
    log_z: optax.GradientTransformation | None = None


def init_state(params: Params, optimizers: Optimizers, *, log_z: Params | None = None) -> TrainState:
    """The state of step 0.

    Args:
      params: what is trained of the policy. log_z: parameters of the head (heads.log_z_specs), where there is one.
    """
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        skipped=jnp.zeros((), jnp.int32),
        params=params,
        opt_state=optimizers.policy.init(params),
        log_z=log_z or {},
        log_z_opt_state=optimizers.log_z.init(log_z) if optimizers.log_z is not None else (),
    )


def state_shapes(policy: Policy, optimizers: Optimizers, mesh: Mesh) -> TrainState:
    """The train state as jax.ShapeDtypeStruct with shardings: the moments of a parameter are sharded as it is."""
    head = heads.log_z_specs(policy.model) if optimizers.log_z is not None else {}
    params, log_z = parameters.shapes(policy.trained_specs), parameters.shapes(head)
    shapes = jax.eval_shape(functools.partial(init_state, optimizers=optimizers), params, log_z=log_z)
    everywhere = mesh_lib.replicated(mesh)

    def moments(optimizer: optax.GradientTransformation | None, opt_state: Any, shardings: Params) -> Any:
        if optimizer is None:
            return opt_state
        return optax.tree_map_params(
            optimizer, lambda _, sharding: sharding, opt_state, shardings, transform_non_params=lambda _: everywhere
        )

    trained, of_head = policy.trained_shardings(mesh), parameters.shardings(head, mesh)
    shardings = TrainState(
        step=everywhere,
        skipped=everywhere,
        params=trained,
        opt_state=moments(optimizers.policy, shapes.opt_state, trained),
        log_z=of_head,
        log_z_opt_state=moments(optimizers.log_z, shapes.log_z_opt_state, of_head),
    )
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)
