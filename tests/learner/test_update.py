"""One update against the loss by hand, and what it takes from its batch and its schedules."""

import dataclasses
import functools
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
from tba_jax.models.parameters import Params
from tba_jax.objectives import OBJECTIVES
from tba_jax.objectives.objective import Objective
from tests.support import applied
from tests.support.tiny_updates import (
    BETA,
    FORMS,
    MODEL,
    POLICY,
    B,
    K,
    P,
    Q,
    R,
    assert_same,
    batch_of,
    make_step,
    measured,
    one_pass,
    random_batch,
    random_params,
    settings,
    state_of,
)


@functools.cache
def scores() -> tuple[np.ndarray, np.ndarray]:
    """policy_logprobs and entropy of the fixed batch."""
    return jax.device_get(jax.jit(score_fixed_batch)(random_params()))


def score_fixed_batch(params: Params) -> tuple[jax.Array, jax.Array]:
    return update_lib.score(POLICY.for_training(params, {}), random_batch(), config=settings())


def gradient_of(cotangent: np.ndarray) -> Any:
    """What a cotangent of the log-probs gives for the parameters; that way is JAX's."""
    return jax.jit(jax.grad(lambda p: jnp.sum(cotangent.astype(np.float32) * score_fixed_batch(p)[0])))(random_params())


def test_one_pass_equals_the_loss_by_hand():
    """Loss and ∂ loss / ∂ log π in NumPy from the scores."""
    batch = random_batch()
    policy, entropy = scores()
    sums, ref = policy.sum(1, dtype=np.float64).reshape(Q, K), batch.ref_logprobs.sum(1, dtype=np.float64).reshape(Q, K)
    target = ref + batch.reward.reshape(Q, K) / BETA
    log_z = (target - sums).mean(axis=1)
    residual = log_z[:, None] + sums - target
    mask = trajectory.response_mask(batch.response_length, R)
    expected = {
        "loss": np.mean(residual**2),
        "log_z": log_z.mean(),
        "log_z_std": log_z.std(),
        "beta": BETA,
        "reward": batch.reward.mean(),
        "kl_to_ref": (sums - ref).mean(),
        "entropy": entropy.sum() / mask.sum(),
        "response_length": mask.sum() / B,
    }
    loss, gradient, found = one_pass("trajectory_balance")
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, err_msg=name)
    by_hand = gradient_of(np.where(mask, 2 / B * residual.reshape(B, 1), 0.0))
    assert_same((loss, gradient, {}), (expected["loss"], {"policy": by_hand, "head": {}}, {}))
    np.testing.assert_allclose(found["grad_norm"], BETA / 2 * optax.tree.norm(by_hand), rtol=1e-5)


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


def test_the_learned_log_z_is_that_of_the_mean_prompt_state():
    """Loss and the gradients of head and policy in NumPy; the states from a forward pass over each prompt by itself."""
    batch, state = random_batch(), state_of("learned_log_z")[0]
    means, hidden_states = [], jax.jit(functools.partial(applied.hidden_states, config=MODEL, remat="none"))
    for row in range(0, B, K):
        length = batch.prompt_length[row]
        padded = np.where(np.arange(P) < length, batch.tokens[row : row + 1, :P], 0)  # no state looks behind the prompt
        means.append(np.asarray(hidden_states(random_params(), padded))[0, :length].mean(0))
    log_z = np.repeat(np.stack(means) @ state.params["log_z_head"]["weight"] + state.params["log_z_head"]["bias"], K)
    target = batch.ref_logprobs.sum(1) + batch.reward / BETA
    residual = log_z + scores()[0].sum(1) - target
    cotangent = 2 / B * residual
    per_query = cotangent.reshape(Q, K).sum(1)
    head = {"weight": np.stack(means).T @ per_query[:, None], "bias": per_query.sum(keepdims=True)}
    mask = trajectory.response_mask(batch.response_length, R)
    policy = gradient_of(np.where(mask, cotangent[:, None], 0.0))
    loss, gradient, found = one_pass("learned_log_z")
    assert_same((loss, gradient, {}), (np.mean(residual**2), {"policy": policy, "head": head}, {}))
    np.testing.assert_allclose(found["learned_log_z"], log_z.mean(), rtol=1e-5)


def test_values_are_learned_from_states_shared_with_the_policy():
    """PPO's loss and gradients in NumPy from the scores and the states of a forward pass of their own."""
    batch, state = random_batch(), state_of("ppo")[0]

    def values_of(params: Any, head: Any) -> jax.Array:
        hidden = applied.response_hidden_states(params, batch.tokens, batch.prompt_length, R=R, config=MODEL, remat="none")
        return (hidden @ head["weight"] + head["bias"])[..., 0]

    policy, values = scores()[0], np.asarray(values_of(random_params(), state.params["value_head"]))
    by_logprobs, by_values, loss = np.zeros((B, R)), np.zeros((B, R)), 0.0
    for row in range(B):
        advantage = following = 0.0
        last = batch.response_length[row] - 1
        for t in range(last, -1, -1):
            reward = -BETA * (policy[row, t] - batch.ref_logprobs[row, t]) + (batch.reward[row] if t == last else 0.0)
            advantage = reward + following - values[row, t] + 0.95 * advantage
            following = values[row, t]
            ratio = np.exp(policy[row, t] - batch.behavior_logprobs[row, t])
            bounded = min(max(ratio, 0.8), 1.2)
            loss += (0.1 * advantage**2 / 2 - min(ratio * advantage, bounded * advantage)) / (B * R)
            by_logprobs[row, t] = -ratio * advantage / (B * R) * (ratio * advantage <= bounded * advantage)
            by_values[row, t] = -0.1 * advantage / (B * R)
    cotangent = by_values.astype(np.float32)
    through_values = jax.grad(lambda p, h: jnp.sum(cotangent * values_of(p, h)), argnums=(0, 1))
    of_policy, of_head = through_values(random_params(), state.params["value_head"])
    of_policy = jax.tree.map(jnp.add, of_policy, gradient_of(by_logprobs))
    found = one_pass("ppo")
    assert_same((*found[:2], {}), (loss, {"policy": of_policy, "head": of_head}, {}))
    mask = trajectory.response_mask(batch.response_length, R)
    error = np.sqrt(np.mean((values - batch.reward[:, None])[mask] ** 2))
    np.testing.assert_allclose(found[2]["value_error"], error, rtol=1e-5)


def test_a_reference_that_moves_takes_the_place_of_the_rows_own():
    """And the distance to the initial reference, which the rows carry, is measured beside it."""
    batch, policy = batch_of("moving reference"), scores()[0]
    found = one_pass("moving reference")[2]
    np.testing.assert_allclose(found["kl_to_ref"], (policy - batch.moving_ref_logprobs).sum(1).mean(), rtol=1e-5)
    np.testing.assert_allclose(found["kl_to_initial"], (policy - batch.ref_logprobs).sum(1).mean(), rtol=1e-5)
    as_own = dataclasses.replace(batch, ref_logprobs=batch.moving_ref_logprobs, moving_ref_logprobs=None)
    step = make_step(settings(**FORMS["tba_prime"][0]))
    loss, gradient, _ = measured(step, state_of("tba_prime")[0], as_own)
    assert_same((loss, gradient, {}), (*one_pass("moving reference")[:2], {}))


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
