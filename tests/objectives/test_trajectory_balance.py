"""Every objective against loops, its gradients against finite differences, its symmetries, and what it refuses."""

import dataclasses

import jax
import numpy as np
import pytest

from tba_jax.objectives import OBJECTIVES
from tests.support.objective_loops import FORMS, UNCOUPLED, evaluate, loop_loss, random_batch

COEFFICIENTS = [(0.004, 1.0, 1.0), (0.3, 1.7, 0.6), (1.0, 0.8, 2.0)]  # β, γ, τ
LOG_RATIO_CLIP, IMPORTANCE_CLIP = 10.0, 8.0

forms = pytest.mark.parametrize("form", FORMS)


def batch_of(form, sizes=(3, 4, 7), **settings):
    return random_batch(*sizes, **FORMS[form][1], **settings)


@forms
def test_the_loss_equals_a_loop(form):
    """In float32 to 1e-5: log-probs of hundreds of nats, r/β of hundreds, and a roundoff of 6e-8 of each."""
    name = FORMS[form][0]
    for sizes, dtype, rtol in [((3, 4, 7), np.float64, 1e-9), ((6, 1, 5), np.float64, 1e-9), ((3, 4, 7), np.float32, 1e-5)]:
        if sizes[1] < OBJECTIVES[name].min_completions:
            continue
        for seed, (beta, gamma, tau) in enumerate(COEFFICIENTS):
            settings = dict(seed=seed, beta=beta, ref_temperature=gamma, reward_temperature=tau, outliers=0.1)
            outputs, inputs = batch_of(form, sizes, **settings, dtype=dtype)
            np.testing.assert_allclose(
                evaluate(name, outputs, inputs)[0], loop_loss(name, outputs, inputs), rtol=rtol, atol=1e-12
            )


def test_the_random_batches_reach_both_clips():
    """Else the loops would not tell a clip from none."""
    outputs, inputs = random_batch(3, 4, 7, outliers=0.1)
    log_ratio, importance = outputs.logprobs - inputs.ref_logprobs, np.exp(outputs.logprobs - inputs.behavior_logprobs)
    for beyond in (log_ratio > LOG_RATIO_CLIP, log_ratio < -LOG_RATIO_CLIP, importance > IMPORTANCE_CLIP):
        assert 0 < beyond[inputs.mask].sum() < inputs.mask.sum() / 2
    assert 0 in inputs.mask.sum(axis=1), "a row without tokens"


@forms
def test_gradients_equal_finite_differences(form):
    """By each of the outputs, with what is detached held fixed."""
    name = FORMS[form][0]
    outliers = 0.1 if OBJECTIVES[name].full_support else 0.0  # of ratios of e^20 differences keep too few digits
    outputs, inputs = batch_of(form, beta=0.3, ref_temperature=1.7, reward_temperature=0.6, outliers=outliers, seed=3)
    gradient = evaluate(name, outputs, inputs)[1]

    def differences(field: str) -> np.ndarray:
        at = getattr(outputs, field)
        found = np.zeros(at.shape)
        for index in np.ndindex(at.shape):
            step = np.zeros(at.shape)
            step[index] = 1e-5
            moved = (dataclasses.replace(outputs, **{field: at + sign * step}) for sign in (1, -1))
            above, below = (loop_loss(name, each, inputs, held=outputs) for each in moved)
            found[index] = (above - below) / 2e-5
        return found

    learned = {"logprobs": True, "log_z": OBJECTIVES[name].log_z_head, "values": OBJECTIVES[name].value_head}
    for field, is_learned in learned.items():
        found, expected = getattr(gradient, field), differences(field) if is_learned else 0.0
        assert (np.abs(found).max() > 1e-3) == is_learned and found.any() == is_learned
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7 * np.abs(expected).max())
    assert not gradient.logprobs[~inputs.mask].any() and not gradient.values[~inputs.mask].any()


@forms
def test_extreme_ratios_give_finite_losses_and_gradients(form):
    """e^200 is infinite in float32, and so must the norm of the gradient not be. Who reads what is as it is declared."""
    name, (outputs, inputs) = FORMS[form][0], batch_of(form, dtype=np.float32)
    usual_loss, objective = evaluate(name, outputs, inputs)[0], OBJECTIVES[name]
    of_tokens = np.where(np.arange(7) % 2 == 0, 200.0, -200.0).astype(np.float32)
    weighs = objective.behavior_logprobs and form != "tba_prime, unweighted"
    for other, reads in (("ref_logprobs", objective.reads_reference), ("behavior_logprobs", weighs)):
        for far in (of_tokens, np.float32(200.0), np.float32(-200.0)):
            loss, gradient = evaluate(name, outputs, dataclasses.replace(inputs, **{other: outputs.logprobs + far}))
            assert np.isfinite(loss) and np.isfinite(np.sum(gradient.logprobs**2)) and np.isfinite(np.sum(gradient.values**2))
        assert (loss != usual_loss) == reads


@forms
def test_arrays_of_another_shape_are_refused(form):
    """None of them is broadcast; a batch is of whole groups, unless the objective couples no rows."""
    name, (outputs, inputs) = FORMS[form][0], batch_of(form, dtype=np.float32)
    full = outputs.logprobs
    wrong = [(dataclasses.replace(outputs, logprobs=cut), inputs) for cut in (full[:, :1], full[:1])]
    for field in ("ref_logprobs", "behavior_logprobs", "mask", "reward"):
        wrong.append((outputs, dataclasses.replace(inputs, **{field: getattr(inputs, field)[:1]})))
    if form not in UNCOUPLED:
        wrong.append((outputs, dataclasses.replace(inputs, settings=dataclasses.replace(inputs.settings, completions=5))))
    if OBJECTIVES[name].log_z_head:
        wrong += [(dataclasses.replace(outputs, log_z=cut), inputs) for cut in (outputs.log_z[::4], outputs.log_z[:, None])]
    if OBJECTIVES[name].value_head:
        wrong += [(dataclasses.replace(outputs, values=cut), inputs) for cut in (outputs.values[:, :1], outputs.values[:1])]
    if OBJECTIVES[name].state_values:
        wrong.append((outputs, dataclasses.replace(inputs, state_values=inputs.state_values[:1])))
    if form == "tba_prime, by row":
        wrong.append((outputs, dataclasses.replace(inputs, prompt_length=inputs.prompt_length[:1])))
    for given in wrong:
        with pytest.raises(AssertionError):
            jax.eval_shape(OBJECTIVES[name].loss, *given)
