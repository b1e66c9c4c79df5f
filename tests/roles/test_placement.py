"""Where roles are placed."""

import re

import pytest

from configs import base
from tba_jax.roles import placement
from tba_jax.roles.placement import Placement, place


def config_with(**overrides):
    config = base.get_config()
    config.update_from_flattened_dict({name.replace("__", "."): value for name, value in overrides.items()})
    return config


@pytest.mark.parametrize(
    "cpus, expected",
    [
        ([5], {"trainer": (5,), "searcher-0": (5,), "searcher-1": (5,), "evaluator": (5,)}),
        ([0, 1], {"trainer": (0,), "searcher-0": (1,), "searcher-1": (1,), "evaluator": (1,)}),
        (range(8), {"trainer": (0, 1, 2, 3), "searcher-0": (4, 6), "searcher-1": (5, 7), "evaluator": (4, 5, 6, 7)}),
    ],
)
def test_cores(cpus, expected):
    found = place(base.get_config(), cpus=cpus, gpus=())
    assert found == {name: Placement(cpus=cores) for name, cores in expected.items()}


def test_more_searchers_than_cores_take_turns():
    found = place(config_with(searchers__count=5, evaluation__enabled=False), cpus=range(4), gpus=())
    assert list(found) == ["trainer", *(f"searcher-{i}" for i in range(5))]
    assert [found[f"searcher-{i}"].cpus for i in range(5)] == [(2,), (3,), (2,), (3,), (2,)]


@pytest.mark.parametrize(
    "gpus, expected",
    [
        (["0"], {"trainer": (["0"], 0.45), "searcher-0": (["0"], 0.2), "searcher-1": (["0"], 0.2), "evaluator": (["0"], 0.1)}),
        (
            ["0", "1"],
            {"trainer": (["0"], 0.45), "searcher-0": (["1"], 0.0), "searcher-1": (["0"], 0.2), "evaluator": (["0"], 0.1)},
        ),
        (
            ["0", "1", "2", "3"],
            {"trainer": (["0", "1"], 0.0), "searcher-0": (["2"], 0.0), "searcher-1": (["3"], 0.2), "evaluator": (["3"], 0.1)},
        ),
    ],
    ids=["1", "2", "4"],
)
def test_gpus(gpus, expected):
    found = place(base.get_config(), cpus=range(8), gpus=gpus)
    assert {name: (list(p.gpus), p.memory_fraction) for name, p in found.items()} == expected
    assert {name: p.cpus for name, p in found.items()} == {
        name: p.cpus for name, p in place(base.get_config(), cpus=range(8), gpus=()).items()
    }


@pytest.mark.parametrize(
    "gpus, expected",
    [
        ("abcdefg", {"trainer": "a", "searcher-0": "de", "searcher-1": "fg", "evaluator": "bc"}),
        ("abcdef", {"trainer": "ab", "searcher-0": "cd", "searcher-1": "ef", "evaluator": "ef"}),
    ],
)
def test_searchers_whose_tasks_have_gpus_of_their_own(gpus, expected):
    rows = 5 if gpus == "abcdefg" else 2  # the trainer's, which three GPUs do not divide
    c = config_with(searchers__task_devices=1, evaluation__task_devices=1, learner__queries=1, learner__completions=rows)
    found = place(c, cpus=[0], gpus=tuple(gpus))
    assert {name: "".join(p.gpus) for name, p in found.items()} == expected


def test_too_few_gpus_for_the_models_of_tasks_are_refused():
    sentence = "searchers.task_devices=1 makes 2 GPUs for each of searchers.count=2, which with the trainer's are 5; there are 4."
    with pytest.raises(ValueError, match=re.escape(sentence)):
        place(config_with(searchers__task_devices=1), cpus=[0], gpus=tuple("abcd"))


def test_without_an_evaluator_a_searcher_has_its_gpu_alone():
    found = place(config_with(evaluation__enabled=False), cpus=[0], gpus=["a", "b", "c"])
    assert {name: p.gpus for name, p in found.items()} == {"trainer": ("a",), "searcher-0": ("b",), "searcher-1": ("c",)}
    assert {p.memory_fraction for p in found.values()} == {0.0}


def test_memory_fractions_that_exceed_a_shared_gpu_are_refused():
    sentence = "trainer, searcher-0, searcher-1, evaluator share GPU 0 and would take 1.05 of its memory, at most 0.95 is allowed"
    with pytest.raises(ValueError, match=re.escape(sentence)):
        place(config_with(learner__memory_fraction=0.55), cpus=[0], gpus=["0"])
    with pytest.raises(ValueError, match=r"searcher-1, evaluator share GPU 2 .* lower learner.memory_fraction"):
        place(config_with(searchers__memory_fraction=0.9), cpus=[0], gpus=["0", "1", "2"])
    # Alone on its GPU a role may have any fraction.
    place(config_with(learner__memory_fraction=1.0), cpus=[0], gpus=["0", "1", "2"])


@pytest.mark.parametrize(
    "environment, expected",
    [
        ({"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "0,1"}, ()),
        ({"CUDA_VISIBLE_DEVICES": "3,GPU-12ab"}, ("3", "GPU-12ab")),
        ({"CUDA_VISIBLE_DEVICES": ""}, ()),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, ()),
        ({"PATH": ""}, ()),
    ],
    ids=str,
)
def test_gpus_that_may_be_handed_out(monkeypatch, environment, expected):
    for name in ("JAX_PLATFORMS", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert placement.visible_gpus() == expected
