"""One update against the objective's loss on whole rows, on meshes and in micro-batches; updates that are not finite; what a
config makes of the learner; and references that move: what they become, where they rest, and what a run with one measures."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from configs import base
from tba_jax import sharding, trajectory
from tba_jax.experiment import composition, training
from tba_jax.learner import optimizer as state_lib
from tba_jax.learner import update as update_lib
from tba_jax.learner.optimizer import clip_by_norm, linear_then_constant
from tba_jax.learner.update import MovingReference
from tba_jax.models import parameters, scoring
from tba_jax.models.config import DecoderConfig
from tba_jax.models.policy import Policy
from tba_jax.objectives import OBJECTIVES
from tba_jax.objectives.objective import Objective, ObjectiveInputs, ObjectiveSettings, PolicyOutputs
from tba_jax.programs import shaped
from tba_jax.storage.checkpoints import Checkpoints
from tba_jax.storage.contract import Contract
from tba_jax.storage.published import Published
from tba_jax.telemetry import metrics
from tests.support import applied, frozen_runs, tiny_run
from tests.support import tiny_updates as tiny
from tests.support.tiny_updates import (
    BETA,
    FORMS,
    MODEL,
    POLICY,
    B,
    K,
    P,
    R,
    limits,
    packed_of,
    random_batch,
    random_params,
    settings,
    state_of,
)


def of_head(head: Any, states: jax.Array) -> jax.Array:
    return (states @ head["weight"] + head["bias"])[..., 0]


@pytest.mark.parametrize("form", FORMS)
def test_one_pass_equals_the_loss_on_whole_rows(form):
    """Each row lies alone here: log-probs, means of prompt states and values come from forward passes of their own."""
    batch, config = tiny.batch_of(form), tiny.settings(**FORMS[form][0])
    mask = trajectory.response_mask(batch.response_length, R) & (True if batch.trained is None else batch.trained)
    ref = batch.ref_logprobs if batch.moving_ref_logprobs is None else batch.moving_ref_logprobs
    rows = dict(ref_logprobs=ref, behavior_logprobs=batch.behavior_logprobs, mask=mask, reward=batch.reward)
    coefficients = dict(beta=jnp.float32(BETA), ref_temperature=jnp.ones(()), reward_temperature=jnp.ones(()))
    inputs = ObjectiveInputs(**rows, **coefficients, settings=config.settings)

    @jax.jit
    def loss(params: Any) -> Any:
        policy, log_z, values = params["policy"], jnp.zeros(B), None
        logprobs, entropy = update_lib.score(POLICY.for_training(policy, {}), batch, config=config)
        if "log_z_head" in params:
            hidden = applied.hidden_states(jax.lax.stop_gradient(policy), batch.tokens[:, :P], config=MODEL, remat="none")
            real = np.arange(P)[:, None] < batch.prompt_length[:, None, None]
            log_z = of_head(params["log_z_head"], jnp.mean(hidden, axis=1, where=real))
        if "value_head" in params:
            hidden = applied.hidden_states(policy, batch.tokens[:, :-1], config=MODEL, remat="none")
            places = batch.prompt_length[:, None] - 1 + np.arange(R)
            values = of_head(params["value_head"], jnp.take_along_axis(hidden, np.minimum(places, P + R - 2)[..., None], axis=1))
        outputs = PolicyOutputs(logprobs=logprobs, log_z=log_z, values=values)
        return config.objective.loss(outputs, inputs), (outputs, entropy)

    (value, (outputs, entropy)), gradient = jax.value_and_grad(loss, has_aux=True)(state_of(form)[0].params)
    policy = gradient.pop("policy")
    (head,) = gradient.values() or ({},)
    found = tiny.one_pass(form)
    tiny.assert_same((*found[:2], {}), (float(value), {"policy": policy, "head": head}, {}))
    expected = {
        "beta": BETA,
        "reward": batch.reward.mean(),
        "kl_to_ref": np.where(mask, outputs.logprobs - inputs.ref_logprobs, 0).sum(1).mean(),
        "entropy": entropy[mask].sum() / mask.sum(),
        "response_length": mask.sum() / B,
        "grad_norm": config.objective.reward_unit(inputs) * optax.tree.norm(policy),
    }
    if form == "moving reference":
        expected["kl_to_initial"] = (outputs.logprobs - batch.ref_logprobs).sum(1).mean()
    if form == "learned_log_z":
        expected["learned_log_z"] = outputs.log_z.mean()
    if form.endswith("ppo"):
        expected["value_error"] = np.sqrt(np.mean(np.asarray(outputs.values - batch.reward[:, None])[mask] ** 2))
    for name, each in expected.items():
        np.testing.assert_allclose(found[2][name], each, rtol=2e-5, err_msg=name)


def test_a_gradient_is_clipped_in_units_of_the_reward(beta=0.01, limit=0.05):
    """β/2 times the gradient of trajectory balance is that of REINFORCE (test_identities.py): in this unit it is clipped."""
    optimizers = {"policy": optax.chain(clip_by_norm(limit), optax.sgd(1.0))}
    state = state_lib.init_state(POLICY, tiny.random_params(), optimizers)
    small = {"beta": linear_then_constant(start=beta, end=beta, steps=0)}
    step = tiny.make_step(tiny.settings(), optimizers=optimizers, changes=small)
    after, found = step(state, {}, random_batch())
    moved = float(optax.tree.norm(jax.tree.map(np.subtract, state.params["policy"], after.params["policy"])))
    assert limit < float(found["grad_norm"]) < 100 and moved * beta / 2 == pytest.approx(limit, rel=1e-3)


def test_coefficients_follow_the_step():
    """The objective here is made of them, so that the loss shows what it was given."""
    given = {
        "beta": linear_then_constant(start=0.9, end=0.1, steps=4),
        "ref_temperature": linear_then_constant(start=1.0, end=1.2, steps=2),
        "reward_temperature": linear_then_constant(start=2.0, end=1.0, steps=5),
    }
    shown = Objective(loss=lambda _, x: x.beta + 10 * x.ref_temperature + 100 * x.reward_temperature)
    config = tiny.settings(objective=shown)
    update, state, found = tiny.make_step(config, changes=given), state_of("trajectory_balance")[0], []
    for _ in range(6):
        state, measurements = update(state, {}, random_batch())
        found.append(float(measurements["loss"]))
    np.testing.assert_allclose(found, [210.9, 191.7, 172.5, 152.3, 132.1, 112.1], rtol=1e-6)


# At any split, a micro-batch cuts through groups; apart, each row has a prompt of its own, as the splash kernel has them.
ANY_SPLIT = dict(limits=tiny.limits(6), logit_bytes=4 * 3 * K * 12 * 4, remat="full")


@pytest.mark.parametrize(
    "form, changed", [("learned_log_z", ANY_SPLIT), ("moving reference", dict(limits=tiny.limits(shares=False)))], ids=str
)
def test_micro_batches_and_logit_blocks_change_nothing(form, changed):
    state, optimizers = state_of(form)
    step = tiny.make_step(tiny.settings(**FORMS[form][0] | changed), optimizers=optimizers)
    tiny.assert_same(tiny.measured(step, state, tiny.batch_of(form)), tiny.one_pass(form))


# data, fsdp, tensor; whole groups, and any split.
@pytest.mark.parametrize("form, sizes, micro_batch_rows", [("trajectory_balance", (1, 4, 2), 12), ("ppo", (2, 2, 2), 6)], ids=str)
def test_meshes_give_what_one_device_gives(form, sizes, micro_batch_rows):
    mesh = sharding.make_mesh(sizes, setting="learner.mesh")
    on_host, optimizers = state_of(form)
    shardings = jax.tree.map(lambda x: x.sharding, state_lib.state_shapes(POLICY, optimizers, mesh))
    config = tiny.settings(**FORMS[form][0], limits=tiny.limits(micro_batch_rows, ways=sharding.row_ways(mesh)))
    options = dict(out_shardings=(shardings, sharding.replicated(mesh)))
    step = tiny.make_step(config, optimizers=optimizers, mesh=mesh, **options)
    state = jax.device_put(on_host, shardings)
    if sizes == (2, 2, 2):
        shard = state.params["policy"]["layers"]["feed_forward"]["gate"]["weight"].addressable_shards[0].data
        assert shard.size == MODEL.layers * MODEL.width * MODEL.ffn // 4
    batch = sharding.put_rows(mesh, tiny.batch_of(form))
    tiny.assert_same(tiny.measured(sharding.on_mesh(mesh, step), state, batch), tiny.one_pass(form))


EXPERTS = Policy(model=dataclasses.replace(MODEL, ffn=12, experts=4, experts_per_token=2, norm_top_k=True))


def with_experts(coefficient: float, *, sizes: tuple[int, int, int] = (1, 1, 1), rows: int = 0) -> tiny.Found:
    """See tiny.measured. Args: sizes: of the mesh; rows: of a micro-batch."""
    mesh = sharding.make_mesh(sizes, setting="learner.mesh", devices=jax.devices()[: np.prod(sizes)])
    shapes = state_lib.state_shapes(EXPERTS, tiny.DESCENT, mesh)
    state = state_lib.init_state(EXPERTS, applied.random(EXPERTS.model_specs, scale=0.2), tiny.DESCENT)
    state = jax.device_put(state, jax.tree.map(lambda x: x.sharding, shapes))
    limits = tiny.limits(rows, ways=sharding.row_ways(mesh))
    config = tiny.settings(policy=EXPERTS, router_aux_loss_coef=coefficient, limits=limits, remat="full")
    step = sharding.on_mesh(mesh, tiny.make_step(config, mesh=mesh))
    return tiny.measured(step, state, sharding.put_rows(mesh, random_batch()))


@pytest.mark.parametrize("coefficient", [0.0, 0.3])
def test_experts_are_balanced_over_the_batch(coefficient):
    """Loads, entropies and the loss of Fedus et al. by loops over layers and experts, of rows that lie alone."""
    batch, config = random_batch(), tiny.settings(policy=EXPERTS)
    at = np.arange(P + R)
    begin, end = batch.prompt_length[:, None], (batch.prompt_length + batch.response_length)[:, None]
    counted = (at >= begin - 1) & (at < end - 1)
    inputs = update_lib.objective_inputs(batch, step=jnp.int32(0), schedules=tiny.schedules(), config=config)

    def loss(params: Any) -> Any:
        policy, balance = EXPERTS.for_training(params, {}), 0.0
        logprobs, _ = update_lib.score(policy, batch, config=config)
        _, routing = policy.routed(batch.tokens, counted=counted)
        n = counted.sum()
        for layer in range(2):
            for expert in range(4):
                share = jax.lax.stop_gradient(routing.tokens[layer, expert] / n)
                balance += 4 * share * routing.probabilities[layer, expert] / n / 2
        outputs = PolicyOutputs(logprobs=logprobs, log_z=jnp.zeros(B))
        # In units of the reward, where that of trajectory balance is β τ / 2 times its loss's.
        weight = coefficient / (inputs.beta * inputs.reward_temperature / 2)
        return config.objective.loss(outputs, inputs) + weight * balance, (balance, routing)

    params = applied.random(EXPERTS.model_specs, scale=0.2)
    (value, (balance, routing)), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    found = with_experts(coefficient)
    tiny.assert_same((*found[:2], {}), (float(value), {"policy": gradient, "head": {}}, {}))
    loads = np.asarray(routing.tokens) / (counted.sum() * 2 / 4)
    expected = {"router_load_max": loads.max(), "router_load_min": loads.min(), "router_aux_loss": float(balance)}
    expected["router_entropy"] = np.mean(routing.entropy) / counted.sum()
    for name, each in expected.items():
        np.testing.assert_allclose(found[2][name], each, rtol=2e-5, err_msg=name)


@pytest.mark.parametrize("sizes, rows", [((1, 1, 1), 6), ((2, 2, 2), 12), ((1, 4, 2), 6)], ids=str)
def test_experts_on_meshes_and_in_micro_batches(sizes, rows):
    tiny.assert_same(with_experts(0.3, sizes=sizes, rows=rows), with_experts(0.3))


def test_models_without_experts_measure_no_routing():
    assert not [name for name in tiny.one_pass("trajectory_balance")[2] if name.startswith("router")]


# A reward of 1e30 is finite, the square of its residual is not.
NOT_FINITE = [("reward", np.inf), ("reward", np.nan), ("reward", 1e30), ("ref_logprobs", -np.inf), ("behavior_logprobs", np.nan)]


@pytest.mark.parametrize("form", ["ppo", "trajectory_balance"])  # which reads no log-probs of the behaviour
def test_the_row_that_is_not_finite_is_named_and_the_batch_only_counted(form):
    state, optimizers = state_of(form)
    before = jax.device_get(state)
    update = tiny.make_step(tiny.settings(**FORMS[form][0]), optimizers=optimizers)
    for column, value in NOT_FINITE:  # of row 3
        batch = tiny.batch_of(form)
        getattr(batch, column)[3] = value
        after, measurements = update(state, {}, batch)
        assert float(measurements["finite"]) == 0
        assert np.flatnonzero(~measurements["row_finite"]).tolist() == [3]
        assert float(measurements["skipped_steps"]) == 1
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(after), dataclasses.replace(before, step=1, skipped=1))
    again, measurements = update(after, {}, tiny.batch_of(form))
    assert float(measurements["finite"]) == 1 and (int(again.step), int(again.skipped)) == (2, 1)


@pytest.mark.parametrize(
    "optimizer, scale",
    [
        # The gradient is finite, and so are the moments that the optimiser would keep.
        (optax.chain(optax.scale_by_adam(), optax.scale(3e38)), 1.0),
        # The square of a weight's gradient is not finite, although the loss and every row are.
        (optax.scale_by_adam(), 2.5e18),
    ],
    ids=["optimiser", "gradient"],
)
def test_what_overflows_leaves_the_state_as_it_was(optimizer, scale):
    optimizers = {"policy": optimizer}
    update = tiny.make_step(tiny.settings(), optimizers=optimizers, donate_argnums=0)
    state = jax.jit(lambda params: state_lib.init_state(POLICY, params, optimizers))(tiny.random_params())
    batch = random_batch()
    before = jax.device_get(state)
    after, measurements = update(state, {}, dataclasses.replace(batch, reward=batch.reward * np.float32(scale)))
    assert np.isfinite(measurements["loss"]) and measurements["row_finite"].all() and float(measurements["finite"]) == 0
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(after), dataclasses.replace(before, step=1, skipped=1))


SMALL = Policy(model=DecoderConfig(layers=1, width=16, heads=2, kv_heads=1, head_size=8, ffn=16, vocab=16, max_positions=16))


@functools.cache
def contract() -> Contract:
    values: dict[str, Any] = dict(scoring_temperature=0.7, banned_tokens=[3], eos_id=2, min_response_length=5, force_eos=True)
    return dataclasses.replace(composition.build(tiny_run.config()).contract, **values)


def mesh_of(devices: int) -> jax.sharding.Mesh:
    return sharding.make_mesh((devices, 1, 1), setting="learner.mesh", devices=jax.devices()[:devices])


def test_static_settings_of_an_update():
    made = update_lib.make_learner_config(base.get_config().learner, contract(), SMALL, mesh_of(1))
    assert made.settings == ObjectiveSettings(completions=20), "the defaults of objectives are those of the base config"
    others = {
        field.name: "row_length" if field.name == "row_divisor" else 4 if field.name == "completions" else field.default + 0.25
        for field in dataclasses.fields(ObjectiveSettings)
    }
    changes = {"objective": "tba_prime", **others, "micro_batch_tokens": 6 * 13, "logit_megabytes": 2}
    c = tiny_run.config(**{f"learner__{name}": value for name, value in changes.items()}).learner
    made = update_lib.make_learner_config(c, contract(), SMALL, mesh_of(3))
    assert made.objective is OBJECTIVES["tba_prime"] and made.settings == ObjectiveSettings(**others)
    assert (made.limits.full_rows, made.limits.ways, made.logit_bytes) == (6, 3, 3 * (2 << 20))
    assert made.space == scoring.ResponseSpace(temperature=0.7, banned_tokens=(3,), eos_id=2, min_length=5, force_eos=True)


@pytest.mark.parametrize("kind, moves_at", [("initial", None), ("reset", [3, 6]), ("ema", [1, 2, 3, 4, 5, 6])])
def test_which_references_are_held_and_when_they_move(kind, moves_at):
    changes = {"kind": kind, "reset_steps": 3, "ema_decay": 0.5}
    c = tiny_run.config(**{f"learner__reference__{name}": value for name, value in changes.items()}).learner
    mesh = mesh_of(1)
    reference = update_lib.make_moving_reference(c, update_lib.make_learner_config(c, contract(), SMALL, mesh), mesh)
    if moves_at is None:
        assert reference is None
        return
    params = jax.device_put(applied.init(jax.random.key(0), SMALL.model), SMALL.trained_shardings(mesh))
    reference.start(params)
    assert [step for step in range(1, 7) if reference.advance(params, step)] == moves_at
    # From θ to 3 θ: half of the way for the average, all of it for a reset.
    reference.advance(jax.tree.map(lambda x: 3 * x, params), 9)
    expected = 2 if kind == "ema" else 3
    np.testing.assert_allclose(reference.params["embedding"]["weight"], expected * params["embedding"]["weight"], rtol=1e-5)


SIZES = dict(prompt=4, response=6, queries=7, completions=20)


@pytest.mark.parametrize(
    "tokens, ways, sentence",
    [
        (9, 1, "learner.micro_batch_tokens=9 does not hold one row: .* = 10 tokens; at least 10, or 0"),
        (39, 4, "learner.micro_batch_tokens=39 does not hold one row for each of the 4 ways of learner.mesh: .*; at least 40"),
        (0, 8, "learner.queries × learner.completions = 140 rows are not divisible by the 8 ways"),
    ],
)
def test_micro_batches_that_do_not_fit_are_refused(tokens, ways, sentence):
    with pytest.raises(ValueError, match=sentence):
        update_lib.limits(tokens, **SIZES, ways=ways, shares=True)


def reference_on(sizes: tuple[int, int, int], **changes) -> tuple[MovingReference, jax.sharding.Mesh]:
    mesh = sharding.make_mesh(sizes, setting="learner.mesh", devices=jax.devices()[: np.prod(sizes)])
    reference = MovingReference(settings(limits=limits(8)), mesh, **dict(every_steps=1, decay=0.9, offload=False) | changes)
    return reference, mesh


def rescored(reference: MovingReference, mesh: jax.sharding.Mesh) -> update_lib.Batch:
    packed, _ = packed_of(random_batch(), limits(8))
    return reference.rescore({}, *sharding.put_rows(mesh, (random_batch(),)), packed)


def shifted(params, by: float):
    return jax.tree.map(lambda x: x + np.float32(by), params)


@pytest.mark.parametrize("offload, sizes", [(False, (1, 1, 1)), (True, (2, 2, 2))], ids=str)
def test_rows_are_scored_by_the_reference_of_the_step(offload, sizes):
    reference, mesh = reference_on(sizes, offload=offload)
    params = jax.device_put(random_params(), POLICY.trained_shardings(mesh))
    reference.start(params)
    reference.advance(shifted(params, 0.1), 1)
    kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(reference.params)}
    assert (kinds == {sharding.PINNED_HOST}) == offload and len(kinds) == 1
    assert jax.tree.map(lambda x: x.sharding, reference.params) == jax.tree.map(lambda x: x.sharding, reference.shapes)
    batch = rescored(reference, mesh)
    average = shifted(random_params(), 0.1 * 0.1)  # 0.9 θ + 0.1 (θ + 0.1)
    expected, _ = update_lib.score(POLICY.for_training(average, {}), random_batch(), config=settings())
    np.testing.assert_allclose(batch.moving_ref_logprobs, expected, rtol=1e-4, atol=2e-5)
    np.testing.assert_array_equal(batch.ref_logprobs, random_batch().ref_logprobs)


def test_a_reset_reference_rests_in_the_compute_dtype_and_scores_the_same():
    policy = Policy(model=dataclasses.replace(MODEL, compute_dtype="bfloat16"))
    mesh = sharding.make_mesh((2, 2, 2), setting="learner.mesh")
    config = settings(policy=policy, limits=limits(8))
    params = shifted(jax.device_put(random_params(), policy.trained_shardings(mesh)), 0.01)
    reset = MovingReference(config, mesh, every_steps=3, decay=0.0, offload=False)
    average = MovingReference(config, mesh, every_steps=3, decay=0.5, offload=False)
    for reference, dtype in ((reset, "bfloat16"), (average, "float32")):
        reference.start(params)
        assert {x.dtype.name for x in jax.tree.leaves((reference.params, reference.shapes))} == {dtype}
    first, second = (rescored(reference, mesh).moving_ref_logprobs for reference in (reset, average))
    np.testing.assert_array_equal(first, second)
    assert np.any(first)


def test_the_average_is_that_of_the_published_policies(finished, tmp_path, one_device):
    changes = dict(learner__steps=2, learner__learning_rate=3e-3, learner__warmup_steps=0, publish__every_steps=1)
    changes |= dict(learner__reference__kind="ema", learner__reference__ema_decay=0.5)
    s = frozen_runs.offline(tmp_path, finished.run.root, **changes)
    assert training.trainer(s)() == 0
    lines = metrics.read_lines(s.run.metrics("trainer"))
    assert abs(lines[0]["kl_to_ref"]) < 1e-6 < abs(lines[-1]["kl_to_ref"])
    policy, mesh = s.experiment.policy, sharding.make_mesh((1, 1, 1), setting="learner.mesh", devices=jax.devices()[:1])
    shardings = policy.trained_shardings(mesh)
    shapes = shaped(parameters.shapes(policy.trained_specs), shardings)
    checkpoints = Checkpoints(s.run.checkpoints, keep=0, read_only=True)
    reference = checkpoints.restore(checkpoints.latest_step(), {"reference": shapes})[0]["reference"]
    published = [Published(s.run.policies).load(step, policy.trained_specs, shardings) for step in range(3)]
    expected = jax.tree.map(lambda a, b, c: 0.25 * a + 0.25 * b + 0.5 * c, *published)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7), reference, expected)
    assert any(np.any(a != b) for a, b in zip(jax.tree.leaves(reference), jax.tree.leaves(published[-1]), strict=True))
