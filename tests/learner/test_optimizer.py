"""Schedules at steps computed by hand, which parameters decay, and clipping."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tba_jax.learner import optimizer as optimizer_lib
from tba_jax.learner.optimizer import SCHEDULES, adamw, linear_then_constant
from tba_jax.models import parameters
from tba_jax.models.config import DecoderConfig
from tests.support import applied, tiny_run


def rate_of_update(n: int, name: str, *, steps: int, warmup_steps: int, decay_steps: int, decay: str) -> float:
    """The learning rate of update n, counted from 1, over its peak, from the words of the schedule."""
    if n < warmup_steps:
        return n / warmup_steps
    before = n - 1  # updates done: the decay is complete after update number `steps`, and that update still learns
    if name == "linear" and n > warmup_steps:
        return max(0.0, 1 - (before - warmup_steps) / max(1, steps - warmup_steps))
    if name == "wsd" and before > steps - decay_steps:
        done = min(1.0, (before - (steps - decay_steps)) / max(1, decay_steps))
        return 1 - done if decay == "linear" else (1 + math.cos(math.pi * done)) / 2
    return 1.0


@pytest.mark.parametrize("decay", ["linear", "cosine"])
@pytest.mark.parametrize("steps, warmup_steps, decay_steps", [(20, 4, 5), (9, 4, 5), (1, 0, 0)])
@pytest.mark.parametrize("name", SCHEDULES)
def test_learning_rates(name, steps, warmup_steps, decay_steps, decay):
    settings = dict(steps=steps, warmup_steps=warmup_steps, decay_steps=decay_steps, decay=decay)
    schedule = SCHEDULES[name](peak=2.0, **settings)
    found = jax.jit(jax.vmap(schedule))(jnp.arange(steps))
    expected = [2.0 * rate_of_update(n, name, **settings) for n in range(1, steps + 1)]
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert min(found) > 0, "no update is without effect"


def test_beta_goes_linearly_from_start_to_end_and_stays():
    schedule = linear_then_constant(start=0.012, end=0.004, steps=500)
    found = [float(schedule(jnp.int32(step))) for step in (0, 125, 250, 500, 900)]
    assert found == pytest.approx([0.012, 0.010, 0.008, 0.004, 0.004])
    assert float(linear_then_constant(start=0.012, end=0.004, steps=0)(jnp.int32(0))) == pytest.approx(0.004)


def update_of(params, grads, unit=1.0, **settings) -> dict:
    settings = dict(beta1=0.9, beta2=0.95, epsilon=1e-8, weight_decay=0.0, clip_norm=0.0) | settings
    optimizer = adamw(optimizer_lib.constant(peak=0.1, steps=1), **settings)

    @jax.jit
    def step(params, grads):
        updates, _ = optax.with_extra_args_support(optimizer).update(grads, optimizer.init(params), params, unit=unit)
        return optax.apply_updates(params, updates)

    return step(params, grads)


def test_weights_decay_and_norms_do_not():
    sizes = dict(layers=2, width=8, heads=2, kv_heads=1, head_size=4, ffn=6, vocab=5, max_positions=8)
    specs = applied.specs(DecoderConfig(**sizes, tied_embedding=False, qkv_bias=True))
    params = parameters.map_specs(lambda _, spec: np.ones(spec.shape, np.float32), specs)
    after = update_of(params, jax.tree.map(np.zeros_like, params), weight_decay=0.5)
    for path, found in jax.tree_util.tree_flatten_with_path(after)[0]:
        expected = 1.0 if path[-1].key in ("scale", "bias") else 1 - 0.1 * 0.5  # learning rate × weight decay
        np.testing.assert_allclose(found, expected, rtol=1e-6, err_msg=str(path))


def test_two_steps_equal_those_of_optax():
    weight, grads = (np.random.default_rng(0).normal(size=(n, 3, 2)).astype(np.float32) for n in (1, 2))
    schedule = optimizer_lib.constant(peak=0.1, steps=2)
    ours = adamw(schedule, beta1=0.8, beta2=0.9, epsilon=1e-3, weight_decay=0.2, clip_norm=0.0)
    found = []
    for made in (ours, optax.adamw(0.1, b1=0.8, b2=0.9, eps=1e-3, weight_decay=0.2)):
        params = {"weight": weight}
        state = made.init(params)
        for grad in grads:
            updates, state = made.update({"weight": grad[None]}, state, params)
            params = optax.apply_updates(params, updates)
        found.append(params["weight"])
    np.testing.assert_allclose(*found, rtol=1e-6)


def test_gradients_are_clipped_by_their_global_norm():
    """The epsilon is so large that the step is linear in the gradient: clipping from norm 10 to 2 divides it by 5."""
    params = {"a": jnp.zeros((2, 2)), "b": jnp.zeros((2, 2))}
    grads = {"a": jnp.full((2, 2), 3.0), "b": jnp.full((2, 2), 4.0)}  # norm sqrt(4 * 9 + 4 * 16) = 10
    free, clipped, untouched = (update_of(params, grads, epsilon=1e6, clip_norm=limit) for limit in (0.0, 2.0, 11.0))
    halved = update_of(params, grads, unit=0.5, epsilon=1e6, clip_norm=4.0)  # norm 5 in its unit
    for name in params:
        np.testing.assert_allclose(halved[name], free[name] * 4 / 5, rtol=1e-5)
        np.testing.assert_allclose(clipped[name], free[name] / 5, rtol=1e-5)
        np.testing.assert_allclose(untouched[name], free[name], rtol=1e-6)
        assert np.abs(free[name]).min() > 0


def test_moments_begin_anew_and_schedules_go_on():
    optimizer = adamw(optax.linear_schedule(1.0, 0.0, 10), beta1=0.9, beta2=0.95, epsilon=1e-8, weight_decay=0.0, clip_norm=1.0)
    params = {"weight": jnp.arange(1.0, 4.0)}
    fresh, state = optimizer.update(params, optimizer.init(params), params)
    for _ in range(2):
        _, state = optimizer.update({"weight": -params["weight"]}, state, params)
    restarted, _ = optimizer.update(params, optimizer_lib.restart_moments(state), params)
    # Adam's first step, at the learning rate of the fourth: 0.7.
    np.testing.assert_allclose(restarted["weight"], 0.7 * fresh["weight"], rtol=1e-5)


def test_the_schedule_of_the_learning_rate_may_be_longer_than_the_run():
    """The run of 4 updates ends in the middle of a decay of 4, which begins after update 2."""
    changes = dict(schedule="wsd", decay="cosine", steps=4, warmup_steps=0, decay_steps=4, learning_rate=1.0)
    for schedule_steps, expected in ((6, [1, 1, 1, 0.853553]), (0, [1, 0.853553, 0.5, 0.146447])):
        flags = {f"learner__{name}": value for name, value in (changes | {"schedule_steps": schedule_steps}).items()}
        np.testing.assert_allclose(optimizer_lib.policy_rates(tiny_run.config(**flags).learner), expected, rtol=1e-4)


@pytest.mark.parametrize("name", ["learned_log_z", "ppo", "grpo"])
def test_heads_that_are_learned_have_optimizers_of_their_own(name):
    rates = {"learner__log_z_learning_rate": 0.25, "learner__value_learning_rate": 0.125}
    optimizers = optimizer_lib.make_optimizers(tiny_run.config(learner__objective=name, learner__warmup_steps=0, **rates).learner)
    assert ("log_z_head" in optimizers) == (name == "learned_log_z")
    assert ("value_head" in optimizers) == (name == "ppo")
    for part, optimizer in optimizers.items():
        params = {"weight": jnp.ones(3)}
        updates, _ = optimizer.update({"weight": jnp.ones(3)}, optimizer.init(params), params)
        np.testing.assert_allclose(updates["weight"], -{"policy": 1e-3, "log_z_head": 0.25, "value_head": 0.125}[part], rtol=1e-4)
