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

from tba_jax import learner as learner_lib
from tba_jax import mesh as mesh_lib
from tba_jax import trainer, trajectory
from tba_jax.models import decoder, parameters
from tba_jax.models.lora import LoraConfig
from tba_jax.models.policy import Policy
from tba_jax.objectives import OBJECTIVES
from tba_jax.optimizer import adamw, beta_schedule

MODEL = decoder.DecoderConfig(layers=2, width=16, heads=4, kv_heads=2, head_size=4, ffn=24, vocab=12, max_positions=16)
POLICY = Policy(model=MODEL)
Q, K, P, R = 6, 4, 5, 6
B = Q * K
BETA = 0.5
# Gradients are read off the parameters after a step of plain descent by 1.
DESCENT = optax.sgd(1.0)
# Compiling is most of the time here, and the arithmetic is the same without LLVM's optimisation.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": "0"})


def settings(*, micro_batch_rows: int = B, logit_bytes: int = 1 << 20, remat: str = "none") -> learner_lib.LearnerConfig:
    return learner_lib.LearnerConfig(
        policy=POLICY,
        completions=K,
        micro_batch_rows=micro_batch_rows,
        logit_bytes=logit_bytes,
        temperature=0.8,
        banned_tokens=(0,),
        remat=remat,
    )


def random_params() -> decoder.Params:
    rng = np.random.default_rng(0)
    return parameters.map_specs(
        lambda _, spec: (spec.init_mean + 0.2 * rng.standard_normal(spec.shape)).astype(np.float32), POLICY.model_specs
    )


def random_batch(seed: int = 0) -> learner_lib.Batch:
    rng = np.random.default_rng([1, seed])
    prompt_length, response_length = (
        np.repeat(rng.integers(1, P + 1, Q), K).astype(np.int32),
        rng.integers(1, R + 1, B).astype(np.int32),
    )
    prompts, _ = trajectory.left_pad([rng.integers(1, MODEL.vocab, n).tolist() for n in prompt_length], P, 0)
    mask = trajectory.response_mask(response_length, R)
    ref, behavior = np.where(mask, -rng.exponential(1.0, (2, B, R)), 0.0).astype(np.float32)
    return learner_lib.Batch(
        prompt_tokens=prompts,
        prompt_length=prompt_length,
        response_tokens=np.where(mask, rng.integers(1, MODEL.vocab, (B, R)), 0).astype(np.int32),
        response_length=response_length,
        ref_logprobs=ref,
        behavior_logprobs=behavior,
        reward=rng.normal(size=B).astype(np.float32),
    )


def make_step(
    config: learner_lib.LearnerConfig,
    *,
    optimizer: Any = DESCENT,
    objective: Any = None,
    beta: Any = None,
    train_step: Any = learner_lib.train_step,
) -> Any:
    return functools.partial(
        train_step,
        objective=objective or OBJECTIVES["trajectory_balance"],
        optimizer=optimizer,
        beta=beta or beta_schedule(start=BETA, end=BETA, steps=0),
        config=config,
    )


def loss_and_gradient(config: learner_lib.LearnerConfig) -> tuple[float, Any, dict[str, float]]:
    """Loss, gradient and measurements of one step on the fixed batch."""
    state = learner_lib.init_state(random_params(), DESCENT)
    after, measurements = jit(make_step(config))(state, {}, random_batch())
    assert float(measurements["finite"]) == 1 and int(after.step) == 1
    gradient = jax.tree.map(lambda new, old: np.asarray(old) - np.asarray(new), after.params, state.params)
    return float(measurements["loss"]), gradient, {name: float(value) for name, value in measurements.items()}


def assert_same(found: tuple, expected: tuple) -> None:
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
    size = max(np.abs(leaf).max() for leaf in jax.tree.leaves(expected[1]))
    for a, b in zip(jax.tree.leaves(found[1]), jax.tree.leaves(expected[1]), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * size)
    assert found[2].keys() == expected[2].keys()
    # The spread of log Ẑ is that of each micro-batch, so it alone depends on how the batch is split.
    for name in expected[2].keys() - {"log_z_std"}:
        np.testing.assert_allclose(found[2][name], expected[2][name], rtol=2e-5, atol=1e-6, err_msg=name)


@pytest.fixture(scope="module")
def one_pass() -> tuple[float, Any, dict[str, float]]:
    return loss_and_gradient(settings())


