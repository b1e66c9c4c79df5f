"""Meshes of roles against devices, rows and slots."""

import re

import pytest

from tba_jax.experiment import composition, meshes
from tests.support import tiny_run

BATCH = {"searchers.queries_per_batch": 3, "searchers.samples_per_query": 25, "searchers.slots": 100}


@pytest.mark.parametrize(
    "role, overrides, devices, sentence",
    [
        ("trainer", {"learner.mesh.data": 2}, 8, "learner.mesh data=2 × fsdp=1 × tensor=1 does not make up the 8 devices"),
        ("trainer", {"learner.mesh.data": -1, "learner.mesh.tensor": 4}, 6, "tensor=4 does not make up the 6 devices"),
        ("trainer", {"warm_start.steps": 9, "warm_start.batch_size": 30}, 4, "warm_start.batch_size = 30 rows are not divisible"),
        ("searcher", BATCH, 4, "searchers.samples_per_query = 75 rows are not divisible by the 4 ways of searchers.mesh.data × "),
        ("searcher", {"searchers.slots": 30}, 4, "searchers.mesh.data: searchers.slots=30 cannot be divided by the 4 ways"),
        ("searcher", {"searchers.slots": 212}, 4, "searchers.slots=212 over 4 ways of the mesh are 53 each, which divide into"),
        ("evaluator", {"evaluation.mesh.tensor": 3}, 3, "layers.attention.key.weight: axis 'kv_heads' of size 4"),
        ("evaluator", {"evaluation.batch_size": 9}, 2, "evaluation.batch_size = 9 rows are not divisible by the 2 ways of eval"),
    ],
)
def test_meshes_that_do_not_fit_the_devices_are_refused(role, overrides, devices, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        meshes.check(composition.build(tiny_run.config_with(overrides)), role=role, devices=devices)


GIB = 1 << 30


@pytest.mark.parametrize(
    "devices, memory, overrides, expected",
    [
        (8, None, {}, (8, 1, 1)),  # as on CPUs
        (8, 450 * GIB, {}, (8, 1, 1)),  # 8.03e9 parameters of 20 bytes are 149.6 GiB
        (8, 448 * GIB, {}, (1, 8, 1)),
        (6, 80 * GIB, {}, (3, 2, 1)),  # 4096 is no multiple of 3 or 6
        (5, 80 * GIB, {}, (5, 1, 1)),
        (8, 80 * GIB, {"learner.mesh.tensor": 2}, (1, 4, 2)),
        (8, 226 * GIB, {"learner.mesh.tensor": 2}, (4, 1, 2)),
        (8, 80 * GIB, {"learner.mesh.fsdp": 2}, (4, 2, 1)),
        (8, 80 * GIB, {"learner.mesh.data": 8, "learner.queries": 8}, (8, 1, 1)),
        # Adapters of 41,943,040 parameters beside the model in bfloat16: 15.7 GiB.
        (4, 48 * GIB, {"lora.rank": 16, "model.compute_dtype": "bfloat16"}, (4, 1, 1)),
        (4, 47 * GIB, {"lora.rank": 16, "model.compute_dtype": "bfloat16"}, (1, 4, 1)),
    ],
)
def test_a_trainers_state_is_split_where_it_is_large_for_a_device(devices, memory, overrides, expected):
    experiment = composition.build(tiny_run.config_with({"model.preset": "llama-3.1-8b", **overrides}))
    split = meshes.by_need(experiment, devices=devices, memory=memory)
    assert meshes.shape(split, role="trainer", devices=devices) == expected
    assert experiment.config.learner.mesh.fsdp == overrides.get("learner.mesh.fsdp", 0)
