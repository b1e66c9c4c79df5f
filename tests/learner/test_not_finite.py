"""Updates that are not finite are left out, counted, and told by row."""

import dataclasses
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tba_jax.learner import state as state_lib
from tba_jax.learner import update as update_lib
from tba_jax.learner.optimizer import adamw
from tests.support.tiny_updates import (
    FORMS,
    POLICY,
    batch_of,
    make_step,
    random_batch,
    random_params,
    settings,
    state_of,
)


@pytest.fixture(scope="module")
def adam() -> tuple[state_lib.Optimizers, Any]:
    """An optimiser, and a jitted step of it with donated state that may be traced once."""
    optimizer = adamw(lambda step: jnp.float32(1e-2), beta1=0.9, beta2=0.95, epsilon=1e-8, weight_decay=0.0, clip_norm=1.0)
    optimizers = {"policy": optimizer}
    once = chex.assert_max_traces(update_lib.train_step, n=1)
    return optimizers, make_step(settings(), optimizers=optimizers, train_step=once, donate_argnums=0)


def initial(optimizers: state_lib.Optimizers) -> state_lib.TrainState:
    return jax.jit(lambda params: state_lib.init_state(POLICY, params, optimizers))(random_params())


def test_the_loss_goes_down_in_one_trace(adam):
    optimizers, update = adam
    state = initial(optimizers)
    losses = []
    for _ in range(30):
        state, measurements = update(state, {}, random_batch())
        losses.append(float(measurements["loss"]))
    assert int(state.step) == 30
    assert losses[-1] < 0.3 * losses[0], losses
    update(state, {}, random_batch(seed=1))


# Of row 3. A reward of 1e30 is finite, the square of its residual is not.
NOT_FINITE = [
    ("reward", np.inf),
    ("reward", np.nan),
    ("reward", 1e30),
    ("ref_logprobs", -np.inf),
    ("behavior_logprobs", np.nan),
]


@pytest.mark.parametrize("column, value", NOT_FINITE[1:4])
def test_a_batch_that_is_not_finite_is_only_counted(adam, column, value):
    optimizers, update = adam
    state, _ = update(initial(optimizers), {}, random_batch())
    before = jax.device_get(state)
    batch = random_batch()
    getattr(batch, column)[3] = value
    after, measurements = update(state, {}, batch)
    assert float(measurements["finite"]) == 0
    assert np.flatnonzero(~measurements["row_finite"]).tolist() == [3]
    assert float(measurements["skipped_steps"]) == 1
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(after), dataclasses.replace(before, step=2, skipped=1))
    again, measurements = update(after, {}, random_batch())
    assert float(measurements["finite"]) == 1 and (int(again.step), int(again.skipped)) == (3, 1)


@pytest.mark.parametrize("form", ["tba_prime", "ppo"])
def test_every_form_names_the_row_that_is_not_finite(form):
    state, optimizers = state_of(form)
    before = jax.device_get(state)
    update = make_step(settings(**FORMS[form][0]), optimizers=optimizers)
    for column, value in NOT_FINITE:
        batch = batch_of(form)
        getattr(batch, column)[3] = value
        after, measurements = update(state, {}, batch)
        assert float(measurements["finite"]) == 0
        assert np.flatnonzero(~measurements["row_finite"]).tolist() == [3]
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(after), dataclasses.replace(before, step=1, skipped=1))


def test_an_optimizer_that_overflows_leaves_the_state_as_it_was():
    """Its gradient is finite, and so are the moments that it would keep."""
    optimizers = {"policy": optax.chain(optax.scale_by_adam(), optax.scale(3e38))}
    update = make_step(settings(), optimizers=optimizers, donate_argnums=0)
    state = initial(optimizers)
    before = jax.device_get(state)
    after, measurements = update(state, {}, random_batch())
    assert np.isfinite(measurements["grad_norm"]) and measurements["row_finite"].all() and float(measurements["finite"]) == 0
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(after), dataclasses.replace(before, step=1, skipped=1))


def test_a_gradient_that_overflows_leaves_the_state_as_it_was():
    """The square of a weight's gradient is not finite, although the loss and every row are."""
    optimizers = {"policy": optax.scale_by_adam()}
    update = make_step(settings(), optimizers=optimizers, donate_argnums=0)
    state, batch = initial(optimizers), random_batch()
    before = jax.device_get(state)
    batch = dataclasses.replace(batch, reward=batch.reward * np.float32(2.5e18))
    after, measurements = update(state, {}, batch)
    assert np.isfinite(measurements["loss"]) and measurements["row_finite"].all() and float(measurements["finite"]) == 0
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(after), dataclasses.replace(before, step=1, skipped=1))
