"""One update against the objective's loss on whole rows, on meshes and in micro-batches; updates that are not finite."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tba_jax import sharding, trajectory
from tba_jax.learner import optimizer as state_lib
from tba_jax.learner import update as update_lib
from tba_jax.learner.optimizer import clip_by_norm, linear_then_constant
from tba_jax.objectives.objective import Objective, ObjectiveInputs, PolicyOutputs
from tests.support import applied
from tests.support import tiny_updates as tiny
from tests.support.tiny_updates import BETA, FORMS, MODEL, POLICY, B, K, P, R, random_batch, state_of


def of_head(head: Any, states: jax.Array) -> jax.Array:
    return (states @ head["weight"] + head["bias"])[..., 0]


@pytest.mark.parametrize("form", FORMS)
def test_one_pass_equals_the_loss_on_whole_rows(form):
    """Each row lies alone here: log-probs, means of prompt states and values come from forward passes of their own."""
    batch, config = tiny.batch_of(form), tiny.settings(**FORMS[form][0])
    mask = trajectory.response_mask(batch.response_length, R)
    ref = batch.ref_logprobs if batch.moving_ref_logprobs is None else batch.moving_ref_logprobs
    rows = dict(ref_logprobs=ref, behavior_logprobs=batch.behavior_logprobs, mask=mask, reward=batch.reward)
    coefficients = dict(beta=jnp.float32(BETA), ref_temperature=jnp.ones(()), reward_temperature=jnp.ones(()))
    inputs = ObjectiveInputs(**rows, **coefficients, settings=config.settings)

    @jax.jit
    def loss(params: Any) -> Any:
        policy, log_z, values = params["policy"], jnp.zeros(B), None
        logprobs, entropy = update_lib.score(POLICY.for_training(policy, {}), batch, config=config)
        if "log_z_head" in params:
            hidden = applied.hidden_states(jax.lax.stop_gradient(policy), batch.tokens[:, :P], config=MODEL, remat="none")
            real = np.arange(P)[:, None] < batch.prompt_length[:, None, None]
            log_z = of_head(params["log_z_head"], jnp.mean(hidden, axis=1, where=real))
        if "value_head" in params:
            hidden = applied.hidden_states(policy, batch.tokens[:, :-1], config=MODEL, remat="none")
            places = batch.prompt_length[:, None] - 1 + np.arange(R)
            values = of_head(params["value_head"], jnp.take_along_axis(hidden, np.minimum(places, P + R - 2)[..., None], axis=1))
        outputs = PolicyOutputs(logprobs=logprobs, log_z=log_z, values=values)
        return config.objective.loss(outputs, inputs), (outputs, entropy)

    (value, (outputs, entropy)), gradient = jax.value_and_grad(loss, has_aux=True)(state_of(form)[0].params)
    policy = gradient.pop("policy")
    (head,) = gradient.values() or ({},)
    found = tiny.one_pass(form)
    tiny.assert_same((*found[:2], {}), (float(value), {"policy": policy, "head": head}, {}))
    expected = {
        "beta": BETA,
        "reward": batch.reward.mean(),
        "kl_to_ref": (outputs.logprobs - inputs.ref_logprobs).sum(1).mean(),
        "entropy": entropy.sum() / mask.sum(),
        "response_length": mask.sum() / B,
        "grad_norm": config.objective.reward_unit(inputs) * optax.tree.norm(policy),
    }
    if form == "moving reference":
        expected["kl_to_initial"] = (outputs.logprobs - batch.ref_logprobs).sum(1).mean()
    if form == "learned_log_z":
        expected["learned_log_z"] = outputs.log_z.mean()
    if form == "ppo":
        expected["value_error"] = np.sqrt(np.mean(np.asarray(outputs.values - batch.reward[:, None])[mask] ** 2))
    for name, each in expected.items():
        np.testing.assert_allclose(found[2][name], each, rtol=2e-5, err_msg=name)


def test_a_gradient_is_clipped_in_units_of_the_reward(beta=0.01, limit=0.05):
    """β/2 times the gradient of trajectory balance is that of REINFORCE (test_identities.py): in this unit it is clipped."""
    optimizers = {"policy": optax.chain(clip_by_norm(limit), optax.sgd(1.0))}
    state = state_lib.init_state(POLICY, tiny.random_params(), optimizers)
    small = {"beta": linear_then_constant(start=beta, end=beta, steps=0)}
    step = tiny.make_step(tiny.settings(), optimizers=optimizers, changes=small)
    after, found = step(state, {}, random_batch())
    moved = float(optax.tree.norm(jax.tree.map(np.subtract, state.params["policy"], after.params["policy"])))
    assert limit < float(found["grad_norm"]) < 100 and moved * beta / 2 == pytest.approx(limit, rel=1e-3)


def test_coefficients_follow_the_step():
    """The objective here is made of them, so that the loss shows what it was given."""
    given = {
        "beta": linear_then_constant(start=0.9, end=0.1, steps=4),
        "ref_temperature": linear_then_constant(start=1.0, end=1.2, steps=2),
        "reward_temperature": linear_then_constant(start=2.0, end=1.0, steps=5),
    }
    shown = Objective(loss=lambda _, x: x.beta + 10 * x.ref_temperature + 100 * x.reward_temperature)
    config = tiny.settings(objective=shown)
    update, state, found = tiny.make_step(config, changes=given), state_of("trajectory_balance")[0], []
    for _ in range(6):
        state, measurements = update(state, {}, random_batch())
        found.append(float(measurements["loss"]))
    np.testing.assert_allclose(found, [210.9, 191.7, 172.5, 152.3, 132.1, 112.1], rtol=1e-6)


# At any split, a micro-batch cuts through groups; apart, each row has a prompt of its own, as the splash kernel has them.
ANY_SPLIT = dict(limits=tiny.limits(6), logit_bytes=4 * 3 * K * 12 * 4, remat="full")


@pytest.mark.parametrize(
    "form, changed", [("learned_log_z", ANY_SPLIT), ("moving reference", dict(limits=tiny.limits(shares=False)))], ids=str
)
def test_micro_batches_and_logit_blocks_change_nothing(form, changed):
    state, optimizers = state_of(form)
    step = tiny.make_step(tiny.settings(**FORMS[form][0] | changed), optimizers=optimizers)
    tiny.assert_same(tiny.measured(step, state, tiny.batch_of(form)), tiny.one_pass(form))


# data, fsdp, tensor; whole groups, and any split.
@pytest.mark.parametrize("form, sizes, micro_batch_rows", [("trajectory_balance", (1, 4, 2), 12), ("ppo", (2, 2, 2), 6)], ids=str)
def test_meshes_give_what_one_device_gives(form, sizes, micro_batch_rows):
    mesh = sharding.make_mesh(sizes, setting="learner.mesh")
    on_host, optimizers = state_of(form)
    shardings = jax.tree.map(lambda x: x.sharding, state_lib.state_shapes(POLICY, optimizers, mesh))
    config = tiny.settings(**FORMS[form][0], limits=tiny.limits(micro_batch_rows, ways=sharding.row_ways(mesh)))
    options = dict(out_shardings=(shardings, sharding.replicated(mesh)))
    step = tiny.make_step(config, optimizers=optimizers, mesh=mesh, **options)
    state = jax.device_put(on_host, shardings)
    if sizes == (2, 2, 2):
        shard = state.params["policy"]["layers"]["feed_forward"]["gate"]["weight"].addressable_shards[0].data
        assert shard.size == MODEL.layers * MODEL.width * MODEL.ffn // 4
    batch = sharding.put_rows(mesh, tiny.batch_of(form))
    tiny.assert_same(tiny.measured(sharding.on_mesh(mesh, step), state, batch), tiny.one_pass(form))


# A reward of 1e30 is finite, the square of its residual is not.
NOT_FINITE = [("reward", np.inf), ("reward", np.nan), ("reward", 1e30), ("ref_logprobs", -np.inf), ("behavior_logprobs", np.nan)]


def test_the_row_that_is_not_finite_is_named_and_the_batch_only_counted():
    form = "ppo"
    state, optimizers = state_of(form)
    before = jax.device_get(state)
    update = tiny.make_step(tiny.settings(**FORMS[form][0]), optimizers=optimizers)
    for column, value in NOT_FINITE:  # of row 3
        batch = tiny.batch_of(form)
        getattr(batch, column)[3] = value
        after, measurements = update(state, {}, batch)
        assert float(measurements["finite"]) == 0
        assert np.flatnonzero(~measurements["row_finite"]).tolist() == [3]
        assert float(measurements["skipped_steps"]) == 1
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(after), dataclasses.replace(before, step=1, skipped=1))
    again, measurements = update(after, {}, tiny.batch_of(form))
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
    update = tiny.make_step(tiny.settings(), optimizers=optimizers, donate_argnums=0)
    state = jax.jit(lambda params: state_lib.init_state(POLICY, params, optimizers))(tiny.random_params())
    batch = random_batch()
    before = jax.device_get(state)
    after, measurements = update(state, {}, dataclasses.replace(batch, reward=batch.reward * np.float32(scale)))
    assert np.isfinite(measurements["loss"]) and measurements["row_finite"].all() and float(measurements["finite"]) == 0
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(after), dataclasses.replace(before, step=1, skipped=1))
