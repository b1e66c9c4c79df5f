"""A model, settings and a batch small enough that an update of them is compared with loops."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import optax

from tba_jax import packing, trajectory
from tba_jax.learner import optimizer as state_lib
from tba_jax.learner import update as update_lib
from tba_jax.learner.optimizer import linear_then_constant
from tba_jax.models import scoring
from tba_jax.models.config import DecoderConfig
from tba_jax.models.parameters import Params
from tba_jax.models.policy import Policy
from tba_jax.objectives import OBJECTIVES
from tba_jax.objectives.objective import ObjectiveSettings
from tests.support import applied

MODEL = DecoderConfig(layers=2, width=16, heads=4, kv_heads=2, head_size=4, ffn=24, vocab=12, max_positions=16)
POLICY = Policy(model=MODEL)
Q, K, P, R = 6, 4, 5, 6
B = Q * K
BETA = 0.5
EOS = 1
SPACE = scoring.ResponseSpace(temperature=0.8, banned_tokens=(0,), eos_id=EOS)
# Gradients are read off the parameters after a step of plain descent by 1.
DESCENT: state_lib.Optimizers = {"policy": optax.sgd(1.0)}


def limits(rows: int = 0, *, shares: bool = True, ways: int = 1) -> packing.Limits:
    """Micro-batches of at most so many full rows; 0: of all."""
    return packing.Limits(rows=B, group=K, prompt=P, response=R, shares=shares, tokens=rows * (P + R) // ways, ways=ways)


def settings(**changes: Any) -> update_lib.LearnerConfig:
    objective = dict(objective=OBJECTIVES["trajectory_balance"], settings=ObjectiveSettings(completions=K))
    sizes = dict(limits=limits(), logit_bytes=1 << 20, space=SPACE, remat="none")
    config = update_lib.LearnerConfig(policy=POLICY, **objective, **sizes)
    return dataclasses.replace(config, **changes)


def schedules(**changes: Any) -> update_lib.Schedules:
    """β = BETA and γ = τ = 1, but for `changes`."""
    values = {"beta": BETA, "ref_temperature": 1.0, "reward_temperature": 1.0}
    constants = {name: linear_then_constant(start=value, end=value, steps=0) for name, value in values.items()}
    return update_lib.Schedules(**constants | changes)


def random_params() -> Params:
    return applied.random(POLICY.model_specs, scale=0.2, seed=0)


def random_batch(seed: int = 0) -> update_lib.Batch:
    rng = np.random.default_rng([1, seed])
    lengths, response_length = rng.integers(1, P + 1, Q), rng.integers(1, R + 1, B).astype(np.int32)
    prompt_length, place = np.repeat(lengths, K).astype(np.int32), np.arange(P + R)
    prompts = np.repeat(rng.integers(1, MODEL.vocab, (Q, P + R)), K, axis=0)
    tokens = np.where(place < prompt_length[:, None], prompts, rng.integers(1, MODEL.vocab, (B, P + R)))
    tokens[place >= (prompt_length + response_length)[:, None]] = 0
    mask = trajectory.response_mask(response_length, R)
    ref, behavior = np.where(mask, -rng.exponential(1.0, (2, B, R)), 0.0).astype(np.float32)
    rows = dict(tokens=tokens.astype(np.int32), prompt_length=prompt_length, response_length=response_length)
    reward = rng.normal(size=B).astype(np.float32)
    return update_lib.Batch(**rows, ref_logprobs=ref, behavior_logprobs=behavior, reward=reward)


def packed_of(batch: update_lib.Batch, limits: packing.Limits, **options: Any) -> tuple[packing.Packed, packing.Plan]:
    """See packing.of_rows."""
    columns = (np.asarray(column) for column in (batch.tokens, batch.prompt_length, batch.response_length))
    return packing.of_rows(*columns, limits=limits, trained=batch.trained, **options)


def make_step(
    config: update_lib.LearnerConfig, *, optimizers=DESCENT, changes: dict[str, Any] | None = None, mesh=None, **options: Any
) -> Any:
    """step(state, frozen, batch), jitted. Args: mesh: that has rows; options: of jax.jit."""
    made = functools.partial(update_lib.train_step, optimizers=optimizers, schedules=schedules(**changes or {}), config=config)
    jitted = jax.jit(made, static_argnames="whole_groups", **options)

    def step(state: Any, frozen: Any, batch: Any) -> Any:
        packed, plan = packed_of(batch, config.limits, second_pass=1 / 3)
        if mesh is not None:
            packed = jax.device_put(packed, scoring.packed_shardings(mesh))
        return jitted(state, frozen, batch, packed, whole_groups=plan.whole_groups)

    return step


# What an update may be: its objective, and the head that it trains.
FORMS: dict[str, tuple[dict[str, Any], str]] = {
    "trajectory_balance": ({}, ""),
    "learned_log_z": ({"objective": OBJECTIVES["learned_log_z"]}, "log_z_head"),
    "moving reference": ({"objective": OBJECTIVES["tba_prime"]}, ""),
    "ppo": ({"objective": OBJECTIVES["ppo"]}, "value_head"),
    "environment": ({}, ""),
    "environment, ppo": ({"objective": OBJECTIVES["ppo"]}, "value_head"),
}


def state_of(form: str, optimizers: state_lib.Optimizers | None = None) -> tuple[state_lib.TrainState, state_lib.Optimizers]:
    name = FORMS[form][1]
    optimizers = optimizers or DESCENT | ({name: optax.sgd(1.0)} if name else {})
    state = state_lib.init_state(POLICY, random_params(), optimizers)
    specs = POLICY.with_heads(log_z_head=True, value_head=True).specs
    head = {name: applied.random(specs[name], scale=1.0, seed=3)} if name else {}
    return dataclasses.replace(state, params=state.params | head), optimizers


def batch_of(form: str) -> update_lib.Batch:
    batch = random_batch()
    if form == "moving reference":
        return dataclasses.replace(batch, moving_ref_logprobs=(0.7 * batch.ref_logprobs).astype(np.float32))
    if form.startswith("environment"):  # whose tokens hold numbers that must not count
        trained = np.random.default_rng(2).random((B, R)) < 0.6
        numbers = {
            name: np.where(trained, getattr(batch, name), np.float32(-30)) for name in ("ref_logprobs", "behavior_logprobs")
        }
        return dataclasses.replace(batch, trained=trained, **numbers)
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
    numbers = {name: float(value) for name, value in measurements.items()}
    return numbers["loss"], {"policy": policy, "head": head}, numbers


@functools.cache
def one_pass(form: str) -> Found:
    state, optimizers = state_of(form)
    return measured(make_step(settings(**FORMS[form][0]), optimizers=optimizers), state, batch_of(form))


def assert_same(found: Found, expected: Found) -> None:
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5, atol=1e-6)  # the terms of TBA′'s loss cancel
    size = max(np.abs(leaf).max() for leaf in jax.tree.leaves(expected[1]))
    for a, b in zip(jax.tree.leaves(found[1]), jax.tree.leaves(expected[1]), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * size)
    assert found[2].keys() == expected[2].keys()
    for name in expected[2]:
        np.testing.assert_allclose(found[2][name], expected[2][name], rtol=2e-5, atol=1e-6, err_msg=name)
