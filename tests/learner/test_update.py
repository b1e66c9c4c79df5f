"""One update: micro-batches, logit blocks and meshes against one pass on one device, and that against the loss by hand."""

import dataclasses
import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tba_jax import sharding, trajectory
from tba_jax.learner import state as state_lib
from tba_jax.learner import update as update_lib
from tba_jax.learner.optimizer import adamw, linear_then_constant
from tba_jax.models import heads, parameters
from tba_jax.models.lora import LoraConfig
from tba_jax.models.parameters import Params
from tba_jax.models.policy import Policy
from tba_jax.objectives import OBJECTIVES
from tba_jax.objectives.inputs import ObjectiveSettings
from tba_jax.objectives.objective import Objective
from tests.support import applied
from tests.support.tiny_updates import (
    BETA,
    DESCENT,
    EOS,
    MODEL,
    POLICY,
    SPACE,
    B,
    K,
    P,
    Q,
    R,
    random_batch,
    random_params,
    schedules,
    settings,
)


def make_step(
    config: update_lib.LearnerConfig,
    *,
    optimizers: state_lib.Optimizers = DESCENT,
    changes: dict[str, Any] | None = None,
    train_step: Any = update_lib.train_step,
) -> Any:
    return functools.partial(train_step, optimizers=optimizers, schedules=schedules(**changes or {}), config=config)


# What an update may be: settings, the head that it trains, what the batch has besides.
FORMS: dict[str, tuple[dict[str, Any], str, str]] = {
    "trajectory_balance": ({}, "", ""),
    "learned_log_z": ({"objective": OBJECTIVES["learned_log_z"]}, "log_z_head", ""),
    "tba_prime": ({"objective": OBJECTIVES["tba_prime"]}, "", ""),
    "moving reference": ({"objective": OBJECTIVES["tba_prime"]}, "", "moving_ref_logprobs"),
    "surrogate": ({"surrogate_decay": 0.8}, "", ""),
    "ppo": ({"objective": OBJECTIVES["ppo"]}, "value_head", ""),
    "vine_ppo": ({"objective": OBJECTIVES["vine_ppo"]}, "", "state_values"),
    "grpo": ({"objective": OBJECTIVES["grpo"]}, "", ""),
}


def state_of(form: str, optimizers: state_lib.Optimizers | None = None) -> tuple[state_lib.TrainState, state_lib.Optimizers]:
    name = FORMS[form][1]
    optimizers = optimizers or DESCENT | ({name: optax.sgd(1.0)} if name else {})
    state = state_lib.init_state(POLICY, random_params(), optimizers)
    specs = heads.define(POLICY, log_z_head=True, value_head=True).specs
    head = {name: applied.random(specs[name], scale=1.0, seed=3)} if name else {}
    return dataclasses.replace(state, params=state.params | head), optimizers


def batch_of(form: str) -> state_lib.Batch:
    batch, column = random_batch(), FORMS[form][2]
    if column == "moving_ref_logprobs":
        return dataclasses.replace(batch, moving_ref_logprobs=(0.7 * batch.ref_logprobs).astype(np.float32))
    if column == "state_values":
        rng = np.random.default_rng(4)
        values = np.where(rng.random((B, R)) < 0.6, rng.normal(size=(B, R)), np.nan).astype(np.float32)
        values[:, 0] = 0.5
        return dataclasses.replace(batch, state_values=values)
    return batch


Found = tuple[float, Any, dict[str, float]]


def measured(step: Any, state: Any, batch: Any) -> Found:
    """Loss, gradients of the policy and of the head, measurements of a step of plain descent by 1."""
    after, measurements = step(state, {}, batch)
    assert measurements.pop("row_finite").all()
    assert float(measurements["finite"]) == 1 and int(after.step) == 1 and int(after.skipped) == 0
    gradient = jax.tree.map(lambda new, old: np.asarray(old) - np.asarray(new), after.params, state.params)
    policy = gradient.pop("policy")
    (head,) = gradient.values() or ({},)
    return (
        float(measurements["loss"]),
        {"policy": policy, "head": head},
        {name: float(value) for name, value in measurements.items()},
    )


@functools.cache
def one_pass(form: str) -> Found:
    state, optimizers = state_of(form)
    return measured(jax.jit(make_step(settings(**FORMS[form][0]), optimizers=optimizers)), state, batch_of(form))


def assert_same(found: Found, expected: Found) -> None:
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5, atol=1e-6)  # the terms of TBA′'s loss cancel
    size = max(np.abs(leaf).max() for leaf in jax.tree.leaves(expected[1]))
    for a, b in zip(jax.tree.leaves(found[1]), jax.tree.leaves(expected[1]), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * size)
    assert found[2].keys() == expected[2].keys()
    for name in expected[2]:
        np.testing.assert_allclose(found[2][name], expected[2][name], rtol=2e-5, atol=1e-6, err_msg=name)