def test_one_pass_equals_the_loss_by_hand(one_pass):
    """Loss and ∂ loss / ∂ log π in NumPy from the scores; the way from there to the parameters is JAX's."""
    params, batch = random_params(), random_batch()
    score = functools.partial(learner_lib.score, batch=batch, config=settings())
    scores, entropy = jit(score)(params)
    policy, ref = np.asarray(scores, np.float64).sum(1).reshape(Q, K), batch.ref_logprobs.sum(1, dtype=np.float64).reshape(Q, K)
    target = ref + batch.reward.reshape(Q, K) / BETA
    log_z = (target - policy).mean(axis=1)
    residual = log_z[:, None] + policy - target
    mask = trajectory.response_mask(batch.response_length, R)
    cotangent = np.where(mask, 2 / B * residual.reshape(B, 1), 0.0).astype(np.float32)
    measured = {
        "loss": np.mean(residual**2),
        "log_z": log_z.mean(),
        "log_z_std": log_z.std(),
        "beta": BETA,
        "finite": 1.0,
        "grad_norm": one_pass[2]["grad_norm"],
        "reward": batch.reward.mean(),
        "kl_to_ref": (policy - ref).mean(),
        "entropy": np.asarray(entropy).sum() / mask.sum(),
        "response_length": mask.sum() / B,
    }
    gradient = jit(jax.grad(lambda p: jnp.sum(cotangent * score(p)[0])))(params)
    assert_same(one_pass, (measured["loss"], gradient, measured))
    np.testing.assert_allclose(one_pass[2]["grad_norm"], optax.tree.norm(gradient), rtol=1e-5)


@pytest.mark.parametrize(
    "changed",
    [
        dict(micro_batch_rows=K),
        dict(micro_batch_rows=3 * K, logit_bytes=4 * 3 * K * 12 * 4, remat="full"),
        dict(micro_batch_rows=6),  # not a multiple of K: micro-batches cut through groups
        dict(logit_bytes=1, remat="dots"),
    ],
    ids=str,
)
def test_micro_batches_and_logit_blocks_change_nothing(one_pass, changed):
    assert_same(loss_and_gradient(settings(**changed)), one_pass)


@pytest.mark.parametrize(
    "sizes, micro_batch_rows",  # data, fsdp, tensor
    [((8, 1, 1), 8), ((1, 8, 1), 24), ((2, 4, 1), 8), ((4, 2, 1), 8), ((4, 1, 2), 12), ((1, 4, 2), 12), ((2, 2, 2), 6)],
    ids=str,
)
def test_meshes_give_what_one_device_gives(one_pass, sizes, micro_batch_rows):
    mesh = mesh_lib.make_mesh(sizes, setting="learner.mesh")
    shapes = trainer.state_shapes(POLICY, DESCENT, mesh)
    shardings = jax.tree.map(lambda x: x.sharding, shapes)
    state = jax.device_put(learner_lib.init_state(random_params(), DESCENT), shardings)
    config = settings(micro_batch_rows=micro_batch_rows)
    update = mesh_lib.on_mesh(
        mesh, jit(make_step(config), donate_argnums=0, out_shardings=(shardings, mesh_lib.replicated(mesh)))
    )
    after, measurements = update(state, {}, mesh_lib.put_rows(mesh, random_batch()))
    gradient = jax.tree.map(lambda new, old: old - np.asarray(new), after.params, random_params())
    if sizes == (2, 2, 2):
        shard = after.params["layers"]["gate"]["weight"].addressable_shards[0].data
        assert shard.size == MODEL.layers * MODEL.width * MODEL.ffn // 4
    assert_same((float(measurements["loss"]), gradient, {k: float(v) for k, v in measurements.items()}), one_pass)


LORA = Policy(model=MODEL, lora=LoraConfig(rank=2, alpha=4.0, targets=("layers.*",)))


def lora_step(micro_batch_rows: int, mesh: Any = None) -> tuple[float, Any]:
    """Loss and gradient of the adapters alone, on one device or on a mesh."""
    config = dataclasses.replace(settings(micro_batch_rows=micro_batch_rows), policy=LORA)
    rng = np.random.default_rng(1)
    adapters = parameters.map_specs(lambda _, spec: 0.3 * rng.standard_normal(spec.shape).astype(np.float32), LORA.trained_specs)
    state, frozen, batch = learner_lib.init_state(adapters, DESCENT), random_params(), random_batch()
    step = jit(make_step(config))
    if mesh is not None:
        shardings = jax.tree.map(lambda x: x.sharding, trainer.state_shapes(LORA, DESCENT, mesh))
        state, frozen = jax.device_put(state, shardings), jax.device_put(frozen, LORA.model_shardings(mesh))
        batch, step = mesh_lib.put_rows(mesh, batch), mesh_lib.on_mesh(mesh, step)
    after, measurements = step(state, frozen, batch)
    return float(measurements["loss"]), jax.tree.map(lambda new, old: old - np.asarray(new), after.params, adapters)


