"""Micro-batches, logit blocks and meshes against one pass on one device, and updates that are not finite."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tba_jax import sharding
from tba_jax.learner import settings as learner_settings
from tba_jax.learner import state as state_lib
from tba_jax.learner import update as update_lib
from tba_jax.learner.optimizer import adamw
from tba_jax.models import parameters
from tba_jax.models.policy import LoraConfig, Policy
from tests.support import applied
from tests.support.tiny_updates import (
    DESCENT,
    FORMS,
    MODEL,
    POLICY,
    K,
    assert_same,
    batch_of,
    limits,
    make_step,
    measured,
    one_pass,
    random_batch,
    random_params,
    settings,
    state_of,
)


@pytest.mark.parametrize(
    "form, changed",
    [
        ("trajectory_balance", dict(limits=limits(3 * K), logit_bytes=4 * 3 * K * 12 * 4, remat="full")),
        # Each row with a prompt of its own, as the splash kernel has them.
        ("tba_prime", dict(limits=limits(shares=False))),
    ],
    ids=str,
)
def test_micro_batches_and_logit_blocks_change_nothing(form, changed):
    state, optimizers = state_of(form)
    step = make_step(settings(**FORMS[form][0] | changed), optimizers=optimizers)
    assert_same(measured(step, state, batch_of(form)), one_pass(form))


@pytest.mark.parametrize(
    "form, sizes, micro_batch_rows",  # data, fsdp, tensor
    [
        ("trajectory_balance", (1, 4, 2), 12),
        # Not a multiple of K: micro-batches cut through groups.
        *((form, (2, 2, 2), 6) for form in ("learned_log_z", "ppo")),
    ],
    ids=str,
)
def test_meshes_give_what_one_device_gives(form, sizes, micro_batch_rows):
    mesh = sharding.make_mesh(sizes, setting="learner.mesh")
    on_host, optimizers = state_of(form)
    shardings = jax.tree.map(lambda x: x.sharding, state_lib.state_shapes(POLICY, optimizers, mesh))
    config = settings(**FORMS[form][0], limits=limits(micro_batch_rows, ways=sharding.row_ways(mesh)))
    options = dict(out_shardings=(shardings, sharding.replicated(mesh)))
    step = make_step(config, optimizers=optimizers, mesh=mesh, **options)
    state = jax.device_put(on_host, shardings)
    if sizes == (2, 2, 2):
        shard = state.params["policy"]["layers"]["feed_forward"]["gate"]["weight"].addressable_shards[0].data
        assert shard.size == MODEL.layers * MODEL.width * MODEL.ffn // 4
    assert_same(measured(sharding.on_mesh(mesh, step), state, sharding.put_rows(mesh, batch_of(form))), one_pass(form))


LORA = Policy(model=MODEL, lora=LoraConfig(rank=2, alpha=4.0, targets=("layers.*",)))


def test_adapters_alone_get_the_gradient_of_the_whole_policy():
    config = dataclasses.replace(settings(limits=limits(6)), policy=LORA)
    adapters = applied.random(LORA.trained_specs, scale=0.3, seed=1)
    state = state_lib.init_state(LORA, adapters, DESCENT)
    after, measurements = make_step(config)(state, random_params(), random_batch())
    gradient = jax.tree.map(lambda new, old: old - np.asarray(new), after.params["policy"], adapters)
    assert set(parameters.flatten(gradient)) == set(parameters.flatten(LORA.trained_specs))
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(gradient))
    assert abs(float(measurements["loss"]) - one_pass("trajectory_balance")[0]) > 1e-3  # the adapters change the policy
    # Merged into the weights, they are a policy whose gradient, taken back through the merge, is theirs.
    merged, pull_back = jax.vjp(lambda adapters: LORA.for_sampling(adapters, random_params(), "full"), adapters)
    whole = state_lib.init_state(POLICY, merged, DESCENT)
    after, _ = make_step(settings(limits=limits(6)))(whole, {}, random_batch())
    (expected,) = pull_back(jax.tree.map(lambda new, old: jnp.asarray(old - new), after.params["policy"], merged))
    assert_same((0.0, gradient, {}), (0.0, expected, {}))


SIZES = dict(prompt=4, response=6, queries=7, completions=20)


@pytest.mark.parametrize(
    "tokens, ways, sentence",
    [
        (9, 1, "learner.micro_batch_tokens=9 does not hold one row: .* = 10 tokens; at least 10, or 0"),
        (39, 4, "learner.micro_batch_tokens=39 does not hold one row for each of the 4 ways of learner.mesh: .*; at least 40"),
        (0, 8, "learner.queries × learner.completions = 140 rows are not divisible by the 8 ways"),
    ],
)
def test_micro_batches_that_do_not_fit_are_refused(tokens, ways, sentence):
    with pytest.raises(ValueError, match=sentence):
        learner_settings.limits(tokens, **SIZES, ways=ways, shares=True)


def initial(optimizers: state_lib.Optimizers) -> state_lib.TrainState:
    return jax.jit(lambda params: state_lib.init_state(POLICY, params, optimizers))(random_params())


def test_the_loss_goes_down_in_one_trace():
    optimizer = adamw(lambda step: jnp.float32(1e-2), beta1=0.9, beta2=0.95, epsilon=1e-8, weight_decay=0.0, clip_norm=1.0)
    optimizers, once = {"policy": optimizer}, chex.assert_max_traces(update_lib.train_step, n=1)
    update = make_step(settings(), optimizers=optimizers, train_step=once, donate_argnums=0)
    state = initial(optimizers)
    losses = []
    for _ in range(20):
        state, measurements = update(state, {}, random_batch())
        losses.append(float(measurements["loss"]))
    assert int(state.step) == 20
    assert losses[-1] < 0.5 * losses[0], losses
    update(state, {}, random_batch(seed=1))


# A reward of 1e30 is finite, the square of its residual is not.
NOT_FINITE = [
    ("reward", np.inf),
    ("reward", np.nan),
    ("reward", 1e30),
    ("ref_logprobs", -np.inf),
    ("behavior_logprobs", np.nan),
]


def test_the_row_that_is_not_finite_is_named_and_the_batch_only_counted():
    form = "ppo"
    state, optimizers = state_of(form)
    before = jax.device_get(state)
    update = make_step(settings(**FORMS[form][0]), optimizers=optimizers)
    for column, value in NOT_FINITE:  # of row 3
        batch = batch_of(form)
        getattr(batch, column)[3] = value
        after, measurements = update(state, {}, batch)
        assert float(measurements["finite"]) == 0
        assert np.flatnonzero(~measurements["row_finite"]).tolist() == [3]
        assert float(measurements["skipped_steps"]) == 1
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(after), dataclasses.replace(before, step=1, skipped=1))
    again, measurements = update(after, {}, batch_of(form))
    assert float(measurements["finite"]) == 1 and (int(again.step), int(again.skipped)) == (2, 1)


@pytest.mark.parametrize(
    "optimizer, scale",
    [
        # The gradient is finite, and so are the moments that the optimiser would keep.
        (optax.chain(optax.scale_by_adam(), optax.scale(3e38)), 1.0),
        # The square of a weight's gradient is not finite, although the loss and every row are.
        (optax.scale_by_adam(), 2.5e18),
    ],
    ids=["optimiser", "gradient"],
)
def test_what_overflows_leaves_the_state_as_it_was(optimizer, scale):
    optimizers = {"policy": optimizer}
    update, state, batch = make_step(settings(), optimizers=optimizers, donate_argnums=0), initial(optimizers), random_batch()
    before = jax.device_get(state)
    after, measurements = update(state, {}, dataclasses.replace(batch, reward=batch.reward * np.float32(scale)))
    assert np.isfinite(measurements["loss"]) and measurements["row_finite"].all() and float(measurements["finite"]) == 0
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(after), dataclasses.replace(before, step=1, skipped=1))
