"""The update as a program of a mesh: which shapes are compiled before there are rows, and that no shape is compiled twice."""

import dataclasses

import jax
import pytest

from benchmarks import trainer_update
from tba_jax.experiment import composition
from tba_jax.models import scoring
from tba_jax.roles.trainer.update_program import UpdateProgram
from tests.support import tiny_run

SIZES = tiny_run.SETTINGS | {"task.prompt_length": 10, "task.response_length": 10}
SIZES |= {"learner.queries": 16, "learner.completions": 2}


def config_of(**changes):
    changes = {name.replace("__", "."): value for name, value in changes.items()}
    return tiny_run.config_with(SIZES | trainer_update.LEARNER | changes)


def update_program(devices: int = 1, **changes) -> UpdateProgram:
    config = config_of(learner__mesh__data=devices, **changes)
    built = composition.build(config)
    contract = dataclasses.replace(built.contract, banned_tokens=())
    program = UpdateProgram(config, contract, built.policy, devices=jax.devices()[:devices])
    program.begin(jax.jit(built.policy.base.init)(jax.random.key(0)))
    return program


def row_shape():
    return composition.build(config_of()).contract.row_shape()


def test_what_is_compiled_before_there_are_rows_is_the_shape_of_full_rows():
    program = update_program()
    before = program.place(program._whole_rows(row_shape()))
    full = program.place(trainer_update.random_rows(program, SIZES, 16))
    assert before.plan.sequences == full.plan.sequences == 16 * 3


@pytest.mark.parametrize("shares", [True, False])
def test_an_update_with_a_row_for_each_device_has_its_programs(shares, monkeypatch):
    monkeypatch.setattr(scoring, "shares_prompts", lambda *_: shares)
    program = update_program(4, learner__queries=2)
    found = program.programs(row_shape())
    for name in found.keys() - {"init"}:
        sequences = found[name].arguments[-1].micro_batches
        assert min(sequences.tokens.shape) > 0, name
    assert ("update in micro-batches" in found) == shares
