"""Every objective against loops, its gradients against finite differences, what it declares, and what it refuses."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from tba_jax.objectives import OBJECTIVES
from tba_jax.objectives.objective import TEMPERATURES, ObjectiveInputs, ObjectiveSettings, PolicyOutputs
from tests.support.objective_loops import FORMS, UNCOUPLED, evaluate, loop_loss, random_batch

SIZES = (3, 4, 7)
BETA_GAMMA_TAU = [(0.004, 1.0, 1.0), (0.3, 1.7, 0.6), (1.0, 0.8, 2.0)]  # β, γ, τ
forms = pytest.mark.parametrize("form", FORMS)


def batch_of(form, sizes=SIZES, **settings):
    return random_batch(*sizes, **FORMS[form][1], **settings)


@forms
def test_the_loss_equals_a_loop(form):
    """In float32 to 1e-5: log-probs of hundreds of nats, r/β of hundreds, and a roundoff of 6e-8 of each."""
    name = FORMS[form][0]
    for sizes, dtype, rtol in [(SIZES, np.float64, 1e-9), ((6, 1, 5), np.float64, 1e-9), (SIZES, np.float32, 1e-5)]:
        if sizes[1] < OBJECTIVES[name].min_completions:
            continue
        for seed, (beta, gamma, tau) in enumerate(BETA_GAMMA_TAU):
            settings = dict(seed=seed, beta=beta, ref_temperature=gamma, reward_temperature=tau, outliers=0.1)
            outputs, inputs = batch_of(form, sizes, **settings, dtype=dtype)
            inputs.reward[: sizes[1]], inputs.reward[-sizes[1] :] = 0.0, 1.0  # as of queries that nobody solves, and all
            found = evaluate(name, outputs, inputs)[0]
            np.testing.assert_allclose(found, loop_loss(name, outputs, inputs), rtol=rtol, atol=1e-12)


@forms
def test_tokens_of_an_environment_change_nothing(form):
    """Rows whose tokens lie between masked ones, against the same tokens one after the other."""
    name, settings = FORMS[form]
    outputs, inputs = random_batch(3, 4, 9, seed=5, **settings)
    order = np.argsort(~inputs.mask, axis=1, kind="stable")  # the real tokens of a row first, as they come

    def together(x):
        return np.take_along_axis(x, order, axis=1)

    names = "mask", "ref_logprobs", "behavior_logprobs", "state_values"
    apart = inputs.replace(**{each: together(getattr(inputs, each)) for each in names})
    assert (np.diff(apart.mask.astype(int), axis=1) <= 0).all() and (np.diff(inputs.mask.astype(int), axis=1) > 0).any()
    found, gradient = evaluate(name, outputs, inputs)
    moved = outputs.replace(logprobs=together(outputs.logprobs), values=together(outputs.values))
    expected, other = evaluate(name, moved, apart)
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    for each in ("logprobs", "values"):
        np.testing.assert_allclose(together(getattr(gradient, each)), getattr(other, each), rtol=1e-12, atol=1e-14, err_msg=each)
        assert not getattr(gradient, each)[~inputs.mask].any()


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
    weighs = objective.behavior_logprobs and not form.endswith(", unweighted")
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


def gradient_of(name: str, outputs: PolicyOutputs, inputs: ObjectiveInputs) -> np.ndarray:
    return evaluate(name, outputs, inputs)[1].logprobs


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "icepop", "gspo", "cispo", "online_dpo", "optimal_baseline"])
def test_a_group_of_equal_rewards_has_no_gradient(name, reward=-7.7e5):
    """Exactly, although the mean of K equal float32 is not always that number; the KL term is left out."""
    outputs, inputs = random_batch(1, 7, 5, dtype=np.float32)
    equal = dataclasses.replace(inputs, reward=np.full(7, reward, np.float32))
    if name != "online_dpo":
        equal = dataclasses.replace(equal, beta=np.float32(0.0))
    loss, gradient = evaluate(name, outputs, equal)
    assert loss == 0 and not gradient.logprobs.any()


# At the reference and on-policy, what is left of a gradient is the reward; these read exp(r/β), or clip r/β.
@pytest.mark.parametrize(
    "name", [x for x in OBJECTIVES if x not in ("oapl", "a_star_po", "f_trajectory_balance", "tpo", "gflowrl")]
)
def test_in_units_of_the_reward_a_gradient_does_not_depend_on_its_temperatures(name):
    outputs, inputs = random_batch(*SIZES)
    here = np.where(inputs.mask, outputs.logprobs, 0.0)
    inputs = dataclasses.replace(inputs, ref_logprobs=here, behavior_logprobs=here)
    outputs = dataclasses.replace(outputs, log_z=np.zeros_like(outputs.log_z))
    found = []
    for beta, temperature in ((0.01, 1.0), (0.7, 1.0), (0.7, 2.0)):
        if temperature != 1 and "reward_temperature" not in OBJECTIVES[name].settings:
            continue
        # log π_θ = log π_ref/(γτ) at the reference.
        at = dict(beta=beta, reward_temperature=temperature, ref_temperature=1 / temperature)
        these = dataclasses.replace(inputs, **{name: np.float64(value) for name, value in at.items()})
        found.append(np.asarray(OBJECTIVES[name].reward_unit(these)) * gradient_of(name, outputs, these))
    assert np.abs(found[0]).max() > 0
    for other in found[1:]:
        np.testing.assert_allclose(other, found[0], rtol=1e-6, atol=1e-12)


def test_a_teacher_as_the_reference_is_a_reward_of_its_log_ratio():
    """r = log π_teacher − log π_ref at β = 1 has the target of the reference π_teacher and no reward: so is its gradient."""
    outputs, inputs = random_batch(*SIZES, beta=1.0, seed=2)
    teacher = random_batch(*SIZES, seed=9)[1].ref_logprobs
    ratio = np.where(inputs.mask, teacher - inputs.ref_logprobs, 0.0).sum(axis=1)
    by_reward = dataclasses.replace(inputs, reward=ratio)
    by_reference = dataclasses.replace(inputs, ref_logprobs=teacher, reward=np.zeros_like(ratio))
    found = [gradient_of("trajectory_balance", outputs, each) for each in (by_reward, by_reference)]
    assert np.abs(found[0]).max() > 0.1
    np.testing.assert_allclose(*found, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", [name for name, objective in OBJECTIVES.items() if not objective.positive_beta])
def test_beta_0_leaves_the_kl_term_out(name):
    """There is a gradient, and in it no reference."""
    outputs, inputs = random_batch(*SIZES)
    without = dataclasses.replace(inputs, beta=np.float64(0.0))
    found = gradient_of(name, outputs, without)
    assert np.isfinite(found).all() and found.any()
    other = dataclasses.replace(without, ref_logprobs=inputs.ref_logprobs * 0.5)
    np.testing.assert_array_equal(gradient_of(name, outputs, other), found)


# Setting -> another value, which changes something wherever the setting is read.
OTHER_VALUES: dict[str, Any] = dict(importance_clip=1.5, log_ratio_clip=0.5, row_divisor="row_length")
OTHER_VALUES |= dict(clip_low=0.9, clip_high=3.0, sequence_clip_low=0.9, sequence_clip_high=3.0, icepop_low=0.05, icepop_high=1.1)
OTHER_VALUES |= dict(
    flow_gap_low=0.1,
    flow_gap_high=0.1,
    divergence_alpha=0.4,
    gae_lambda=0.3,
    value_coefficient=0.9,
    asymre_delta=-0.7,
    topr_baseline=0.3,
)
COEFFICIENTS = ("beta", *TEMPERATURES)
HEADS_RATES = {"log_z_learning_rate", "value_learning_rate", "log_z_path"}  # the optimiser and the trainer read them


@pytest.mark.parametrize("name", OBJECTIVES)
def test_an_objective_reads_only_the_settings_it_declares(name):
    assert {*OTHER_VALUES, "completions"} == {field.name for field in dataclasses.fields(ObjectiveSettings)}
    outputs, inputs = random_batch(*SIZES, dtype=np.float32)

    def loss(inputs: ObjectiveInputs) -> float:  # not jitted: each setting would be a program
        return float(OBJECTIVES[name].loss(outputs, inputs))

    def changed(*settings: str) -> bool:
        others = {name: OTHER_VALUES[name] for name in settings if name in OTHER_VALUES}
        other = dataclasses.replace(inputs, settings=dataclasses.replace(inputs.settings, **others))
        other = dataclasses.replace(other, **{name: np.float32(1.7) for name in settings if name in COEFFICIENTS})
        return loss(other) != usual

    usual, declared = loss(inputs), set(OBJECTIVES[name].settings) - HEADS_RATES
    assert all(changed(setting) for setting in declared) and not changed(*({*OTHER_VALUES, *COEFFICIENTS} - declared))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_an_empty_batch_is_finite_and_state_values_are_read_where_declared(name):
    objective, (outputs, inputs) = OBJECTIVES[name], random_batch(*SIZES)
    loss, gradient = evaluate(name, outputs, dataclasses.replace(inputs, mask=np.zeros_like(inputs.mask)))
    assert np.isfinite(loss) and not gradient.logprobs.any() and not gradient.values.any(), "an empty batch"
    moved = dataclasses.replace(inputs, state_values=inputs.state_values * 2 + 1)
    assert (evaluate(name, outputs, moved)[0] != evaluate(name, outputs, inputs)[0]) == objective.state_values
