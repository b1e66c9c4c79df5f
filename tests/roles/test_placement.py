"""Where roles are placed: cores, GPUs and shares of their memory."""

from typing import Any

import pytest

from configs import base
from tba_jax.roles.gpus import Gpu, place
from tests.support import tiny_run

# As nvidia-smi tells them of an H100 at rest.
MEMORY, FREE = 81_559 << 20, 81_079 << 20


def config_with(**overrides: Any) -> Any:
    return tiny_run.config_with({name.replace("__", "."): value for name, value in overrides.items()})


def gpus(count: int, free: int = FREE) -> tuple[Gpu, ...]:
    return tuple(Gpu(name=str(i), memory=MEMORY, free=free) for i in range(count))


def on(count: int, check=lambda devices: None, **settings: Any) -> dict[str, str]:
    """Role -> its GPUs, of a run with two searchers and an evaluator unless settings say otherwise."""
    found = place(config_with(**settings), cpus=range(8), gpus=gpus(count), check=check)
    return {name: "".join(placed.gpus) for name, placed in found.items()}


@pytest.mark.parametrize(
    "cpus, expected",
    [
        ([5], [(5,), (5,), (5,), (5,)]),
        ([0, 1], [(0,), (1,), (1,), (1,)]),
        (range(8), [(0, 1, 2, 3), (4, 6), (5, 7), (4, 5, 6, 7)]),
    ],
)
def test_cores(cpus, expected):
    """Of the trainer, two searchers and the evaluator. More searchers than cores take turns."""
    for there in (0, 3):
        found = place(base.get_config(), cpus=cpus, gpus=gpus(there))
        assert [placed.cpus for placed in found.values()] == expected
        assert {placed.memory_fraction > 0 for placed in found.values()} == {there > 0}
    found = place(config_with(searchers__count=5, evaluation__enabled=False), cpus=range(4), gpus=())
    assert [found[f"searcher-{i}"].cpus for i in range(5)] == [(2,), (3,), (2,), (3,), (2,)]


@pytest.mark.parametrize(
    "count, trainer, first, second, evaluator",
    [(1, "0", "0", "0", "0"), (2, "0", "1", "1", "1"), (3, "0", "1", "2", "1"), (4, "0", "1", "2", "3"), (8, "01234", *"567")],
)
def test_searchers_and_evaluator_take_turns_on_the_last_gpus_and_the_trainer_has_the_others(
    count, trainer, first, second, evaluator
):
    assert on(count) == {"trainer": trainer, "searcher-0": first, "searcher-1": second, "evaluator": evaluator}


def test_the_trainer_gets_the_most_that_its_mesh_fits():
    def even(devices: int) -> None:
        if devices % 2:
            raise ValueError(f"{devices} is odd")

    assert on(8, even)["trainer"] == "0123" and on(7, even)["trainer"] == "0123"
    with pytest.raises(ValueError, match="1 is odd"):
        on(4, even)


def test_meshes_of_several_gpus_are_blocks():
    split = dict(searchers__mesh__tensor=2, searchers__count=1)
    assert on(8, **split) == {"trainer": "0123", "searcher-0": "45", "evaluator": "7"}
    assert on(2, **split) == {"trainer": "01", "searcher-0": "01", "evaluator": "1"}
    for setting, words in (
        ("searchers__task_devices", "searchers.mesh and searchers.task_devices"),
        ("learner__mesh__fsdp", "lear"),
    ):
        with pytest.raises(ValueError, match=rf"{words}.* make up \d GPUs for .*; there are 2"):
            on(2, **{setting: 4})


def fractions(count: int, **settings: Any) -> list[float]:
    return [placed.memory_fraction for placed in place(config_with(**settings), cpus=[0], gpus=gpus(count)).values()]


def test_of_a_shared_gpu_a_trainer_takes_half_or_what_is_set_and_the_others_the_rest():
    assert fractions(4) == [0.95] * 4
    assert fractions(1) == [0.475, 0.158, 0.158, 0.158]
    assert fractions(2) == [0.95, 0.316, 0.316, 0.316]
    set_all = dict(learner__memory_fraction=0.5, searchers__memory_fraction=0.2, evaluation__memory_fraction=0.2)
    assert fractions(1, searchers__count=1, **set_all) == [0.5, 0.2, 0.2]
    assert fractions(3, searchers__count=1, **set_all) == [0.95] * 3
    assert fractions(1, searchers__count=1, learner__memory_fraction=0.55) == [0.55, 0.2, 0.2]
    told = r"GPU 0: 0\.95 of its memory may be taken, too little for learner\.memory_fraction=0\.5"
    with pytest.raises(ValueError, match=told):
        fractions(1, searchers__count=2, **set_all | {"searchers__memory_fraction": 0.3})


def test_what_others_hold_of_a_gpu_is_not_given_out():
    found = place(config_with(searchers__count=1), cpus=[0], gpus=gpus(3, free=MEMORY // 2))
    assert {placed.memory_fraction for placed in found.values()} == {0.49}
    with pytest.raises(ValueError, match=r"other processes hold 78\.6 of the 79\.6 GiB of GPU 0: end them"):
        place(config_with(), cpus=[0], gpus=gpus(1, free=1 << 30))
