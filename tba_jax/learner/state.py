"""What training holds on its devices: the state, and a batch of rows."""

import dataclasses
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
from tba_jax import trajectory
from tba_jax.models import parameters
from tba_jax.models.parameters import Definition, Params
from tba_jax.models.policy import Policy, PolicyWithHeads

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


@flax.struct.dataclass
class Batch:
    """B = Q·K rows on the device, rows of one query consecutive. Shapes and units as in trajectory.Rows.

    ref_logprobs: log-probs under the run's initial reference. moving_ref_logprobs: log-probs under the reference of the step;
    None where the reference does not move. state_values: see ObjectiveInputs; None where rows have no column of that name.
    """

    tokens: chex.Array
    prompt_length: chex.Array
    response_length: chex.Array
    ref_logprobs: chex.Array
    behavior_logprobs: chex.Array
    reward: chex.Array
    moving_ref_logprobs: chex.Array | None = None
    state_values: chex.Array | None = None

    @property
    def R(self) -> int:
        return self.ref_logprobs.shape[-1]


def batch_from_rows(rows: trajectory.Rows) -> Batch:
    """The columns that an update needs, still on the host."""
    columns = {field.name for field in dataclasses.fields(Batch)} - {"moving_ref_logprobs"}
    if "state_values" not in rows:
        columns.remove("state_values")
    return Batch(**{name: np.asarray(rows[name]) for name in columns})


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
