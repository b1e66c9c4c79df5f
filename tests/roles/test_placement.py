"""Where roles are placed."""

import pytest

from configs import base
from tba_jax.roles.gpus import Gpu
from tba_jax.roles.placement import Placement, describe, place
from tests.support.gpu_needs import config_with, gpus, of


@pytest.mark.parametrize(
    "cpus, expected",
    [
        ([5], {"trainer": (5,), "searcher-0": (5,), "searcher-1": (5,), "evaluator": (5,)}),
        ([0, 1], {"trainer": (0,), "searcher-0": (1,), "searcher-1": (1,), "evaluator": (1,)}),
        (range(8), {"trainer": (0, 1, 2, 3), "searcher-0": (4, 6), "searcher-1": (5, 7), "evaluator": (4, 5, 6, 7)}),
    ],
)
@pytest.mark.parametrize("there", [0, 3])
def test_cores(cpus, expected, there):
    found = place(base.get_config(), cpus=cpus, gpus=gpus(there), need=of())
    assert {name: placed.cpus for name, placed in found.items()} == expected
    assert {placed.memory_fraction > 0 for placed in found.values()} == {there > 0}


def test_more_searchers_than_cores_take_turns():
    found = place(config_with(searchers__count=5, evaluation__enabled=False), cpus=range(4), gpus=(), need=of())
    assert list(found) == ["trainer", *(f"searcher-{i}" for i in range(5))]
    assert [found[f"searcher-{i}"].cpus for i in range(5)] == [(2,), (3,), (2,), (3,), (2,)]


def test_there_are_as_many_searchers_as_memory_holds():
    config = config_with(searchers__count=3)
    found = place(config, cpus=[0], gpus=gpus(1), need=of(trainer=28, searcher=14, evaluator=12))
    assert list(found) == ["trainer", "searcher-0", "searcher-1", "evaluator"]
    assert "memory for 2 of searchers.count=3" in describe(found)
    assert len(place(config, cpus=[0], gpus=gpus(1), need=of(trainer=20, searcher=14, evaluator=12))) == 5
    with pytest.raises(ValueError, match=r"trainer 50.00 GiB, searcher-0 14.00 GiB, evaluator 12.00 GiB; 75"):
        place(config, cpus=[0], gpus=gpus(1), need=of(trainer=50, searcher=14, evaluator=12))


def test_a_description_says_who_has_what_and_why():
    placements = {
        "trainer": Placement(cpus=(0, 1, 2, 8), cpus_reason="half", gpus_reason="there are none"),
        "searcher-0": Placement(
            cpus=(3,), gpus=("4", "5"), memory_fraction=0.5, cpus_reason="rest", gpus_reason="its own", memory_reason="needs it"
        ),
    }
    assert describe(placements).splitlines()[1:] == [
        "  trainer      cores 0-2,8 (half); GPUs none (there are none)",
        "  searcher-0   cores 3 (rest); GPUs 4,5 (its own); memory fraction 0.500 (needs it)",
    ]
    found = place(base.get_config(), cpus=range(8), gpus=(), need=of())
    assert describe(found).splitlines()[1:] == [
        "  trainer      cores 0-3 (4 of 8); GPUs none (there are none to hand out)",
        "  searcher-0   cores 4,6 (the others, dealt out to 2 searchers); GPUs none (there are none to hand out)",
        "  searcher-1   cores 5,7 (the others, dealt out to 2 searchers); GPUs none (there are none to hand out)",
        "  evaluator    cores 4-7 (the others, with the searchers); GPUs none (there are none to hand out)",
    ]
    unknown = describe(place(base.get_config(), cpus=range(8), gpus=[Gpu(name="0")], need=of(trainer=2)))
    assert "needs 2.00 GiB, the driver does not say of how many" in unknown
