"""Meshes of roles against devices, rows and slots."""

import re

import pytest

from configs import base
from tba_jax.experiment import composition, meshes
from tests.support import tiny_run


@pytest.mark.parametrize(
    "role, overrides, devices, sentence",
    [
        ("trainer", {"learner.mesh.data": 2}, 8, "learner.mesh data=2 × fsdp=1 × tensor=1 does not make up the 8 devices"),
        ("trainer", {"learner.mesh.data": -1, "learner.mesh.tensor": 4}, 6, "tensor=4 does not make up the 6 devices"),
        (
            "trainer",
            {},
            8,
            "learner.queries × learner.completions = 140 rows are not divisible by the 8",
        ),
        (
            "trainer",
            {"learner.micro_batch_tokens": 4 * 48 - 1},
            4,
            "learner.micro_batch_tokens=191 does not hold one row for each of the 4 ways of learner.mesh: a row has "
            "task.prompt_length + task.response_length = 48 tokens; at least 192",
        ),
        (
            "searcher",
            {"searchers.queries_per_batch": 3, "searchers.samples_per_query": 25, "searchers.slots": 100},
            4,
            "searchers.queries_per_batch × searchers.samples_per_query = 75 rows are not divisible by the 4 ways",
        ),
        ("searcher", {"searchers.slots": 30}, 4, "searchers.slots=30 cannot be divided by the 4 ways of the mesh's data axis"),
        (
            "searcher",
            {"searchers.slots": 212},
            4,
            "searchers.slots=212 over 4 ways of the mesh are 53 each, which divide into groups of 1 only; a multiple of 12 lets",
        ),
        (
            "trainer",
            {"warm_start.steps": 9, "warm_start.batch_size": 30},
            4,
            "warm_start.batch_size = 30 rows are not divisible by",
        ),
        (
            "evaluator",
            {"evaluation.mesh.tensor": 3},
            3,
            "evaluation.mesh: layers.attention.key.weight: axis 'kv_heads' of size 4 is not divisible by 3 (mesh axes",
        ),
        ("searcher", {"searchers.mesh.data": 3}, 4, "searchers.mesh data=3"),
        ("evaluator", {"evaluation.batch_size": 9}, 2, "evaluation.batch_size = 9 rows are not divisible by the 2 ways"),
    ],
)
def test_meshes_that_do_not_fit_the_devices_are_refused(role, overrides, devices, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        meshes.check(composition.build(tiny_run.config_with(overrides)), role=role, devices=devices)
    meshes.check(composition.build(base.get_config()), role=role, devices=4)