@functools.cache
def scores() -> tuple[np.ndarray, np.ndarray]:
    """policy_logprobs and entropy of the fixed batch."""
    return jax.device_get(jax.jit(score_fixed_batch)(random_params()))


def score_fixed_batch(params: Params) -> tuple[jax.Array, jax.Array]:
    return update_lib.score(POLICY.for_training(params, {}), random_batch(), config=settings())


def gradient_of(cotangent: np.ndarray) -> Any:
    """What a cotangent of the log-probs gives for the parameters; that way is JAX's."""
    return jax.jit(jax.grad(lambda p: jnp.sum(cotangent.astype(np.float32) * score_fixed_batch(p)[0])))(random_params())


# At once; in micro-batches, as a moving reference is scored, and logits of one step at a time.
@pytest.mark.parametrize("rows, logit_bytes", [(B, 1 << 20), (6, 1)])
def test_a_minimal_length_shares_out_the_mass_of_an_early_end(rows, logit_bytes):
    """log π(y_t) − log(1 − π(end)) before it, log π(y_t) from then on; log-probs without it are those of `scores`."""
    minimum = dataclasses.replace(SPACE, min_length=4)
    batch = random_batch()
    place = np.arange(P + R) - batch.prompt_length[:, None]  # in the response
    tokens = np.where((batch.tokens == EOS) & (place >= 0), 2, batch.tokens)  # no row ends by itself
    batch = dataclasses.replace(batch, tokens=tokens)
    ends = dataclasses.replace(batch, tokens=np.where(place >= 0, EOS, tokens))

    def log_probs(batch: state_lib.Batch, **changes: Any) -> np.ndarray:
        config = settings(micro_batch_rows=rows, logit_bytes=logit_bytes, **changes)

        def score(params: Params, batch: state_lib.Batch) -> jax.Array:
            return update_lib.score_in_micro_batches(POLICY.for_training(params, {}), batch, config=config)[0]

        return np.asarray(jax.jit(score)(random_params(), batch))

    # One response token at a time: an end in the place of token t must not change what comes before it.
    mask, early = trajectory.response_mask(batch.response_length, R), np.arange(R) < minimum.min_length - 1
    expected = log_probs(batch).copy()
    for t in np.flatnonzero(early):
        swapped = dataclasses.replace(batch, tokens=np.where(place == t, EOS, tokens))
        expected[:, t] -= np.where(mask[:, t], np.log1p(-np.exp(np.where(mask[:, t], log_probs(swapped)[:, t], -1.0))), 0.0)
    np.testing.assert_allclose(log_probs(batch, space=minimum), expected, atol=1e-5)
    assert np.isneginf(log_probs(ends, space=minimum)[mask & early]).all()
    assert np.isfinite(log_probs(ends, space=minimum)[mask & ~early]).all()


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
    np.testing.assert_allclose(found["grad_norm"], optax.tree.norm(by_hand), rtol=1e-5)


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
    assert not (set(one_pass("grpo")[2]) - set(one_pass("trajectory_balance")[2]))


def test_the_surrogate_trails_by_each_rows_own_staleness():
    batch, policy = random_batch(), scores()[0]
    staleness = 2 - batch.policy_step[:, 0]  # at step 2
    expected = np.empty_like(policy)
    for row in range(B):
        for t in range(R):
            drift = policy[row, t] - batch.policy_logprobs[row, t]
            lag = (1 - 0.9**2) * 0.9 / (1 - 0.9)
            expected[row, t] = policy[row, t] - lag / staleness[row] * drift
    found = update_lib.surrogate_ref_logprobs(policy, batch, step=2, decay=0.9)
    mask = trajectory.response_mask(batch.response_length, R)
    np.testing.assert_allclose(found[mask], expected[mask], rtol=1e-5)
    fresh = dataclasses.replace(batch, policy_step=np.full((B, R), 2, np.int32))
    np.testing.assert_array_equal(update_lib.surrogate_ref_logprobs(policy, fresh, step=2, decay=0.9), policy)


def test_the_surrogate_is_exact_for_a_policy_of_constant_speed():
    """log π_j = j·v for the policy after j updates; the average from θ_0 by its recursion, rows of every age."""
    decay, steps, speed = 0.8, 7, np.float32(0.3)
    average = 0.0
    for step in range(1, steps + 1):
        average = decay * average + (1 - decay) * step * speed
    made_at = np.arange(B * R).reshape(B, R) % steps
    batch = dataclasses.replace(random_batch(), policy_step=made_at, policy_logprobs=made_at * speed)
    found = update_lib.surrogate_ref_logprobs(np.full((B, R), steps * speed), batch, step=steps, decay=decay)
    np.testing.assert_allclose(found, average, rtol=1e-5)


