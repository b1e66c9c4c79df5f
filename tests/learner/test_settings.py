"""What the trainer makes of a config: each setting reaches the part that it is for."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import base
from tba_jax import sharding
from tba_jax.experiment import composition
from tba_jax.learner import settings
from tba_jax.models import scoring
from tba_jax.models.config import DecoderConfig
from tba_jax.models.policy import Policy
from tba_jax.objectives import OBJECTIVES
from tba_jax.objectives.objective import ObjectiveSettings
from tba_jax.storage.contract import Contract
from tests.support import applied, tiny_run

POLICY = Policy(model=DecoderConfig(layers=1, width=16, heads=2, kv_heads=1, head_size=8, ffn=16, vocab=16, max_positions=16))


@functools.cache
def contract() -> Contract:
    values: dict[str, Any] = dict(scoring_temperature=0.7, banned_tokens=[3], eos_id=2, min_response_length=5, force_eos=True)
    return dataclasses.replace(composition.build(tiny_run.config()).contract, **values)


def mesh_of(devices: int) -> jax.sharding.Mesh:
    return sharding.make_mesh((devices, 1, 1), setting="learner.mesh", devices=jax.devices()[:devices])


def test_the_schedule_of_the_learning_rate_may_be_longer_than_the_run():
    """The run of 4 updates ends in the middle of a decay of 4, which begins after update 2."""
    changes = dict(schedule="wsd", decay="cosine", steps=4, warmup_steps=0, decay_steps=4, learning_rate=1.0)
    for schedule_steps, expected in ((6, [1, 1, 1, 0.853553]), (0, [1, 0.853553, 0.5, 0.146447])):
        flags = {f"learner__{name}": value for name, value in (changes | {"schedule_steps": schedule_steps}).items()}
        np.testing.assert_allclose(settings.policy_rates(tiny_run.config(**flags).learner), expected, rtol=1e-4)


@pytest.mark.parametrize("name", ["learned_log_z", "ppo", "grpo"])
def test_heads_that_are_learned_have_optimizers_of_their_own(name):
    rates = {"learner__log_z_learning_rate": 0.25, "learner__value_learning_rate": 0.125}
    optimizers = settings.make_optimizers(tiny_run.config(learner__objective=name, learner__warmup_steps=0, **rates).learner)
    assert ("log_z_head" in optimizers) == (name == "learned_log_z")
    assert ("value_head" in optimizers) == (name == "ppo")
    for part, optimizer in optimizers.items():
        params = {"weight": jnp.ones(3)}
        updates, _ = optimizer.update({"weight": jnp.ones(3)}, optimizer.init(params), params)
        np.testing.assert_allclose(updates["weight"], -{"policy": 1e-3, "log_z_head": 0.25, "value_head": 0.125}[part], rtol=1e-4)


def test_static_settings_of_an_update():
    made = settings.make_learner_config(base.get_config().learner, contract(), POLICY, mesh_of(1))
    assert made.settings == ObjectiveSettings(completions=20), "the defaults of objectives are those of the base config"
    others = {
        field.name: "row_length" if field.name == "row_divisor" else 4 if field.name == "completions" else field.default + 0.25
        for field in dataclasses.fields(ObjectiveSettings)
    }
    changes = {"objective": "tba_prime", **others, "micro_batch_tokens": 6 * 13, "logit_megabytes": 2}
    c = tiny_run.config(**{f"learner__{name}": value for name, value in changes.items()}).learner
    made = settings.make_learner_config(c, contract(), POLICY, mesh_of(3))
    assert made.objective is OBJECTIVES["tba_prime"] and made.settings == ObjectiveSettings(**others)
    assert (made.limits.full_rows, made.limits.ways, made.logit_bytes) == (6, 3, 3 * (2 << 20))
    assert made.space == scoring.ResponseSpace(temperature=0.7, banned_tokens=(3,), eos_id=2, min_length=5, force_eos=True)


@pytest.mark.parametrize("kind, moves_at", [("initial", None), ("reset", [3, 6]), ("ema", [1, 2, 3, 4, 5, 6])])
def test_which_references_are_held_and_when_they_move(kind, moves_at):
    changes = {"kind": kind, "reset_steps": 3, "ema_decay": 0.5}
    c = tiny_run.config(**{f"learner__reference__{name}": value for name, value in changes.items()}).learner
    mesh = mesh_of(1)
    reference = settings.make_moving_reference(c, settings.make_learner_config(c, contract(), POLICY, mesh), mesh)
    if moves_at is None:
        assert reference is None
        return
    params = jax.device_put(applied.init(jax.random.key(0), POLICY.model), POLICY.trained_shardings(mesh))
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
        settings.limits(tokens, **SIZES, ways=ways, shares=True)
