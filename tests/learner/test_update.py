"""One update against the objective's loss on whole rows, and what it takes from its batch and its schedules."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tba_jax import trajectory
from tba_jax.learner import state as state_lib
from tba_jax.learner import update as update_lib
from tba_jax.learner.optimizer import clip_by_norm, linear_then_constant
from tba_jax.objectives import OBJECTIVES
from tba_jax.objectives.objective import Objective, ObjectiveInputs, PolicyOutputs
from tests.support import applied
from tests.support.tiny_updates import (
    BETA,
    FORMS,
    MODEL,
    POLICY,
    B,
    P,
    R,
    assert_same,
    batch_of,
    make_step,
    one_pass,
    random_batch,
    random_params,
    settings,
    state_of,
)


def of_head(head: Any, states: jax.Array) -> jax.Array:
    return (states @ head["weight"] + head["bias"])[..., 0]


@pytest.mark.parametrize("form", FORMS)
def test_one_pass_equals_the_loss_on_whole_rows(form):
    """Each row lies alone here: log-probs, means of prompt states and values come from forward passes of their own."""
    batch, config = batch_of(form), settings(**FORMS[form][0])
    mask = trajectory.response_mask(batch.response_length, R)
    inputs = ObjectiveInputs(
        ref_logprobs=batch.ref_logprobs if batch.moving_ref_logprobs is None else batch.moving_ref_logprobs,
        behavior_logprobs=batch.behavior_logprobs,
        mask=mask,
        reward=batch.reward,
        beta=jnp.float32(BETA),
        ref_temperature=jnp.ones(()),
        reward_temperature=jnp.ones(()),
        settings=config.settings,
    )

    @jax.jit
    def loss(params: Any) -> Any:
        policy, log_z, values = params["policy"], jnp.zeros(B), None
        logprobs, entropy = update_lib.score(POLICY.for_training(policy, {}), batch, config=config)
        if "log_z_head" in params:
            hidden = applied.hidden_states(jax.lax.stop_gradient(policy), batch.tokens[:, :P], config=MODEL, remat="none")
            real = np.arange(P)[:, None] < batch.prompt_length[:, None, None]
            log_z = of_head(params["log_z_head"], jnp.mean(hidden, axis=1, where=real))
        if "value_head" in params:
            of_rows = batch.tokens, batch.prompt_length
            values = of_head(
                params["value_head"], applied.response_hidden_states(policy, *of_rows, R=R, config=MODEL, remat="none")
            )
        outputs = PolicyOutputs(logprobs=logprobs, log_z=log_z, values=values)
        return config.objective.loss(outputs, inputs), (outputs, entropy)

    (value, (outputs, entropy)), gradient = jax.value_and_grad(loss, has_aux=True)(state_of(form)[0].params)
    policy = gradient.pop("policy")
    (head,) = gradient.values() or ({},)
    found = one_pass(form)
    assert_same((*found[:2], {}), (float(value), {"policy": policy, "head": head}, {}))
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
    """On any batch β/2 times the gradient of trajectory balance is that of REINFORCE: so it is told, and so it is clipped."""
    optimizers = {"policy": optax.chain(clip_by_norm(limit), optax.sgd(1.0))}
    constant = linear_then_constant(start=beta, end=beta, steps=0)
    moves, norms = {}, {}
    for name in ("trajectory_balance", "reinforce"):
        state = state_lib.init_state(POLICY, random_params(), optimizers)
        step = make_step(settings(objective=OBJECTIVES[name]), optimizers=optimizers, changes={"beta": constant})
        after, found = step(state, {}, random_batch())
        moves[name] = jax.tree.map(np.subtract, state.params["policy"], after.params["policy"])
        norms[name] = float(found["grad_norm"])
    assert 0.05 < norms["reinforce"] < 100 and norms["trajectory_balance"] == pytest.approx(norms["reinforce"], rel=1e-4)
    moved = float(optax.tree.norm(moves["reinforce"]))
    assert moved == pytest.approx(min(limit, norms["reinforce"]), rel=1e-3)
    scaled = jax.tree.map(lambda x: x * beta / 2, moves["trajectory_balance"])
    assert float(optax.tree.norm(jax.tree.map(np.subtract, scaled, moves["reinforce"]))) < 1e-3 * moved


def test_coefficients_follow_the_step():
    """The objective here is made of them, so that the loss shows what it was given."""
    given = {
        "beta": linear_then_constant(start=0.9, end=0.1, steps=4),
        "ref_temperature": linear_then_constant(start=1.0, end=1.2, steps=2),
        "reward_temperature": linear_then_constant(start=2.0, end=1.0, steps=5),
    }
    shown = Objective(loss=lambda _, x: x.beta + 10 * x.ref_temperature + 100 * x.reward_temperature)
    config = settings(objective=shown)
    update, state, found = make_step(config, changes=given), state_of("trajectory_balance")[0], []
    for _ in range(6):
        state, measurements = update(state, {}, random_batch())
        found.append(float(measurements["loss"]))
    np.testing.assert_allclose(found, [210.9, 191.7, 172.5, 152.3, 132.1, 112.1], rtol=1e-6)