def test_a_reference_that_moves_takes_the_place_of_the_rows_own():
    """And the distance to the initial reference, which the rows carry, is measured beside it."""
    batch, policy = batch_of("moving reference"), scores()[0]
    found = one_pass("moving reference")[2]
    np.testing.assert_allclose(found["kl_to_ref"], (policy - batch.moving_ref_logprobs).sum(1).mean(), rtol=1e-5)
    np.testing.assert_allclose(found["kl_to_initial"], (policy - batch.ref_logprobs).sum(1).mean(), rtol=1e-5)
    as_own = dataclasses.replace(batch, ref_logprobs=batch.moving_ref_logprobs, moving_ref_logprobs=None)
    step = jax.jit(make_step(settings(**FORMS["tba_prime"][0])))
    loss, gradient, _ = measured(step, state_of("tba_prime")[0], as_own)
    assert_same((loss, gradient, {}), (*one_pass("moving reference")[:2], {}))


@pytest.mark.parametrize(
    "form, changed",
    [
        ("trajectory_balance", dict(micro_batch_rows=K)),
        ("trajectory_balance", dict(micro_batch_rows=3 * K, logit_bytes=4 * 3 * K * 12 * 4, remat="full")),
        ("trajectory_balance", dict(logit_bytes=1, remat="dots")),
        # Not a multiple of K: micro-batches cut through groups.
        *((form, dict(micro_batch_rows=6)) for form in FORMS),
    ],
    ids=str,
)
def test_micro_batches_and_logit_blocks_change_nothing(form, changed):
    state, optimizers = state_of(form)
    step = jax.jit(make_step(settings(**FORMS[form][0] | changed), optimizers=optimizers))
    assert_same(measured(step, state, batch_of(form)), one_pass(form))


@pytest.mark.parametrize(
    "form, sizes, micro_batch_rows",  # data, fsdp, tensor
    [
        *(("trajectory_balance", sizes, rows) for sizes, rows in [((8, 1, 1), 8), ((1, 8, 1), 24), ((1, 4, 2), 12)]),
        *((form, (2, 2, 2), 6) for form in FORMS),
    ],
    ids=str,
)
def test_meshes_give_what_one_device_gives(form, sizes, micro_batch_rows):
    mesh = sharding.make_mesh(sizes, setting="learner.mesh")
    on_host, optimizers = state_of(form)
    shardings = jax.tree.map(lambda x: x.sharding, state_lib.state_shapes(POLICY, optimizers, mesh))
    config = settings(**FORMS[form][0], micro_batch_rows=micro_batch_rows)
    step = jax.jit(make_step(config, optimizers=optimizers), out_shardings=(shardings, sharding.replicated(mesh)))
    state = jax.device_put(on_host, shardings)
    if sizes == (2, 2, 2):
        shard = state.params["policy"]["layers"]["feed_forward"]["gate"]["weight"].addressable_shards[0].data
        assert shard.size == MODEL.layers * MODEL.width * MODEL.ffn // 4
    assert_same(measured(sharding.on_mesh(mesh, step), state, sharding.put_rows(mesh, batch_of(form))), one_pass(form))


LORA = Policy(model=MODEL, lora=LoraConfig(rank=2, alpha=4.0, targets=("layers.*",)))


def lora_step(micro_batch_rows: int, mesh: Any = None) -> tuple[float, Any]:
    """Loss and gradient of the adapters alone, on one device or on a mesh."""
    config = dataclasses.replace(settings(micro_batch_rows=micro_batch_rows), policy=LORA)
    adapters = applied.random(LORA.trained_specs, scale=0.3, seed=1)
    state, frozen, batch = state_lib.init_state(LORA, adapters, DESCENT), random_params(), random_batch()
    step = jax.jit(make_step(config))
    if mesh is not None:
        shardings = jax.tree.map(lambda x: x.sharding, state_lib.state_shapes(LORA, DESCENT, mesh))
        state, frozen = jax.device_put(state, shardings), jax.device_put(frozen, LORA.model_shardings(mesh))
        batch, step = sharding.put_rows(mesh, batch), sharding.on_mesh(mesh, step)
    after, measurements = step(state, frozen, batch)
    return float(measurements["loss"]), jax.tree.map(lambda new, old: old - np.asarray(new), after.params["policy"], adapters)


