"""Where roles are placed: cores, GPUs and shares of their memory."""

from typing import Any

import pytest

from configs import base
from tba_jax.roles.gpus import Gpu
from tba_jax.roles.placement import Placement, describe, place, split

# As nvidia-smi tells them of an H100 at rest.
MEMORY, FREE = 81_559 << 20, 81_079 << 20


def config_with(**overrides: Any) -> Any:
    config = base.get_config()
    config.update_from_flattened_dict({name.replace("__", "."): value for name, value in overrides.items()})
    return config


def gpus(count: int, free: int = FREE) -> tuple[Gpu, ...]:
    return tuple(Gpu(name=str(i), memory=MEMORY, free=free) for i in range(count))


def on(count: int, check=lambda devices: None, **settings: Any) -> dict[str, str]:
    """Role -> its GPUs, of a run with two searchers and an evaluator unless settings say otherwise."""
    found = place(config_with(**settings), cpus=range(8), gpus=gpus(count), check=check)
    return {name: "".join(placed.gpus) for name, placed in found.items()}


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
    assert {name: placed.cpus for name, placed in found.items()} == expected


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
    with pytest.raises(ValueError, match=r"searchers.mesh and searchers.task_devices.* make up \d GPUs for .*; there are 2"):
        on(2, searchers__task_devices=4)


def fractions(count: int, **settings: Any) -> list[float]:
    return [placed.memory_fraction for placed in place(config_with(**settings), cpus=[0], gpus=gpus(count)).values()]


def test_of_a_shared_gpu_a_trainer_takes_half_and_settings_take_their_share():
    assert fractions(4) == [0.95] * 4
    assert fractions(1) == [0.475, 0.158, 0.158, 0.158] and fractions(2) == [0.95, 0.316, 0.316, 0.316]
    assert fractions(1, searchers__count=1, learner__memory_fraction=0.55) == [0.55, 0.2, 0.2]
    assert fractions(3, searchers__count=1, learner__memory_fraction=0.55) == [0.95] * 3
    with pytest.raises(ValueError, match=r"GPU 0: 0\.95 of its memory .* too little for learner\.memory_fraction=0\.9"):
        fractions(1, learner__memory_fraction=0.9, searchers__memory_fraction=0.3)


def test_what_others_hold_of_a_gpu_is_not_given_out():
    found = place(config_with(searchers__count=1), cpus=[0], gpus=gpus(3, free=MEMORY // 2))
    assert {placed.memory_fraction for placed in found.values()} == {0.49}
    with pytest.raises(ValueError, match=r"other processes hold 78\.6 of the 79\.6 GiB of GPU 0: end them"):
        place(config_with(), cpus=[0], gpus=gpus(1, free=1 << 30))


def test_processes_of_a_trainer_divide_its_cores_and_gpus():
    first, second = split(Placement(cpus=(0, 1, 2, 3, 4), gpus=("2", "3", "5", "7"), processes=2))
    assert (first.cpus, second.cpus) == ((0, 1), (2, 3, 4)) and (first.gpus, second.gpus) == (("2", "3"), ("5", "7"))
    assert [each.cpus for each in split(Placement(cpus=(3,), processes=2))] == [(3,), (3,)]
    with pytest.raises(ValueError, match=r"trainer.processes=3 does not divide the 4 GPUs"):
        split(Placement(cpus=(0,), gpus=("0", "1", "2", "3"), processes=3))


def test_a_description_says_who_has_what():
    assert describe(place(config_with(searchers__count=1), cpus=(0, 1, 2, 8), gpus=gpus(2))).splitlines()[1:] == [
        "  trainer      cores 0-1; GPUs 0 (its own), 95.0% of their memory",
        "  searcher-0   cores 2,8; GPUs 1 (shared with evaluator), 47.5% of their memory",
        "  evaluator    cores 2,8; GPUs 1 (shared with searcher-0), 47.5% of their memory",
    ]
    assert "cores 0-3; no GPU, as there is none" in describe(place(config_with(), cpus=range(8), gpus=()))
