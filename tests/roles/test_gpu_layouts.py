"""Which roles get which GPUs, and how they share them."""

import dataclasses
import re

import pytest

from tba_jax.roles.placement import place
from tests.support.gpu_needs import MEMORY, config_with, gpus, of


def placed(there, need, **overrides):
    """Role -> names of its GPUs in one word, and memory fraction."""
    found = place(config_with(**overrides), cpus=range(8), gpus=there, need=need)
    return {name: ("".join(p.gpus), p.memory_fraction) for name, p in found.items()}


def names(*args, **overrides):
    return {name: mine for name, (mine, _) in placed(*args, **overrides).items()}


@pytest.mark.parametrize(
    "there, expected",
    [
        (2, {"trainer": "0", "searcher-0": "1", "searcher-1": "1", "evaluator": "1"}),
        (3, {"trainer": "0", "searcher-0": "1", "searcher-1": "2", "evaluator": "1"}),
        (4, {"trainer": "0", "searcher-0": "1", "searcher-1": "2", "evaluator": "3"}),
        (8, {"trainer": "01234", "searcher-0": "5", "searcher-1": "6", "evaluator": "7"}),
    ],
)
def test_searchers_and_evaluator_come_first_and_the_trainer_gets_the_rest(there, expected):
    assert names(gpus(there), of()) == expected


def test_the_trainer_gets_the_most_that_its_mesh_fits():
    assert names(gpus(8), of(fits=lambda devices: devices in (1, 2, 4)))["trainer"] == "0123"
    with pytest.raises(ValueError, match="the mesh does not fit 1 devices"):
        names(gpus(8), of(fits=lambda devices: devices == 9))


def test_a_trainer_that_needs_more_gpus_takes_them_from_the_evaluator_and_then_from_searchers():
    small = dict(searcher=10, evaluator=10, split=True)
    assert names(gpus(4), of(trainer=70, **small)) == {"trainer": "0", "searcher-0": "1", "searcher-1": "2", "evaluator": "3"}
    assert names(gpus(4), of(trainer=150, **small)) == {"trainer": "01", "searcher-0": "2", "searcher-1": "3", "evaluator": "2"}
    assert names(gpus(4), of(trainer=220, **small)) == {"trainer": "012", "searcher-0": "3", "searcher-1": "3", "evaluator": "3"}


def test_the_last_roles_go_where_least_is_needed():
    """On two GPUs of 75 GiB: 8 beside 33 and 33, or beside 33 alone."""
    need = of(trainer=8, searcher=33, evaluator=25)
    assert names(gpus(2), need, searchers__count=2) == {"trainer": "0", "searcher-0": "1", "searcher-1": "0", "evaluator": "1"}


def test_shares_are_in_proportion_to_the_needs():
    found = placed(gpus(1), of(trainer=40, searcher=10, evaluator=5))
    shares = [fraction for _, fraction in found.values()]
    usable = (79.18 - 4 * 0.75) / 79.65  # GiB that are free, and what processes hold beside JAX
    assert sum(shares) == pytest.approx(min(usable, 0.95), abs=0.004)
    assert shares == pytest.approx([sum(shares) * need / 65 for need in (40, 10, 10, 5)], abs=0.002)
    assert placed(gpus(4), of())["searcher-1"] == ("2", 0.95)


def test_shares_of_a_gpu_whose_memory_nobody_knows():
    found = placed(gpus(1, memory=None, free=None), of(trainer=400, searcher=100, evaluator=50))
    assert [fraction for _, fraction in found.values()] == pytest.approx([0.584, 0.146, 0.146, 0.073], abs=0.001)


def test_a_fraction_of_the_config_is_kept_and_the_others_share_the_rest():
    found = placed(gpus(1), of(trainer=20, searcher=10, evaluator=5), searchers__memory_fraction=0.3)
    assert found["searcher-0"][1] == found["searcher-1"][1] == 0.3
    assert found["trainer"][1] == pytest.approx(4 * found["evaluator"][1], abs=0.005) and 0.27 < found["trainer"][1] < 0.29
    sentence = "trainer 0.5 of it (learner.memory_fraction), searcher-0 0.46 of it (searchers.memory_fraction); 0.95 of it may"
    fractions = {"learner__memory_fraction": 0.5, "searchers__memory_fraction": 0.46}
    with pytest.raises(ValueError, match=re.escape(sentence)):
        placed(gpus(1, memory=None), of(), **fractions, searchers__count=1, evaluation__enabled=False)
    # A role that is alone on its GPU has all of it, and whoever sets a fraction knows better what the role needs.
    for fraction in (0.3, 1.0):
        assert placed(gpus(4), of(trainer=100), learner__memory_fraction=fraction)["trainer"] == ("0", 0.95)


def test_roles_that_need_more_than_there_is_are_refused_with_the_numbers():
    with pytest.raises(ValueError, match=r"GPU 0 is too small .* trainer 90.00 GiB; 75.7 of its 79.6 GiB may be taken"):
        names(gpus(4), of(trainer=90))
    with pytest.raises(ValueError, match=r"GPU 1 is too small .* searcher-0 76.00 GiB"):
        names(gpus(4), of(searcher=76))


def test_a_gpu_that_another_process_has_filled_is_refused():
    filled = (*gpus(3), dataclasses.replace(gpus(4)[3], free=10 << 30))
    with pytest.raises(
        ValueError,
        match=r"evaluator 11.00 GiB; 9.2 of its 79.6 GiB may be taken \(10.0 GiB are free\). Another process holds the rest",
    ):
        names(filled, of(trainer=60, searcher=60, evaluator=11))
    assert names(filled, of(trainer=60, searcher=60, evaluator=9))["evaluator"] == "3"


@pytest.mark.parametrize(
    "there, expected",
    [
        (7, {"trainer": "0", "searcher-0": "12", "searcher-1": "34", "evaluator": "56"}),
        (6, {"trainer": "01", "searcher-0": "23", "searcher-1": "45", "evaluator": "23"}),
        (4, {"trainer": "01", "searcher-0": "23", "searcher-1": "23", "evaluator": "23"}),
        (2, {"trainer": "0", "searcher-0": "01", "searcher-1": "01", "evaluator": "01"}),
    ],
)
def test_searchers_whose_tasks_have_gpus_of_their_own(there, expected):
    assert names(gpus(there), of(), searchers__task_devices=1, evaluation__task_devices=1) == expected


def test_meshes_say_how_many_gpus_a_role_gets():
    found = names(gpus(8), of(), searchers__mesh__tensor=2, searchers__count=2)
    assert found == {"trainer": "012", "searcher-0": "34", "searcher-1": "56", "evaluator": "7"}
    with pytest.raises(ValueError, match=r"searchers.mesh and searchers.task_devices make up 3 GPUs for searcher-0; there are 2"):
        names(gpus(2), of(), searchers__task_devices=2)
    with pytest.raises(ValueError, match=r"learner.mesh make up 4 GPUs for trainer; there are 2"):
        names(gpus(2), of(fits=lambda devices: devices % 4 == 0), learner__mesh__fsdp=4)


def test_a_trainer_alone_has_all():
    assert names(gpus(3), of(), searchers__count=0, evaluation__enabled=False) == {"trainer": "012"}


def test_the_smallest_gpu_counts():
    mixed = (*gpus(3), *gpus(4, memory=MEMORY // 2, free=MEMORY // 2)[3:])
    limits = set()

    def need(kind, *, devices, limit):
        limits.add(limit)
        return 1 << 30

    names(mixed, need)
    assert limits == {int(MEMORY // 2 * 0.95)}