def test_adapters_alone_get_the_gradient_of_the_whole_policy():
    loss, gradient = lora_step(B)
    assert set(parameters.flatten(gradient)) == set(parameters.flatten(LORA.trained_specs))
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(gradient))
    assert abs(loss - one_pass("trajectory_balance")[0]) > 1e-3  # the adapters change the policy
    mesh = sharding.make_mesh((2, 2, 2), setting="learner.mesh")
    for found in (lora_step(6), lora_step(12, mesh)):
        np.testing.assert_allclose(found[0], loss, rtol=1e-5)
        assert_same((0.0, found[1], {}), (0.0, gradient, {}))


def test_the_program_of_a_step_does_not_grow_with_depth():
    """Layers are scanned, in the forward pass and in the backward pass, so that compile time is that of one layer."""

    def size(layers: int) -> int:
        policy = Policy(model=dataclasses.replace(MODEL, layers=layers))
        config = dataclasses.replace(settings(micro_batch_rows=K, remat="full"), policy=policy)
        state = jax.eval_shape(lambda p: state_lib.init_state(policy, p, DESCENT), parameters.shapes(policy.model_specs))
        return len(jax.jit(make_step(config)).lower(state, {}, random_batch()).as_text().splitlines())

    assert size(24) == size(6)


@pytest.fixture(scope="module")
def adam() -> tuple[state_lib.Optimizers, Any]:
    """An optimiser, and a jitted step of it with donated state that may be traced once."""
    optimizer = adamw(lambda step: jnp.float32(1e-2), beta1=0.9, beta2=0.95, epsilon=1e-8, weight_decay=0.0, clip_norm=1.0)
    optimizers = {"policy": optimizer}
    once = chex.assert_max_traces(update_lib.train_step, n=1)
    return optimizers, jax.jit(make_step(settings(), optimizers=optimizers, train_step=once), donate_argnums=0)


def initial(optimizers: state_lib.Optimizers) -> state_lib.TrainState:
    return jax.jit(lambda params: state_lib.init_state(POLICY, params, optimizers))(random_params())


def test_the_loss_goes_down_in_one_trace(adam):
    optimizers, update = adam
    state = initial(optimizers)
    losses = []
    for _ in range(30):
        state, measurements = update(state, {}, random_batch())
        losses.append(float(measurements["loss"]))
    assert int(state.step) == 30
    assert losses[-1] < 0.3 * losses[0], losses
    update(state, {}, random_batch(seed=1))


# Of row 3. A reward of 1e30 is finite, the square of its residual is not.
NOT_FINITE = [
    ("reward", np.inf),
    ("reward", np.nan),
    ("reward", 1e30),
    ("ref_logprobs", -np.inf),
    ("behavior_logprobs", np.nan),
]


@pytest.mark.parametrize("column, value", NOT_FINITE[:4])
def test_a_batch_that_is_not_finite_is_only_counted(adam, column, value):
    optimizers, update = adam
    state, _ = update(initial(optimizers), {}, random_batch())
    before = jax.device_get(state)
    batch = random_batch()
    getattr(batch, column)[3] = value
    after, measurements = update(state, {}, batch)
    assert float(measurements["finite"]) == 0
    assert np.flatnonzero(~measurements["row_finite"]).tolist() == [3]
    assert float(measurements["skipped_steps"]) == 1
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(after), dataclasses.replace(before, step=2, skipped=1))
    again, measurements = update(after, {}, random_batch())
    assert float(measurements["finite"]) == 1 and (int(again.step), int(again.skipped)) == (3, 1)


@pytest.mark.parametrize("form", ["learned_log_z", "tba_prime", "ppo"])
def test_every_form_names_the_row_that_is_not_finite(form):
    state, optimizers = state_of(form)
    before = jax.device_get(state)
    update = jax.jit(make_step(settings(**FORMS[form][0]), optimizers=optimizers))
    for column, value in NOT_FINITE[:4] if form == "learned_log_z" else NOT_FINITE:
        batch = batch_of(form)
        getattr(batch, column)[3] = value
        after, measurements = update(state, {}, batch)
        assert float(measurements["finite"]) == 0
        assert np.flatnonzero(~measurements["row_finite"]).tolist() == [3]
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(after), dataclasses.replace(before, step=1, skipped=1))


@pytest.mark.parametrize("place, value", [(0, np.nan), (0, np.inf), (1, np.inf)])
def test_a_row_whose_first_state_has_no_value_is_refused(place, value):
    state, optimizers = state_of("vine_ppo")
    update = jax.jit(make_step(settings(**FORMS["vine_ppo"][0]), optimizers=optimizers))
    batch = batch_of("vine_ppo")
    row = int(np.argmax(batch.response_length > 1))
    batch.state_values[row, place] = value
    measurements = update(state, {}, batch)[1]
    assert float(measurements["finite"]) == 0 and np.flatnonzero(~measurements["row_finite"]).tolist() == [row]


