"""GPUs that are not here: what their names say, and which role gets how many of them."""

import types
from pathlib import Path

import jax
import pytest

from tba_jax.experiment import composition, gpu_plans, planning
from tba_jax.roles import placement
from tba_jax.roles.gpus import Gpu
from tba_jax.run import layout
from tests.support import tiny_run

GIB = 1 << 30


@pytest.mark.parametrize(
    "text, name, count, gib",
    [("H100x8", "H100", 8, 79.6), ("h100x1", "h100", 1, 79.6), ("L4x2@22.5", "L4", 2, 22.5), ("MI300Xx4@192", "MI300X", 4, 192)],
)
def test_a_name_says_how_many_and_how_large(text, name, count, gib):
    assert gpu_plans.parse(text) == gpu_plans.Gpus(name=name, count=count, memory=int(gib * GIB))


@pytest.mark.parametrize(
    "text, words",
    [
        ("H100", "NAMExCOUNT"),
        ("H100x0", "NAMExCOUNT"),
        ("8", "H100x8"),
        ("H100x65", "up to 64 GPUs, not 65"),
        ("K80x2", "K80x2@GIB"),
    ],
)
def test_what_is_no_gpu_is_refused(text, words):
    with pytest.raises(ValueError, match=words):
        gpu_plans.parse(text)


@pytest.mark.parametrize("count, topology", [(1, "v5p:1x1x1"), (3, "v5p:2x2x1/3"), (4, "v5p:2x2x1"), (5, "v5p:2x2x2/5")])
def test_as_many_chips_stand_in(count, topology):
    assert gpu_plans.stand_in(count) == topology


def test_too_many_to_stand_in_for():
    with pytest.raises(ValueError, match="up to 64 GPUs of a role, not 65"):
        gpu_plans.stand_in(65)


def shares(count: int, *, each: int = 1, **changes) -> dict[str, tuple[int, list[str]]]:
    settings = dict(searchers__count=2, model__heads=4, model__kv_heads=2, model__head_size=4) | changes
    there = gpu_plans.Gpus(name="H100", count=count, memory=80 * GIB)
    found = gpu_plans.shares(composition.build(tiny_run.config(**settings)), there, each=each)
    return {role: (share.count, sorted(share.beside)) for role, share in found.items()}


def test_roles_get_what_the_supervisor_gives_them():
    """Searchers and the evaluator have GPUs of their own where there are enough, and the trainer the most that it divides."""
    assert shares(4) == {"trainer": (1, []), "searcher": (1, []), "evaluator": (1, [])}
    # 12 rows divide by 4, or by 2 with heads over 2; not by 5.
    assert shares(8)["trainer"] == (4, []) and shares(8, each=2)["searcher"] == (2, [])
    assert shares(3, evaluation__enabled=False) == {"trainer": (1, []), "searcher": (1, [])}
    assert shares(1)["trainer"] == (1, ["evaluator", "searcher", "searcher"])


def test_one_process_has_all_gpus():
    found = shares(2, schedule__mode="interleaved")
    assert found["trainer"] == (2, ["evaluator", "searcher"]) and found["searcher"] == (2, ["evaluator", "trainer"])


@pytest.mark.parametrize(
    "gib, roles, gibs, mode",
    [(80, 1, 72, "asynchronous"), (80, 4, 72, "asynchronous"), (16, 4, 13, "asynchronous"), (16, 1, 12, "interleaved")],
)
def test_each_process_keeps_what_the_supervisor_leaves_it(gib, roles, gibs, mode):
    """Of 16 GiB four processes keep 3; one process of all roles has the 75 % of JAX; figures by proxy are held against 90 %."""
    experiment = composition.build(tiny_run.config(schedule__mode=mode))
    there = gpu_plans.Gpus(name="GPU", count=1, memory=gib * GIB)
    assert gpu_plans.usable_share(experiment, there, roles) == pytest.approx(gibs / gib)


def test_the_supervisor_takes_the_planned_fractions(monkeypatch, one_device):
    """Four roles share 16 GiB: what they may take together is what the placement of a run allows."""
    found = []
    monkeypatch.setattr(gpu_plans.topologies, "devices", lambda name: [jax.devices()[0]])
    monkeypatch.setattr(
        planning, "find", lambda *_, place, role, **__: found.append(place.limit) or types.SimpleNamespace(settings={})
    )
    there = gpu_plans.Gpus(name="GPU", count=1, memory=16 * GIB)
    experiment = composition.build(tiny_run.config(searchers__count=2))
    settings, _ = gpu_plans.OnGpus(experiment, layout.RunDir(Path("nowhere")), gpus=there, seconds=60).find()
    config = planning.changed(experiment, settings).config
    placed = placement.place(config, cpus=(0,), gpus=[Gpu(name="0", memory=there.memory)], need=lambda *_, **__: 1)
    assert len(placed) == 4 and all(each.memory_fraction > 0 for each in placed.values())
    assert found[0] + 2 * found[1] + found[2] <= 13 * GIB


def test_what_processes_keep_may_be_all_that_there_is():
    with pytest.raises(ValueError, match=r"H100 .* each keeps 0\.75 GiB .* none of the 2\.00 GiB") as told:
        gpu_plans.shares(
            composition.build(tiny_run.config(searchers__count=1)), gpu_plans.Gpus(name="H100", count=1, memory=2 * GIB), each=1
        )
    assert "0.00" not in str(told.value)
