"""Every objective against loops, its gradients against finite differences, its symmetries, and what it refuses."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tba_jax.objectives import OBJECTIVES
from tba_jax.objectives.trajectory_balance import vargrad_log_z
from tests.support.objective_loops import FORMS, PER_BUDGET, UNCOUPLED, evaluate, held_by, loop_loss, random_batch, rows_of

SIZES = [(1, 2, 3), (3, 4, 7), (5, 3, 1), (2, 16, 12), (6, 1, 5)]  # Q, K, R
COEFFICIENTS = [(0.004, 1.0, 1.0), (0.3, 1.7, 0.6), (1.0, 0.8, 2.0)]  # β, γ, τ
LOG_RATIO_CLIP, IMPORTANCE_CLIP = 10.0, 8.0

forms = pytest.mark.parametrize("form", FORMS)


def batch_of(form, sizes, **settings):
    return random_batch(*sizes, **FORMS[form][1], **settings)


def test_every_objective_is_tested():
    assert {name for name, _ in FORMS.values()} == set(OBJECTIVES)


@pytest.mark.parametrize(
    ("form", "sizes"),
    [(form, sizes) for form in FORMS for sizes in SIZES if sizes[1] >= OBJECTIVES[FORMS[form][0]].min_completions],
    ids=str,
)
def test_the_loss_equals_a_loop(form, sizes):
    name = FORMS[form][0]
    for seed, (beta, gamma, tau) in enumerate(COEFFICIENTS):
        outputs, inputs = batch_of(form, sizes, seed=seed, beta=beta, ref_temperature=gamma, reward_temperature=tau, outliers=0.1)
        expected = loop_loss(name, outputs, held_by(name, outputs, inputs), inputs)
        np.testing.assert_allclose(evaluate(name, outputs, inputs)[0], expected, rtol=1e-9, atol=1e-12)


@forms
def test_the_loss_in_float32_equals_a_loop(form):
    """1e-5: log-probs of hundreds of nats, r/β of hundreds, and a roundoff of 6e-8 of each."""
    name = FORMS[form][0]
    for seed, (beta, gamma, tau) in enumerate(COEFFICIENTS):
        settings = dict(seed=seed, beta=beta, ref_temperature=gamma, reward_temperature=tau, outliers=0.1)
        outputs, inputs = batch_of(form, (3, 4, 7), **settings, dtype=np.float32)
        expected = loop_loss(name, outputs, held_by(name, outputs, inputs), inputs)
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
    """By each of the outputs, with what is detached held fixed."""
    (name, _), (beta, gamma, tau) = FORMS[form], coefficients
    if not OBJECTIVES[name].full_support:
        outliers = 0.0  # of ratios of e^20 differences keep too few digits
    outputs, inputs = batch_of(
        form, (3, 4, 7), beta=beta, ref_temperature=gamma, reward_temperature=tau, outliers=outliers, seed=3
    )
    gradient, held = evaluate(name, outputs, inputs)[1], held_by(name, outputs, inputs)

    def differences(field: str) -> np.ndarray:
        at = getattr(outputs, field)
        found = np.zeros(at.shape)
        for index in np.ndindex(at.shape):
            step = np.zeros(at.shape)
            step[index] = 1e-5
            above, below = (
                loop_loss(name, dataclasses.replace(outputs, **{field: at + sign * step}), held, inputs) for sign in (1, -1)
            )
            found[index] = (above - below) / 2e-5
        return found

    learned = {"logprobs": True, "log_z": OBJECTIVES[name].log_z_head, "values": OBJECTIVES[name].value_head}
    for field, is_learned in learned.items():
        found, expected = getattr(gradient, field), differences(field) if is_learned else 0.0
        assert (np.abs(found).max() > 1e-3) == is_learned and found.any() == is_learned
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7 * np.abs(expected).max())
    assert not gradient.logprobs[~inputs.mask].any() and not gradient.values[~inputs.mask].any()


def test_the_estimate_of_log_z_carries_no_gradient():
    policy, target = np.random.default_rng(0).normal(size=(2, 4, 5)).astype(np.float32)
    for argument in (0, 1):
        assert not np.asarray(jax.jacobian(vargrad_log_z, argnums=argument)(policy, target)).any()
    np.testing.assert_allclose(vargrad_log_z(policy, target), np.mean(target - policy, axis=1), rtol=1e-5)


@pytest.mark.parametrize("what", ["rows in a group", "groups in a batch"])
@forms
def test_the_order_of_rows_and_groups_does_not_matter(form, what):
    Q, K, R = 3, 4, 7
    name, (outputs, inputs) = FORMS[form][0], batch_of(form, (Q, K, R))
    rng, order = np.random.default_rng(1), np.arange(Q * K).reshape(Q, K)
    order = rng.permuted(order, axis=1) if what == "rows in a group" else rng.permutation(order, axis=0)
    order = order.reshape(-1)
    loss, gradient = evaluate(name, outputs, inputs)
    permuted_loss, permuted_gradient = evaluate(name, *rows_of(outputs, inputs, order))
    np.testing.assert_allclose(permuted_loss, loss, rtol=1e-12)
    for field in ("logprobs", "log_z", "values"):
        np.testing.assert_allclose(getattr(permuted_gradient, field), getattr(gradient, field)[order], rtol=1e-9, atol=1e-12)


@forms
def test_which_objectives_tell_groups_apart(form):
    name, (outputs, inputs) = FORMS[form][0], batch_of(form, (3, 4, 7))
    rng, loss = np.random.default_rng(0), evaluate(name, outputs, inputs)[0]
    mixed = [evaluate(name, *rows_of(outputs, inputs, rng.permutation(12)))[0] for _ in range(4)]
    if name in UNCOUPLED:
        np.testing.assert_allclose(mixed, loss, rtol=1e-12)
    else:
        assert np.abs(np.array(mixed) - loss).max() > 1e-2 * abs(loss)


@forms
def test_more_padding_changes_nothing(form):
    """But R, where that is the divisor."""
    name, (outputs, inputs) = FORMS[form][0], batch_of(form, (3, 4, 7))

    def wider(array: np.ndarray) -> np.ndarray:
        return np.pad(array, ((0, 0), (0, 3)), constant_values=0 if array.dtype == bool else -9.0)

    names = ("ref_logprobs", "behavior_logprobs", "mask", "state_values")
    padded = dataclasses.replace(inputs, **{name: wider(getattr(inputs, name)) for name in names})
    outputs_padded = dataclasses.replace(outputs, logprobs=wider(outputs.logprobs), values=wider(outputs.values))
    scale = 7 / 10 if name in PER_BUDGET and inputs.settings.row_divisor == "response_budget" else 1.0
    loss, gradient = evaluate(name, outputs, inputs)
    padded_loss, padded_gradient = evaluate(name, outputs_padded, padded)
    np.testing.assert_allclose(padded_loss, loss * scale, rtol=1e-12)
    for field in ("logprobs", "values"):
        found, expected = getattr(padded_gradient, field), getattr(gradient, field)
        np.testing.assert_allclose(found[:, :7], expected * scale, rtol=1e-12, atol=1e-16)
        assert not found[:, 7:].any()


@pytest.mark.parametrize("other", ["ref_logprobs", "behavior_logprobs"])
@forms
def test_extreme_ratios_give_finite_losses_and_gradients(form, other):
    """e^200 is infinite in float32, and so must the norm of the gradient not be. Who reads what is as it is declared."""
    name, (outputs, inputs) = FORMS[form][0], batch_of(form, (3, 4, 7), dtype=np.float32)
    usual_loss, _ = evaluate(name, outputs, inputs)
    of_tokens = np.where(np.arange(7) % 2 == 0, 200.0, -200.0).astype(np.float32)
    for far in (of_tokens, np.float32(200.0), np.float32(-200.0)):
        extreme = dataclasses.replace(inputs, **{other: outputs.logprobs + far})
        loss, gradient = evaluate(name, outputs, extreme)
        assert np.isfinite(loss) and np.isfinite(np.sum(gradient.logprobs**2)) and np.isfinite(np.sum(gradient.values**2))
    objective = OBJECTIVES[name]
    weighs = objective.behavior_logprobs and form != "tba_prime, unweighted"
    assert (loss != usual_loss) == (objective.reads_reference if other == "ref_logprobs" else weighs)


@pytest.mark.parametrize("wrong", ["narrow", "one column", "one row", "one token", "no axis of tokens"])
@forms
def test_log_probs_of_another_shape_are_refused(form, wrong):
    name, (outputs, inputs) = FORMS[form][0], batch_of(form, (3, 4, 7), dtype=np.float32)
    logprobs = {
        "narrow": outputs.logprobs[:, :6],
        "one column": outputs.logprobs[:, :1],
        "one row": outputs.logprobs[:1],
        "one token": outputs.logprobs[:1, :1],
        "no axis of tokens": outputs.logprobs[0],
    }[wrong]
    with pytest.raises(AssertionError):
        OBJECTIVES[name].loss(dataclasses.replace(outputs, logprobs=jnp.asarray(logprobs)), inputs)


def test_tba_prime_by_row_weighs_each_token_by_the_length_of_its_row():
    """The sum over tokens of a row, divided by the tokens of its prompt and response, and never by R."""
    outputs, inputs = batch_of("tba_prime, by row", (2, 3, 5))
    expected = 0.0
    for row, advantage in enumerate(held_by("tba_prime", outputs, inputs)):
        weights = [min(8.0, np.exp(outputs.logprobs[row, t] - inputs.behavior_logprobs[row, t])) for t in range(5)]
        tokens = [t for t in range(5) if inputs.mask[row, t]]
        expected -= sum(weights[t] * advantage for t in tokens) / (inputs.prompt_length[row] + len(tokens)) / 6
    np.testing.assert_allclose(evaluate("tba_prime", outputs, inputs)[0], expected, rtol=1e-12)
    with pytest.raises(AssertionError):
        OBJECTIVES["tba_prime"].loss(outputs, dataclasses.replace(inputs, prompt_length=inputs.prompt_length[:1]))


@pytest.mark.parametrize("field", ["ref_logprobs", "behavior_logprobs", "mask", "reward"])
@forms
def test_inputs_of_another_shape_are_refused(form, field):
    name, (outputs, inputs) = FORMS[form][0], batch_of(form, (3, 4, 7), dtype=np.float32)
    for wrong in (getattr(inputs, field)[:1], getattr(inputs, field)[..., :1]):
        with pytest.raises(AssertionError):
            OBJECTIVES[name].loss(outputs, dataclasses.replace(inputs, **{field: jnp.asarray(wrong)}))


@pytest.mark.parametrize("form", [form for form in FORMS if form not in UNCOUPLED])
def test_a_batch_that_is_not_of_whole_groups_is_refused(form):
    name, (outputs, inputs) = FORMS[form][0], batch_of(form, (3, 4, 7), dtype=np.float32)
    with pytest.raises(AssertionError):
        OBJECTIVES[name].loss(outputs, dataclasses.replace(inputs, settings=dataclasses.replace(inputs.settings, completions=5)))


def test_a_log_z_that_is_not_of_every_row_is_refused():
    outputs, inputs = random_batch(2, 4, 5, dtype=np.float32)
    for log_z in (outputs.log_z[::4], outputs.log_z[:1], outputs.log_z[:, None], outputs.log_z[0]):
        with pytest.raises(AssertionError):
            OBJECTIVES["learned_log_z"].loss(dataclasses.replace(outputs, log_z=jnp.asarray(log_z)), inputs)