def test_without_beta_a_row_is_finite_as_its_numbers_are():
    """There is no target then, by which rows are looked at elsewhere."""
    config, zero = settings(objective=OBJECTIVES["dr_grpo"]), linear_then_constant(start=0.0, end=0.0, steps=0)
    update = jax.jit(make_step(config, changes={"beta": zero}))
    state, batch = state_of("grpo")[0], random_batch()
    _, gradient, _ = measured(update, state, batch)
    assert max(np.abs(leaf).max() for leaf in jax.tree.leaves(gradient)) > 0
    other_reference = dataclasses.replace(batch, ref_logprobs=(0.5 * batch.ref_logprobs).astype(np.float32))
    jax.tree.map(np.testing.assert_array_equal, measured(update, state, other_reference)[1], gradient)
    for column, value in NOT_FINITE:
        broken = random_batch()
        getattr(broken, column)[3] = value
        measurements = update(state, {}, broken)[1]
        assert float(measurements["finite"]) == 0 and np.flatnonzero(~measurements["row_finite"]).tolist() == [3]


def test_most_objectives_do_not_read_values_of_states():
    batch = dataclasses.replace(random_batch(), state_values=np.full((B, R), np.nan, np.float32))
    found = measured(jax.jit(make_step(settings(**FORMS["grpo"][0]))), state_of("grpo")[0], batch)
    assert_same(found, one_pass("grpo"))


def test_a_log_z_that_is_not_finite_is_that_of_its_querys_rows():
    state, optimizers = state_of("learned_log_z")
    policy = random_params()
    token = int(random_batch().tokens[K, 0])  # of the second query's prompt
    policy["embedding"]["weight"][token] = np.nan
    update = jax.jit(make_step(settings(**FORMS["learned_log_z"][0]), optimizers=optimizers))
    measurements = update(dataclasses.replace(state, params=state.params | {"policy": policy}), {}, random_batch())[1]
    assert float(measurements["finite"]) == 0 and not measurements["row_finite"][K : 2 * K].any()


@pytest.mark.parametrize("micro_batch_rows", [6, B])
def test_one_completion_a_query(micro_batch_rows):
    """B queries of one row each, as red-teaming has: log Z is learned from the rows of all."""
    state, optimizers = state_of("learned_log_z")
    one = ObjectiveSettings(completions=1)
    changes = FORMS["learned_log_z"][0] | {"settings": one}
    step = jax.jit(make_step(settings(**changes, micro_batch_rows=micro_batch_rows), optimizers=optimizers))
    found = measured(step, state, random_batch())
    # Of rows in groups of K with the same prompt the loss is the same: it couples nothing.
    assert_same((*found[:2], {}), (*one_pass("learned_log_z")[:2], {}))
    assert not {"log_weight_std", "advantage_std", "equal_reward_groups"} & set(found[2])


def test_coefficients_follow_the_step():
    """The objective here is made of them, so that the loss shows what it was given."""
    given = {
        "beta": linear_then_constant(start=0.9, end=0.1, steps=4),
        "ref_temperature": linear_then_constant(start=1.0, end=1.2, steps=2),
        "reward_temperature": linear_then_constant(start=2.0, end=1.0, steps=5),
    }
    shown = Objective(loss=lambda _, x: x.beta + 10 * x.ref_temperature + 100 * x.reward_temperature)
    config = settings(objective=shown)
    update, state, found = jax.jit(make_step(config, changes=given)), state_of("trajectory_balance")[0], []
    for _ in range(6):
        state, measurements = update(state, {}, random_batch())
        found.append(float(measurements["loss"]))
    np.testing.assert_allclose(found, [210.9, 191.7, 172.5, 152.3, 132.1, 112.1], rtol=1e-6)


def test_a_batch_takes_its_columns_from_rows():
    batch = random_batch()
    columns = [name for name in batch.__dataclass_fields__ if name not in ("moving_ref_logprobs", "state_values")]
    rows = {name: getattr(batch, name) for name in columns} | {"row": np.arange(B)}
    jax.tree.map(np.testing.assert_array_equal, state_lib.batch_from_rows(rows), batch)
    valued = batch_of("vine_ppo")
    rows["state_values"] = valued.state_values
    jax.tree.map(np.testing.assert_array_equal, state_lib.batch_from_rows(rows), valued)
