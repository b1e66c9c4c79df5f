"""Every objective against loops, its gradients against finite differences, its symmetries, and what it refuses."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tba_jax.objectives import OBJECTIVES
from tba_jax.objectives.trajectory_balance import vargrad_log_z
from tests.objective_loops import FORMS, evaluate, held_by, loop_loss, random_batch, rows_of

SIZES = [(1, 2, 3), (3, 4, 7), (5, 3, 1), (2, 16, 12), (6, 1, 5)]  # Q, K, R
COEFFICIENTS = [(0.004, 1.0, 1.0), (0.3, 1.7, 0.6), (1.0, 0.8, 2.0)]  # β, γ, τ
LOG_RATIO_CLIP, IMPORTANCE_CLIP = 10.0, 8.0

forms = pytest.mark.parametrize("form", FORMS)


def batch_of(form, sizes, **settings):
    return random_batch(*sizes, importance_clip=FORMS[form][1], **settings)


def test_every_objective_is_tested():
    assert {name for name, _ in FORMS.values()} == set(OBJECTIVES)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@forms
def test_the_loss_equals_a_loop(form, sizes):
    name = FORMS[form][0]
    for seed, (beta, gamma, tau) in enumerate(COEFFICIENTS):
        outputs, inputs = batch_of(form, sizes, seed=seed, beta=beta, ref_temperature=gamma, reward_temperature=tau, outliers=0.1)
        expected = loop_loss(name, outputs.logprobs, held_by(name, outputs, inputs), inputs)
        np.testing.assert_allclose(evaluate(name, outputs, inputs)[0], expected, rtol=1e-9, atol=1e-12)


@forms
def test_the_loss_in_float32_equals_a_loop(form):
    """1e-5: log-probs of hundreds of nats, r/β of hundreds, and a roundoff of 6e-8 of each."""
    name = FORMS[form][0]
    for seed, (beta, gamma, tau) in enumerate(COEFFICIENTS):
        settings = dict(seed=seed, beta=beta, ref_temperature=gamma, reward_temperature=tau, outliers=0.1)
        outputs, inputs = batch_of(form, (3, 4, 7), **settings, dtype=np.float32)
        expected = loop_loss(name, outputs.logprobs, held_by(name, outputs, inputs), inputs)
        np.testing.assert_allclose(evaluate(name, outputs, inputs)[0], expected, rtol=1e-5)


def test_the_random_batches_reach_both_clips():
    """Else the loops would not tell a clip from none."""
    outputs, inputs = random_batch(3, 4, 7, outliers=0.1)
    log_ratio, importance = outputs.logprobs - inputs.ref_logprobs, np.exp(outputs.logprobs - inputs.behavior_logprobs)
    for beyond in (log_ratio > LOG_RATIO_CLIP, log_ratio < -LOG_RATIO_CLIP, importance > IMPORTANCE_CLIP):
        assert 0 < beyond[inputs.mask].sum() < inputs.mask.sum() / 2
    assert 0 in inputs.mask.sum(axis=1), "a row without tokens"


@pytest.mark.parametrize(("outliers", "coefficients"), [(0.1, (0.3, 1.7, 0.6)), (0.0, (0.05, 1.0, 1.0))], ids=str)
@forms
def test_gradients_equal_finite_differences(form, outliers, coefficients):
    """By log-probs, with log Ẑ and A held fixed, and by log Z where it is learned."""
    (name, _), (beta, gamma, tau) = FORMS[form], coefficients
    outputs, inputs = batch_of(
        form, (3, 4, 7), beta=beta, ref_temperature=gamma, reward_temperature=tau, outliers=outliers, seed=3
    )
    gradient, held = evaluate(name, outputs, inputs)[1], held_by(name, outputs, inputs)
    by_logprobs, by_log_z = np.zeros(outputs.logprobs.shape), np.zeros(len(held))
    for index in np.ndindex(by_logprobs.shape):
        step = np.zeros(by_logprobs.shape)
        step[index] = 1e-5
        above, below = (loop_loss(name, outputs.logprobs + sign * step, held, inputs) for sign in (1, -1))
        by_logprobs[index] = (above - below) / 2e-5
    for row in range(len(held) if name == "learned_log_z" else 0):
        above, below = (
            loop_loss(name, outputs.logprobs, [z + sign * 1e-5 * (row == i) for i, z in enumerate(held)], inputs)
            for sign in (1, -1)
        )
        by_log_z[row] = (above - below) / 2e-5
    assert np.abs(by_logprobs).max() > 1e-3
    np.testing.assert_allclose(gradient.logprobs, by_logprobs, rtol=1e-6, atol=1e-7 * np.abs(by_logprobs).max())
    np.testing.assert_allclose(gradient.log_z, by_log_z, rtol=1e-6, atol=1e-7 * np.abs(by_log_z).max())
    assert not gradient.logprobs[~inputs.mask].any()
    assert by_log_z.any() == (name == "learned_log_z")


def test_the_estimate_of_log_z_carries_no_gradient():
    policy, target = np.random.default_rng(0).normal(size=(2, 4, 5)).astype(np.float32)
    for argument in (0, 1):
        assert not np.asarray(jax.jacobian(vargrad_log_z, argnums=argument)(policy, target)).any()
    np.testing.assert_allclose(vargrad_log_z(policy, target), np.mean(target - policy, axis=1), rtol=1e-5)


@pytest.mark.parametrize("what", ["rows in a group", "groups in a batch"])
@forms
def test_the_order_of_rows_and_groups_does_not_matter(form, what):
    Q, K, R = 4, 5, 6
    name, (outputs, inputs) = FORMS[form][0], batch_of(form, (Q, K, R))
    rng, order = np.random.default_rng(1), np.arange(Q * K).reshape(Q, K)
    order = rng.permuted(order, axis=1) if what == "rows in a group" else rng.permutation(order, axis=0)
    order = order.reshape(-1)
    loss, gradient = evaluate(name, outputs, inputs)
    permuted_loss, permuted_gradient = evaluate(name, *rows_of(outputs, inputs, order))
    np.testing.assert_allclose(permuted_loss, loss, rtol=1e-12)
    np.testing.assert_allclose(permuted_gradient.logprobs, gradient.logprobs[order], rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(permuted_gradient.log_z, gradient.log_z[order], rtol=1e-9, atol=1e-12)


@forms
def test_only_a_learned_log_z_does_not_tell_groups_apart(form):
    name, (outputs, inputs) = FORMS[form][0], batch_of(form, (2, 4, 6))
    mixed = np.array([4, 1, 2, 3, 0, 5, 6, 7])
    loss, mixed_loss = evaluate(name, outputs, inputs)[0], evaluate(name, *rows_of(outputs, inputs, mixed))[0]
    if name == "learned_log_z":
        np.testing.assert_allclose(mixed_loss, loss, rtol=1e-12)
    else:
        assert abs(mixed_loss - loss) > 1e-2 * abs(loss)


@forms
def test_more_padding_changes_nothing(form):
    """Of TBA′ nothing but R, by which it is divided."""
    name, (outputs, inputs) = FORMS[form][0], batch_of(form, (4, 5, 6))

    def wider(array: np.ndarray) -> np.ndarray:
        return np.pad(array, ((0, 0), (0, 3)), constant_values=0 if array.dtype == bool else -9.0)

    padded = dataclasses.replace(
        inputs,
        ref_logprobs=wider(inputs.ref_logprobs),
        behavior_logprobs=wider(inputs.behavior_logprobs),
        mask=wider(inputs.mask),
    )
    scale = 6 / 9 if name == "tba_prime" else 1.0
    loss, gradient = evaluate(name, outputs, inputs)
    padded_loss, padded_gradient = evaluate(name, dataclasses.replace(outputs, logprobs=wider(outputs.logprobs)), padded)
    np.testing.assert_allclose(padded_loss, loss * scale, rtol=1e-12)
    np.testing.assert_allclose(padded_gradient.logprobs[:, :6], gradient.logprobs * scale, rtol=1e-12)
    assert not padded_gradient.logprobs[:, 6:].any()


@pytest.mark.parametrize("other", ["ref_logprobs", "behavior_logprobs"])
@forms
def test_extreme_ratios_give_finite_losses_and_gradients(form, other):
    """e^200 is infinite in float32."""
    name, (outputs, inputs) = FORMS[form][0], batch_of(form, (2, 4, 6), dtype=np.float32)
    far = np.where(np.arange(6) % 2 == 0, 200.0, -200.0).astype(np.float32)
    extreme = dataclasses.replace(inputs, **{other: outputs.logprobs + far})
    (loss, gradient), (usual_loss, _) = evaluate(name, outputs, extreme), evaluate(name, outputs, inputs)
    assert np.isfinite(loss) and np.isfinite(gradient.logprobs).all()
    assert (loss != usual_loss) == (other == "ref_logprobs" or form == "tba_prime")


@pytest.mark.parametrize("wrong", ["narrow", "one column", "one row", "one token", "no axis of tokens"])
@forms
def test_log_probs_of_another_shape_are_refused(form, wrong):
    name, (outputs, inputs) = FORMS[form][0], batch_of(form, (2, 4, 5), dtype=np.float32)
    logprobs = {
        "narrow": outputs.logprobs[:, :4],
        "one column": outputs.logprobs[:, :1],
        "one row": outputs.logprobs[:1],
        "one token": outputs.logprobs[:1, :1],
        "no axis of tokens": outputs.logprobs[0],
    }[wrong]
    with pytest.raises(AssertionError):
        OBJECTIVES[name](dataclasses.replace(outputs, logprobs=jnp.asarray(logprobs)), inputs)


@pytest.mark.parametrize("field", ["ref_logprobs", "behavior_logprobs", "mask", "reward"])
@forms
def test_inputs_of_another_shape_are_refused(form, field):
    name, (outputs, inputs) = FORMS[form][0], batch_of(form, (2, 4, 5), dtype=np.float32)
    for wrong in (getattr(inputs, field)[:1], getattr(inputs, field)[..., :1]):
        with pytest.raises(AssertionError):
            OBJECTIVES[name](outputs, dataclasses.replace(inputs, **{field: jnp.asarray(wrong)}))


@pytest.mark.parametrize("form", [form for form in FORMS if form != "learned_log_z"])
def test_a_batch_that_is_not_of_whole_groups_is_refused(form):
    name, (outputs, inputs) = FORMS[form][0], batch_of(form, (2, 4, 5), dtype=np.float32)
    with pytest.raises(AssertionError):
        OBJECTIVES[name](outputs, dataclasses.replace(inputs, settings=dataclasses.replace(inputs.settings, completions=3)))


def test_a_log_z_that_is_not_of_every_row_is_refused():
    outputs, inputs = random_batch(2, 4, 5, dtype=np.float32)
    for log_z in (outputs.log_z[::4], outputs.log_z[:1], outputs.log_z[:, None], outputs.log_z[0]):
        with pytest.raises(AssertionError):
            OBJECTIVES["learned_log_z"](dataclasses.replace(outputs, log_z=jnp.asarray(log_z)), inputs)
