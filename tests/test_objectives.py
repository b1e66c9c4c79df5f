"""Trajectory balance against loops in float64, its gradient against the identity of PAPER §1, and its symmetries."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tba_jax.objectives import OBJECTIVES, Objective
from tba_jax.objectives.inputs import ObjectiveInputs
from tba_jax.objectives.trajectory_balance import trajectory_balance, vargrad_log_z

SIZES = [(1, 2, 3), (3, 4, 7), (5, 3, 1), (2, 20, 16)]  # Q, K, R


def random_batch(Q: int, K: int, R: int, *, seed: int = 0, beta: float = 0.3) -> tuple[np.ndarray, ObjectiveInputs]:
    """policy_logprobs float32[B, R] and inputs with ragged lengths; what is masked holds numbers that must not count."""
    rng = np.random.default_rng([seed, Q, K, R])
    lengths = rng.integers(1, R + 1, Q * K)
    policy, ref, behavior = -rng.exponential(1.0, (3, Q * K, R)).astype(np.float32)
    inputs = ObjectiveInputs(
        ref_logprobs=ref,
        behavior_logprobs=behavior,
        mask=np.arange(R)[None, :] < lengths[:, None],
        reward=rng.normal(size=Q * K).astype(np.float32),
        beta=np.float32(beta),
        completions=K,
    )
    return policy, inputs


def loop_sums(policy: np.ndarray, inputs: ObjectiveInputs) -> tuple[np.ndarray, np.ndarray]:
    """float64[B] sums of the policy's and the reference's log-probs over real tokens."""
    sums = np.zeros((2, len(policy)))
    for row in range(len(policy)):
        for t in range(policy.shape[1]):
            if inputs.mask[row, t]:
                sums[:, row] += float(policy[row, t]), float(inputs.ref_logprobs[row, t])
    return sums[0], sums[1]


def loop_loss(policy: np.ndarray, inputs: ObjectiveInputs) -> tuple[float, np.ndarray]:
    """The loss and log Ẑ of every query, in float64."""
    policy_sum, ref_sum = loop_sums(policy, inputs)
    beta, K = float(inputs.beta), inputs.completions
    squares, log_z = [], []
    for first in range(0, len(policy), K):
        group = range(first, first + K)
        estimate = sum(ref_sum[j] - policy_sum[j] + float(inputs.reward[j]) / beta for j in group) / K
        log_z.append(estimate)
        squares += [(estimate + policy_sum[i] - ref_sum[i] - float(inputs.reward[i]) / beta) ** 2 for i in group]
    return sum(squares) / len(squares), np.array(log_z)


def loop_gradient(policy: np.ndarray, inputs: ObjectiveInputs) -> np.ndarray:
    """∇L = −(2/β) · mean_ij A_ij ∇ log π_θ(y_ij|x_i), A_ij = (r_ij − r̄_i) − β (k_ij − k̄_i): float64[B, R], by log-prob."""
    policy_sum, ref_sum = loop_sums(policy, inputs)
    beta, K, B = float(inputs.beta), inputs.completions, len(policy)
    gradient = np.zeros(policy.shape)
    for first in range(0, B, K):
        group = slice(first, first + K)
        reward, kl = inputs.reward[group].astype(np.float64), (policy_sum - ref_sum)[group]
        advantage = (reward - reward.mean()) - beta * (kl - kl.mean())
        gradient[group] = (-2 / beta * advantage / B)[:, None]
    return np.where(inputs.mask, gradient, 0.0)


@functools.partial(jax.jit, static_argnums=2)
def evaluate(policy: jax.Array, inputs: ObjectiveInputs, objective: Objective = trajectory_balance):
    """((loss, measurements), ∂ loss / ∂ policy_logprobs)."""
    return jax.value_and_grad(objective, has_aux=True)(policy, inputs)


@pytest.mark.parametrize("beta", [0.004, 1.0])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_the_loss_equals_a_loop(sizes, beta):
    policy, inputs = random_batch(*sizes, beta=beta)
    (loss, measurements), _ = evaluate(policy, inputs)
    expected, log_z = loop_loss(policy, inputs)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    np.testing.assert_allclose(measurements["log_z"], log_z.mean(), rtol=1e-5)
    np.testing.assert_allclose(measurements["log_z_std"], log_z.std(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("beta", [0.004, 1.0])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_the_gradient_is_reinforce_with_a_mean_baseline(sizes, beta):
    policy, inputs = random_batch(*sizes, beta=beta)
    found, expected = np.asarray(evaluate(policy, inputs)[1]), loop_gradient(policy, inputs)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    assert not found[~inputs.mask].any()


def test_the_gradient_equals_finite_differences_with_log_z_held():
    policy, inputs = random_batch(2, 3, 4)
    log_z = np.repeat(loop_loss(policy, inputs)[1], 3)
    ref_sum, beta = loop_sums(policy, inputs)[1], float(inputs.beta)

    def held_loss(policy: np.ndarray) -> float:
        sums = np.where(inputs.mask, policy, 0.0).sum(axis=1)
        return float(np.mean((log_z + sums - ref_sum - inputs.reward.astype(np.float64) / beta) ** 2))

    found, precise = evaluate(policy, inputs)[1], policy.astype(np.float64)
    for row, t in np.ndindex(policy.shape):
        step = np.zeros(policy.shape)
        step[row, t] = 1e-4
        slope = (held_loss(precise + step) - held_loss(precise - step)) / 2e-4
        np.testing.assert_allclose(found[row, t], slope, rtol=1e-4, atol=1e-4)


def test_log_z_carries_no_gradient():
    policy, ref, reward = (jnp.asarray(x) for x in np.random.default_rng(0).normal(size=(3, 4, 5)).astype(np.float32))
    jacobian = jax.jacobian(lambda p: vargrad_log_z(p, ref, reward, beta=jnp.float32(0.5)))(policy)
    assert not np.asarray(jacobian).any()
    np.testing.assert_allclose(
        vargrad_log_z(policy, ref, reward, beta=jnp.float32(0.5)), np.mean(ref - policy + 2 * reward, 1), rtol=1e-5
    )


def test_the_optimum_has_no_loss_and_no_gradient():
    """Where log π_θ = log π_ref + r/β − log Z on every row, whatever Z is."""
    _, inputs = random_batch(3, 4, 1)
    log_z = np.repeat(np.array([-2.0, 0.5, 7.0], np.float32), 4)
    optimal = inputs.ref_logprobs + (inputs.reward / inputs.beta - log_z)[:, None]
    (loss, measurements), gradient = evaluate(optimal, inputs)
    assert float(loss) < 1e-10
    np.testing.assert_allclose(measurements["log_z"], log_z.mean(), rtol=1e-5)
    assert np.abs(gradient).max() < 1e-5


def rows_of(policy: np.ndarray, inputs: ObjectiveInputs, order: np.ndarray) -> tuple[np.ndarray, ObjectiveInputs]:
    per_row = ("ref_logprobs", "behavior_logprobs", "mask", "reward")
    return policy[order], dataclasses.replace(inputs, **{name: getattr(inputs, name)[order] for name in per_row})


@pytest.mark.parametrize("what", ["rows in a group", "groups in a batch"])
@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES)
def test_the_order_of_rows_and_groups_does_not_matter(objective, what):
    Q, K, R = 4, 5, 6
    policy, inputs = random_batch(Q, K, R)
    rng, order = np.random.default_rng(1), np.arange(Q * K).reshape(Q, K)
    order = rng.permuted(order, axis=1) if what == "rows in a group" else rng.permutation(order, axis=0)
    order = order.reshape(-1)
    (loss, _), grads = evaluate(policy, inputs, objective)
    (permuted_loss, _), permuted_grads = evaluate(*rows_of(policy, inputs, order), objective)
    np.testing.assert_allclose(permuted_loss, loss, rtol=1e-6)
    np.testing.assert_allclose(permuted_grads, grads[order], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES)
def test_mixing_rows_of_two_groups_does_matter(objective):
    policy, inputs = random_batch(2, 4, 6)
    order = np.array([4, 1, 2, 3, 0, 5, 6, 7])
    ((loss, _), _), ((mixed, _), _) = evaluate(policy, inputs, objective), evaluate(*rows_of(policy, inputs, order), objective)
    assert abs(float(loss) - float(mixed)) > 1e-3 * float(loss)


@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES)
def test_more_padding_changes_nothing(objective):
    policy, inputs = random_batch(3, 4, 5)

    def wider(array: np.ndarray) -> np.ndarray:
        return np.pad(array, ((0, 0), (0, 3)), constant_values=0 if array.dtype == bool else -9.0)

    padded = dataclasses.replace(
        inputs,
        ref_logprobs=wider(inputs.ref_logprobs),
        behavior_logprobs=wider(inputs.behavior_logprobs),
        mask=wider(inputs.mask),
    )
    ((loss, _), _), ((padded_loss, _), _) = evaluate(policy, inputs, objective), evaluate(wider(policy), padded, objective)
    np.testing.assert_allclose(padded_loss, loss, rtol=1e-6)


def test_shapes_that_do_not_fit_are_refused():
    policy, inputs = random_batch(2, 4, 5)
    with pytest.raises(AssertionError):
        trajectory_balance(jnp.asarray(policy[:, :4]), inputs)
    with pytest.raises(AssertionError):
        trajectory_balance(jnp.asarray(policy), dataclasses.replace(inputs, completions=3))
