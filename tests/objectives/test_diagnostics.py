"""Every measurement of a batch against loops, and what it says of known batches."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tba_jax.objectives.diagnostics import diagnostics
from tba_jax.objectives.inputs import ObjectiveInputs
from tests.support.objective_loops import held_log_z, log_targets, random_batch, row_sums


def measure(policy: np.ndarray, inputs: ObjectiveInputs, entropy: np.ndarray | None = None) -> dict[str, float]:
    """At the precision of the batch."""
    with jax.enable_x64(policy.dtype == np.float64):
        found = jax.jit(diagnostics)(policy, np.ones_like(policy) if entropy is None else entropy, inputs)
    assert all(value.shape == () and jnp.issubdtype(value.dtype, jnp.floating) for value in found.values())
    return {name: float(value) for name, value in found.items()}


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def spread(values: list[float]) -> float:
    return math.sqrt(mean([(value - mean(values)) ** 2 for value in values]))


def loop_token_measurements(policy: np.ndarray, inputs: ObjectiveInputs, entropy: np.ndarray) -> dict[str, float]:
    """What is measured of tokens, in float64."""
    B, R = policy.shape
    kls, k3s, ratios, entropies, weights = [0.0] * B, [0.0] * B, [], [], [1.0] * B
    for row in range(B):
        for t in range(R):
            if inputs.mask[row, t]:
                log_kl = float(policy[row, t]) - float(inputs.ref_logprobs[row, t])
                kls[row] += log_kl
                k3s[row] += math.exp(-log_kl) - 1 + log_kl
                ratios.append(math.exp(float(policy[row, t]) - float(inputs.behavior_logprobs[row, t])))
                entropies.append(float(entropy[row, t]))
                weights[row] *= ratios[-1]
    clip = inputs.settings.importance_clip
    return {
        "response_length": len(ratios) / B,
        "entropy": mean(entropies),
        "kl_to_ref": mean(kls),
        "kl_to_ref_k3": mean(k3s),
        "ratio_mean": mean(ratios),
        "ratio_max": max(ratios),
        "ratio_clipped": mean([float(clip > 0 and ratio > clip) for ratio in ratios]),
        "effective_sample_share": sum(weights) ** 2 / (B * sum(weight**2 for weight in weights)),
    }


def loop_group_measurements(policy: np.ndarray, inputs: ObjectiveInputs) -> dict[str, float]:
    """What is measured of rows and groups, in float64."""
    K, rewards = inputs.settings.completions, [float(reward) for reward in inputs.reward]
    log_z = held_log_z(policy, inputs)
    sums, targets = row_sums(policy, inputs.mask), log_targets(inputs)
    residuals = [target - s - z for target, s, z in zip(targets, sums, log_z, strict=True)]
    residual_std = math.sqrt(mean([residual**2 for residual in residuals]))
    groups = [rewards[first : first + K] for first in range(0, len(rewards), K)]
    found = {"reward": mean(rewards), "log_z": mean(log_z[::K]), "log_z_std": spread(log_z[::K])}
    if K == 1:
        return found
    return found | {
        "log_weight_std": residual_std,
        "advantage_std": float(inputs.beta) * residual_std,
        "equal_reward_groups": mean([float(len(set(group)) == 1) for group in groups]),
    }


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("sizes", "importance_clip"), [((3, 4, 7), 1.5), ((6, 1, 5), 0.0)], ids=str)
def test_every_measurement_equals_a_loop(sizes, importance_clip, dtype):
    settings = dict(ref_temperature=1.7, reward_temperature=0.6, importance_clip=importance_clip)
    outputs, inputs = random_batch(*sizes, **settings, dtype=dtype)
    inputs.reward[: sizes[1]] = 1.0
    policy = outputs.logprobs
    entropy = np.random.default_rng(0).exponential(size=policy.shape).astype(dtype)
    expected = loop_token_measurements(policy, inputs, entropy) | loop_group_measurements(policy, inputs)
    # Counts are float32 in either case.
    found, tolerance = measure(policy, inputs, entropy), 1e-5 if dtype == np.float32 else 1e-7
    assert found.keys() == expected.keys()
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], rtol=tolerance, atol=tolerance, err_msg=name)


@pytest.mark.parametrize("distance", [0.0, 1e-7, 3.0])
def test_k3_is_never_negative(distance):
    """Nor rounded below zero, or to zero where the policies are told apart: it is half of the squared distance."""
    outputs, inputs = random_batch(3, 4, 7, dtype=np.float32)
    ref = outputs.logprobs + distance * np.random.default_rng(0).normal(size=(12, 7)).astype(np.float32)
    inputs = dataclasses.replace(inputs, ref_logprobs=ref.astype(np.float32))
    found = measure(outputs.logprobs, inputs)["kl_to_ref_k3"]
    assert found >= 0
    expected = loop_token_measurements(outputs.logprobs, inputs, outputs.logprobs)
    np.testing.assert_allclose(found, expected["kl_to_ref_k3"], rtol=1e-3, atol=1e-10)


@pytest.mark.parametrize("far", [300.0, -300.0])
def test_extreme_log_ratios_stay_finite(far):
    outputs, inputs = random_batch(3, 4, 7, dtype=np.float32)
    assert np.isfinite(list(measure(outputs.logprobs, dataclasses.replace(inputs, mask=inputs.mask & False)).values())).all()
    for name in ("ref_logprobs", "behavior_logprobs"):
        inputs = dataclasses.replace(inputs, **{name: outputs.logprobs + np.float32(far)})
        found = measure(outputs.logprobs, inputs)
        assert np.isfinite(list(found.values())).all(), found
        assert found["kl_to_ref_k3"] >= 0
    assert found["ratio_clipped"] == float(far < 0)
    assert 1 / 12 - 1e-4 < found["effective_sample_share"] < 1 + 1e-4
    np.testing.assert_allclose(found["kl_to_ref"], -far * inputs.mask.sum() / 12, rtol=1e-4)


def test_at_the_optimum_nothing_is_left_to_learn():
    outputs, inputs = random_batch(3, 4, 1, reward_temperature=0.6)
    inputs.mask[:] = True
    log_z = np.repeat([-2.0, 0.5, 7.0], 4)
    found = measure((np.array(log_targets(inputs)) - log_z)[:, None], inputs)
    assert found["log_weight_std"] < 1e-12 and found["advantage_std"] < 1e-12
    np.testing.assert_allclose([found["log_z"], found["log_z_std"]], [log_z.mean(), log_z.std()])
    assert min(measure(outputs.logprobs, inputs)[name] for name in ("log_weight_std", "advantage_std")) > 0.1


def test_shapes_that_do_not_fit_are_refused():
    outputs, inputs = random_batch(2, 4, 5, dtype=np.float32)
    full, other = outputs.logprobs, dataclasses.replace(inputs.settings, completions=3)
    given = [(full[:, :4], full, inputs), (full, full[:1], inputs), (full, full, dataclasses.replace(inputs, settings=other))]
    for each in given:
        with pytest.raises(AssertionError):
            jax.eval_shape(diagnostics, *each)
