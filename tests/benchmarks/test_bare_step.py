"""The bare step computes what the project's update computes: else a ratio of their times would say nothing."""

import functools
from typing import Any

import jax
import numpy as np
import optax
import pytest

from benchmarks import bare, bare_step, trainer_update
from tba_jax.learner import optimizer, update
from tba_jax.learner import state as state_lib
from tba_jax.models import scoring

VOCAB = 48
SMALL: dict[str, Any] = {
    "task.prompt_length": 10,
    "task.response_length": 24,
    "learner.queries": 3,
    "learner.completions": 4,
    "model.layers": 2,
    "model.width": 16,
    "model.heads": 2,
    "model.kv_heads": 2,
    "model.head_size": 8,
    "model.ffn": 24,
    "learner.remat": "none",
}
DESCENT: state_lib.Optimizers = {"policy": optax.sgd(1.0)}


@pytest.mark.parametrize("shares", [True, False], ids=["shared prompts", "rows apart"])
@pytest.mark.parametrize("full", [True, False], ids=["full rows", "rows of all lengths"])
def test_loss_and_gradient_are_those_of_the_update(full, shares, monkeypatch):
    """Of the same weights and rows. The update's gradient is read off the weights after a step of plain descent by 1."""
    monkeypatch.setattr(scoring, "shares_prompts", lambda *_: shares)
    program = trainer_update.update_program(SMALL, VOCAB)
    rows, params = trainer_update.random_rows(program, SMALL, VOCAB, full=full), jax.device_get(program.policy_params)
    placed = program.place(rows)
    batch, packed, plan = placed.batch, placed.packed, placed.plan
    assert program.config.limits.shares == shares
    constant = functools.partial(optimizer.linear_then_constant, steps=0)
    settings = {"beta": trainer_update.BETA, "ref_temperature": 1.0, "reward_temperature": 1.0}
    schedules = update.Schedules(**{name: constant(start=value, end=value) for name, value in settings.items()})
    step = functools.partial(update.train_step, optimizers=DESCENT, schedules=schedules, config=program.config)
    state = state_lib.init_state(program.config.policy, params, DESCENT)
    after, found = jax.jit(step, static_argnames="whole_groups")(state, {}, batch, packed, whole_groups=plan.whole_groups)
    stepped = bare_step.bare_weights(jax.tree.map(lambda x, y: x - np.asarray(y), params, after.params["policy"]))

    loss = jax.value_and_grad(functools.partial(bare.loss, rows=bare_step.bare_rows(rows), sizes=bare_step.bare_sizes(SMALL)))
    value, gradient = jax.jit(loss)(bare_step.bare_weights(params))
    np.testing.assert_allclose(found["loss"], value, rtol=1e-5)
    scale = float(optax.tree.norm(gradient))
    assert scale > 1
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x / scale, y / scale, atol=1e-5), stepped, gradient)
