"""What objectives declare: settings, heads, units; and batches that teach nothing."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from tba_jax.objectives import OBJECTIVES
from tba_jax.objectives.objective import TEMPERATURES, ObjectiveInputs, ObjectiveSettings, PolicyOutputs
from tests.support.objective_loops import evaluate, random_batch

SIZES = (3, 4, 7)


def gradient_of(name: str, outputs: PolicyOutputs, inputs: ObjectiveInputs) -> np.ndarray:
    return evaluate(name, outputs, inputs)[1].logprobs


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "icepop", "gspo", "cispo", "online_dpo"])
def test_a_group_of_equal_rewards_has_no_gradient(name, reward=-7.7e5):
    """Exactly, although the mean of K equal float32 is not always that number; the KL term is left out."""
    outputs, inputs = random_batch(1, 7, 5, dtype=np.float32)
    equal = dataclasses.replace(inputs, reward=np.full(7, reward, np.float32))
    if name != "online_dpo":
        equal = dataclasses.replace(equal, beta=np.float32(0.0))
    loss, gradient = evaluate(name, outputs, equal)
    assert loss == 0 and not gradient.logprobs.any()


# At the reference and on-policy, what is left of a gradient is the reward; of these two their estimates of V* depend on β.
@pytest.mark.parametrize("name", [name for name in OBJECTIVES if name not in ("oapl", "a_star_po")])
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
        at = {
            "beta": np.float64(beta),
            "reward_temperature": np.float64(temperature),
            "ref_temperature": np.float64(1 / temperature),
        }
        these = dataclasses.replace(inputs, **at)
        found.append(np.asarray(OBJECTIVES[name].reward_unit(these)) * gradient_of(name, outputs, these))
    assert np.abs(found[0]).max() > 0
    for other in found[1:]:
        np.testing.assert_allclose(other, found[0], rtol=1e-6, atol=1e-12)


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
OTHER_VALUES: dict[str, Any] = {
    "importance_clip": 1.5,
    "log_ratio_clip": 0.5,
    "row_divisor": "row_length",
    "clip_low": 0.9,
    "clip_high": 3.0,
    "sequence_clip_low": 0.9,
    "sequence_clip_high": 3.0,
    "icepop_low": 0.05,
    "icepop_high": 1.1,
    "gae_lambda": 0.3,
    "value_coefficient": 0.9,
    "asymre_delta": -0.7,
    "topr_baseline": 0.3,
}
COEFFICIENTS = ("beta", *TEMPERATURES)
HEADS_RATES = {"log_z_learning_rate", "value_learning_rate"}  # the optimiser reads them


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
def test_an_objective_needs_what_it_declares(name):
    """Heads and values of states; ratios and references: test_extreme_ratios_give_finite_losses_and_gradients."""
    objective, (outputs, inputs) = OBJECTIVES[name], random_batch(*SIZES)
    loss, gradient = evaluate(name, outputs, dataclasses.replace(inputs, mask=np.zeros_like(inputs.mask)))
    assert np.isfinite(loss) and not gradient.logprobs.any() and not gradient.values.any(), "an empty batch"
    loss, gradient = evaluate(name, outputs, inputs)
    assert gradient.log_z.any() == objective.log_z_head and gradient.values.any() == objective.value_head
    moved = dataclasses.replace(inputs, state_values=inputs.state_values * 2 + 1)
    assert (evaluate(name, outputs, moved)[0] != loss) == objective.state_values
    if objective.value_head:
        with pytest.raises(AssertionError, match="needs a value head"):
            objective.loss(dataclasses.replace(outputs, values=None), inputs)
    if objective.state_values:
        with pytest.raises(AssertionError, match="needs rows with state_values"):
            objective.loss(outputs, dataclasses.replace(inputs, state_values=None))
