"""Every measurement of a batch against loops, and what it says of known batches."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tba_jax.objectives import OBJECTIVES
from tba_jax.objectives.objective import ObjectiveInputs, diagnostics
from tests.support.objective_loops import log_targets, random_batch


def measure(policy: np.ndarray, inputs: ObjectiveInputs, entropy: np.ndarray | None = None) -> dict[str, float]:
    with jax.enable_x64(policy.dtype == np.float64):
        found = jax.jit(diagnostics)(policy, np.ones_like(policy) if entropy is None else entropy, inputs)
    assert all(value.shape == () and jnp.issubdtype(value.dtype, jnp.floating) for value in found.values())
    return {name: float(value) for name, value in found.items()}


def loop_measurements(policy: np.ndarray, inputs: ObjectiveInputs, entropy: np.ndarray) -> dict[str, float]:
    """In float64, from lists of each row's real tokens."""
    K, beta = inputs.settings.completions, float(inputs.beta)
    columns = (policy, inputs.ref_logprobs, inputs.behavior_logprobs, entropy)
    rows = [[np.float64(column[row][real]) for column in columns] for row, real in enumerate(inputs.mask)]
    ratios = np.concatenate([np.exp(p - b) for p, _, b, _ in rows])
    weights = np.array([np.exp(p.sum() - b.sum()) for p, _, b, _ in rows])
    log_weights = (log_targets(inputs) - [p.sum() for p, *_ in rows]).reshape(-1, K)
    rewards, log_z = inputs.reward.astype(np.float64).reshape(-1, K), log_weights.mean(1)
    found = {
        "reward": rewards.mean(),
        "response_length": len(ratios) / len(rows),
        "entropy": np.concatenate([e for *_, e in rows]).mean(),
        "kl_to_ref": np.mean([p.sum() - q.sum() for p, q, *_ in rows]),
        "kl_to_ref_k3": np.mean([np.sum(np.exp(q - p) - 1 - (q - p)) for p, q, *_ in rows]),
        "ratio_mean": ratios.mean(),
        "ratio_max": ratios.max(),
        "effective_sample_share": weights.sum() ** 2 / (len(rows) * (weights**2).sum()),
        "log_z": log_z.mean(),
        "log_z_std": log_z.std(),
    }
    if K > 1:
        found["log_weight_std"] = np.sqrt(log_weights.var(1).mean())
        found["advantage_std"] = beta * found["log_weight_std"]
        found["equal_reward_groups"] = np.mean([len(set(group)) == 1 for group in rewards.tolist()])
    return found


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("sizes", [(3, 4, 7), (6, 1, 5)], ids=str)
def test_every_measurement_equals_a_loop(sizes, dtype):
    settings = dict(ref_temperature=1.7, reward_temperature=0.6)
    outputs, inputs = random_batch(*sizes, **settings, dtype=dtype)
    inputs.reward[: sizes[1]] = 1.0
    policy = outputs.logprobs
    entropy = np.random.default_rng(0).exponential(size=policy.shape).astype(dtype)
    expected = loop_measurements(policy, inputs, entropy)
    # Counts are float32 in either case.
    found, tolerance = measure(policy, inputs, entropy), 1e-5 if dtype == np.float32 else 1e-7
    assert found.keys() == expected.keys()
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], rtol=tolerance, atol=tolerance, err_msg=name)


@pytest.mark.parametrize("far", [300.0, -300.0])
def test_extreme_log_ratios_stay_finite(far):
    outputs, inputs = random_batch(3, 4, 7, dtype=np.float32)
    assert np.isfinite(list(measure(outputs.logprobs, dataclasses.replace(inputs, mask=inputs.mask & False)).values())).all()
    for name in ("ref_logprobs", "behavior_logprobs"):
        inputs = dataclasses.replace(inputs, **{name: outputs.logprobs + np.float32(far)})
        found = measure(outputs.logprobs, inputs)
        assert np.isfinite(list(found.values())).all(), found
        assert found["kl_to_ref_k3"] >= 0
    assert 1 / 12 - 1e-4 < found["effective_sample_share"] < 1 + 1e-4
    np.testing.assert_allclose(found["kl_to_ref"], -far * inputs.mask.sum() / 12, rtol=1e-4)


# Objective -> lower and upper bound, and what of a row's log-ratios is bounded.
BOUNDS = {
    "tba_prime": (0, 1.5, np.exp),
    **dict.fromkeys(("ppo", "vine_ppo", "grpo", "dr_grpo"), (0.8, 1.3, np.exp)),
    **dict.fromkeys(("proximal_rloo", "flowrl_linear_z"), (0.8, 1.3, lambda x: [np.exp(x.sum())])),
    "gflowrl": (0, 1.3, lambda x: [np.exp(x.sum())]),
    "optimal_baseline": (0, 1.5, lambda x: [np.exp(x.sum())]),
    "icepop": (0.7, 1.4, np.exp),
    "gspo": (0.9, 1.1, lambda x: [np.exp(x.mean())]),
    "cispo": (0, 1.3, np.exp),
}
SETTINGS = dict(importance_clip=1.5, clip_low=0.2, clip_high=0.3, icepop_low=0.7, icepop_high=1.4)
SETTINGS |= dict(sequence_clip_low=0.1, sequence_clip_high=0.1)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_clipped_share_is_that_beyond_the_bounds_of_the_objective(name):
    outputs, inputs = random_batch(6, 4, 7, **SETTINGS)
    clipped = OBJECTIVES[name].clipped
    assert (clipped is not None) == (name in BOUNDS)
    if clipped is not None:
        low, high, of = BOUNDS[name]
        log_ratios = [(p - b)[real] for p, b, real in zip(outputs.logprobs, inputs.behavior_logprobs, inputs.mask, strict=True)]
        ratios = np.concatenate([of(each) for each in log_ratios])
        expected = np.mean((ratios < low) | (ratios > high))
        assert 0 < expected < 1
        np.testing.assert_allclose(jax.jit(clipped)(outputs.logprobs, inputs), expected, rtol=1e-6)
        if name == "tba_prime":
            unweighted = dataclasses.replace(inputs, settings=dataclasses.replace(inputs.settings, importance_clip=0.0))
            assert float(clipped(outputs.logprobs, unweighted)) == 0