def test_adapters_get_the_gradient_of_the_whole_policy_and_nothing_else_does(one_pass):
    loss, gradient = lora_step(B)
    assert set(parameters.flatten(gradient)) == set(parameters.flatten(LORA.trained_specs))
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(gradient))
    assert abs(loss - one_pass[0]) > 1e-3  # the adapters change the policy
    mesh = mesh_lib.make_mesh((2, 2, 2), setting="learner.mesh")
    for found in (lora_step(6), lora_step(12, mesh)):
        np.testing.assert_allclose(found[0], loss, rtol=1e-5)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), found[1], gradient)


def test_the_program_of_a_step_does_not_grow_with_depth():
    """Layers are scanned, in the forward pass and in the backward pass, so that compile time is that of one layer."""

    def size(layers: int) -> int:
        policy = Policy(model=dataclasses.replace(MODEL, layers=layers))
        config = dataclasses.replace(settings(micro_batch_rows=K, remat="full"), policy=policy)
        state = jax.eval_shape(lambda p: learner_lib.init_state(p, DESCENT), parameters.shapes(policy.model_specs))
        return len(jax.jit(make_step(config)).lower(state, {}, random_batch()).as_text().splitlines())

    assert size(24) == size(6)


@pytest.fixture(scope="module")
def adam() -> tuple[optax.GradientTransformation, Any]:
    """An optimiser, and a jitted step of it with donated state that may be traced once."""
    optimizer = adamw(lambda step: jnp.float32(1e-2), beta1=0.9, beta2=0.95, epsilon=1e-8, weight_decay=0.0, clip_norm=1.0)
    once = chex.assert_max_traces(learner_lib.train_step, n=1)
    return optimizer, jit(make_step(settings(), optimizer=optimizer, train_step=once), donate_argnums=0)


def test_the_loss_goes_down_in_one_trace(adam):
    optimizer, update = adam
    state = jit(functools.partial(learner_lib.init_state, optimizer=optimizer))(random_params())
    losses = []
    for _ in range(30):
        state, measurements = update(state, {}, random_batch())
        losses.append(float(measurements["loss"]))
    assert int(state.step) == 30
    assert losses[-1] < 0.3 * losses[0], losses
    update(state, {}, random_batch(seed=1))


@pytest.mark.parametrize("column, value", [("reward", np.inf), ("reward", np.nan), ("ref_logprobs", -np.inf)])
def test_a_batch_that_is_not_finite_leaves_the_state_as_it_was(adam, column, value):
    optimizer, update = adam
    initial = jit(functools.partial(learner_lib.init_state, optimizer=optimizer))(random_params())
    state, _ = update(initial, {}, random_batch())
    before = jax.device_get(state)
    batch = random_batch()
    getattr(batch, column)[3] = value
    after, measurements = update(state, {}, batch)
    assert float(measurements["finite"]) == 0
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(after), before)
    again, measurements = update(after, {}, random_batch())
    assert float(measurements["finite"]) == 1 and int(again.step) == 2


def test_beta_follows_the_step():
    """The objective here is β itself, so that the loss shows which β it was given."""
    schedule = beta_schedule(start=0.9, end=0.1, steps=4)
    step = make_step(settings(), objective=lambda policy, inputs: (inputs.beta, {}), beta=schedule)
    state, found = learner_lib.init_state(random_params(), DESCENT), []
    update = jit(step)
    for _ in range(6):
        state, measurements = update(state, {}, random_batch())
        found.append(float(measurements["loss"]))
        assert float(measurements["beta"]) == found[-1]
    np.testing.assert_allclose(found, [0.9, 0.7, 0.5, 0.3, 0.1, 0.1], rtol=1e-6)


def test_a_batch_takes_its_columns_from_rows():
    batch = random_batch()
    rows = {name: getattr(batch, name) for name in batch.__dataclass_fields__} | {"row": np.arange(B)}
    jax.tree.map(np.testing.assert_array_equal, learner_lib.batch_from_rows(rows), batch)
