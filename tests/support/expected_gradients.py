"""Gradients of objectives expected over all groups of responses: one query, responses of one token each, exactly."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from tba_jax.objectives import OBJECTIVES
from tba_jax.objectives.inputs import ObjectiveInputs, ObjectiveSettings, PolicyOutputs
from tests.support.objective_loops import FORMS

BETA = 0.4
REWARD = np.array([1.0, 0.0, 0.3, -0.5, 2.0])
REF_LOGPROBS = np.log([0.1, 0.3, 0.25, 0.2, 0.15])
OPTIMUM = REF_LOGPROBS + REWARD / BETA
THETA = np.array([0.4, -0.7, 0.1, 0.9, -0.3])
UNIFORM, SKEWED = [0.2] * 5, [0.6, 0.05, 0.05, 0.1, 0.2]
UNCLIPPED = {"clip_low": 1.0, "clip_high": 1e6}


def group_gradient(
    theta: jax.Array, log_z: jax.Array, group: jax.Array, behavior: jax.Array, form: str, changes: dict[str, float]
) -> tuple[jax.Array, jax.Array]:
    """∇ L of the policy softmax(θ) on one group, int[K], of responses that `behavior` drew: by θ, float64[n], and by log Z."""
    name, settings = FORMS[form]
    K = group.shape[0]
    inputs = ObjectiveInputs(
        ref_logprobs=jnp.asarray(REF_LOGPROBS)[group][:, None],
        behavior_logprobs=jnp.log(behavior)[group][:, None],
        mask=jnp.ones((K, 1), bool),
        reward=jnp.asarray(REWARD)[group],
        beta=jnp.asarray(BETA),
        ref_temperature=jnp.ones(()),
        reward_temperature=jnp.ones(()),
        settings=ObjectiveSettings(completions=K, **settings | UNCLIPPED | changes),
        state_values=jnp.broadcast_to(log_z, (K, 1)),
        prompt_length=jnp.full(K, 3),
    )

    def loss(theta: jax.Array, log_z: jax.Array) -> jax.Array:
        logprobs = jax.nn.log_softmax(theta)[group][:, None]
        heads = dict(log_z=jnp.broadcast_to(log_z, (K,)), values=jnp.broadcast_to(log_z, (K, 1)))
        return OBJECTIVES[name].loss(PolicyOutputs(logprobs=logprobs, **heads), inputs)

    return jax.grad(loss, argnums=(0, 1))(theta, log_z)


@functools.partial(jax.jit, static_argnames=("K", "form", "changes"))
def expected_gradients(
    theta: jax.Array,
    log_z: jax.Array,
    behavior: jax.Array,
    *,
    K: int,
    form: str = "trajectory_balance",
    changes: tuple[tuple[str, float], ...] = (),
) -> tuple[jax.Array, jax.Array]:
    """E[∇ L] over all n^K groups that `behavior`, float64[n] probabilities, can draw. changes: of ObjectiveSettings."""
    groups = jnp.asarray(list(itertools.product(range(theta.shape[0]), repeat=K)))
    by_theta, by_log_z = jax.vmap(lambda group: group_gradient(theta, log_z, group, behavior, form, dict(changes)))(groups)
    weight = jnp.prod(behavior[groups], axis=1)
    return weight @ by_theta, weight @ by_log_z


def expected_gradient(
    theta: jax.Array, behavior: jax.Array, *, K: int, form: str = "trajectory_balance", log_z: float = 0.7, **changes: float
) -> jax.Array:
    """E[∇_θ L], see expected_gradients."""
    return expected_gradients(theta, jnp.asarray(log_z), behavior, K=K, form=form, changes=tuple(changes.items()))[0]
