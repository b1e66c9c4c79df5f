"""Dry runs: estimates, also for other machines, and the compiler's figures against programs of real roles."""

import dataclasses
import importlib.util
import json
import math
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from configs import gsm8k_qwen2_5_1_5b, machines, small
from tba_jax import main
from tba_jax.commands import command_line
from tba_jax.experiment import composition, dry_run, topologies, training
from tba_jax.experiment.jobs import join, make_searcher
from tba_jax.models.config import PRESETS
from tba_jax.programs import Fit, Measure, Program, sizes_in
from tba_jax.roles import gpus as gpus_lib
from tba_jax.run import processes
from tba_jax.schemas import flatten
from tba_jax.storage import layout
from tba_jax.telemetry.status import TimeAccount
from tests.support import small_recipes, tiny_run

DEVICES = jax.devices()  # eight; the roles of the runs that are made here take one
RUN = layout.RunDir(Path("/nowhere"))
DECODES = ["caches", "next policy from its snapshot", "a parameter of the next policy", "prefill", "decode"]
PROGRAMS = {
    "trainer": ["init", "update", "update in micro-batches", "log-prob gap", "publish", "checkpoint"],
    "searcher": [*DECODES, "scoring by the reference"],
}
GIB = 1 << 30


@pytest.mark.parametrize("number, recipe", [*enumerate(small_recipes.RECIPES)])
def test_every_recipe_and_every_preset_is_answered(recipe, number, one_device):
    """From shapes and a tokenizer: neither weights nor a config of the policy are there. Recipes take turns with the presets."""
    made = small_recipes.config(f"{recipe}:{'small-rloo' if recipe == 'demo_baselines' else 'small'}")
    kept = ("task.", "model.path", "learner.queries", "learner.reference.path", "replay.merge")
    inputs = {name: value for name, value in flatten(made.to_dict()).items() if name.startswith(kept)}
    # A tokenizer of one id a byte needs them, and every preset has positions for them.
    inputs |= {"task.prompt_length": 880, "task.response_length": 128, "learner.micro_batch_tokens": 0}
    variant = {"demo_baselines": ":rloo", "tldr_pythia": ":410m"}.get(recipe, "")
    for preset in list(reversed(PRESETS))[number :: len(small_recipes.RECIPES)]:
        c = small_recipes.config(recipe + variant)
        c.update_from_flattened_dict(inputs | {"model.preset": preset})
        for mesh in (c.learner.mesh, c.searchers.mesh, c.evaluation.mesh):
            mesh.tensor = math.gcd(mesh.tensor, PRESETS[preset].kv_heads)
        said = dry_run.describe(composition.build(c, weights=False, new=True))
        assert said.splitlines()[0].startswith("trainer    ") and "nan" not in said
        assert "not checked: the programs, which --compile and --topology compile; weights of the policy" in said


@pytest.fixture
def gpus(tmp_path, monkeypatch) -> Callable[..., None]:
    """A machine with so many GPUs, of 80 GB if not otherwise said, by an nvidia-smi that prints them."""

    def make(count: int, memory: int = 81559, used: int = 480) -> None:
        program, ids, name = tmp_path / "nvidia-smi", " ".join(map(str, range(count))), "NVIDIA X"
        program.write_text(f"#!/bin/sh\nfor i in {ids}; do echo $i, GPU-$i, {name}, {memory}, {memory - used}; done\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.delenv("JAX_PLATFORMS", raising=False)

    return make


def answered(**changes: Any) -> list[str]:
    return dry_run.describe(composition.build(tiny_run.config(**changes), weights=False)).splitlines()


LARGE = {"searchers__count": 1, "model__compute_dtype": "bfloat16", "learner__queries": 4}
RHO = LARGE | {"model__preset": "rho-math-1b"}
IN_TURN = RHO | {"schedule__mode": "interleaved"}


def test_gpus_are_answered_for_without_jax(gpus, monkeypatch):
    """20 bytes of each of 8.03 · 10⁹ parameters, and 8 to publish: 209.4 GiB; and GPUs that others have filled."""
    gpus(4)
    monkeypatch.setattr(jax, "devices", lambda *_: pytest.fail("JAX must not look for GPUs"))
    said = answered(**RHO)
    assert said[0].startswith("trainer    fits: about ") and "(GPUs 0, 1, 95.0% of the memory)" in said[0]
    assert said[2].startswith("evaluator  fits: ") and "for this machine: 4 × NVIDIA X." in said[3]
    whole = dict(model__preset="llama-3.1-8b", learner__mesh__fsdp=1, learner__micro_batch_tokens=0)
    said = answered(**LARGE, **whole)[0]
    assert said.startswith("trainer    does not fit: about 209.") and "most of it: weights, gradient, update, AdamW" in said
    gpus(4, used=61_200)
    assert "; other processes hold 59.8 of the 79.6 GiB of GPU 0, 59.8 of" in answered(**LARGE, **whole)[0]
    assert answered(**IN_TURN)[0].startswith("all roles  does not fit: GPU 0 has 19.9 GiB free, and this role takes 59.7 GiB")
    gpus(1, memory=51_200)  # roles in turn fit the three quarters of a GPU that JAX takes one by one, and not together
    said = answered(**IN_TURN)
    assert all(" fits: about " in line for line in said[:3]) and said[3].startswith("together   does not fit: about "), said[:4]


def test_nothing_is_fetched_from_the_hub(tmp_path, monkeypatch):
    asked: list[list[str]] = []
    without = shutil.ignore_patterns("*.safetensors")
    folder = shutil.copytree(small.FOLDER / "gpt2", tmp_path / "snapshot", ignore=without)

    def download(name: str, *, allow_patterns: list[str], local_files_only: bool) -> str:
        asked.append(allow_patterns)
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda *_, **__: None)
    c = tiny_run.config(model__path="somebody/something", task__prompt_length=64)
    s = invocation(composition.build(c, weights=False, new=True), layout.RunDir(tmp_path / "run"))
    training.check_dry_run(s)
    assert "weights of model.path=somebody/something, which are not on this machine" in dry_run.describe(s.experiment)
    assert asked and not any("safetensors" in pattern for patterns in asked for pattern in patterns)


def invocation(experiment: composition.Experiment, run: layout.RunDir) -> training.Invocation:
    return training.Invocation(experiment=experiment, run=run, name="", label="", allow_change=(), arguments=())


# A tokenizer of one id a byte.
DATA = {"model.path": str(small.FOLDER / "qwen2")}
DATA |= {f"task.gsm8k.{split}_path": str(small.FOLDER / "gsm8k.jsonl") for split in ("train", "heldout")}


def of_variant(variant: str, size: str) -> composition.Experiment:
    c = gsm8k_qwen2_5_1_5b.get_config(variant)
    c.update_from_flattened_dict(DATA | {"model.preset": f"qwen2.5-{size}b"})
    c.task.long_prompts = "skip"
    return composition.build(c, weights=False, new=True)


@pytest.mark.parametrize(
    "variant, count, memory, size",
    [
        *[("8x80gb", 8, 81559, "1.5"), ("1x80gb", 1, 81559, "1.5"), ("1x24gb", 1, 23034, "0.5")],
        *[("1x16gb", 1, 15360, "0.5"), ("1x16gb", 4, 15360, "1.5")],
        *[("v5p-8", 4, 95.7, "0.5"), ("v5e-8", 8, 15.75, "0.5"), ("v5e-1", 1, 15.75, "0.5")],
    ],
)
def test_a_machine_picks_a_variant_that_passes_and_fits_by_the_estimate(variant, count, memory, size, gpus, monkeypatch):
    if variant.startswith("v"):  # a host with so many TPU chips of so many GiB
        chip = SimpleNamespace(platform="tpu", device_kind="TPU", memory_stats=lambda: {"bytes_limit": int(memory * GIB)})
        monkeypatch.setattr(jax, "devices", lambda *_: [chip] * count)
    else:
        gpus(count, memory)
    assert topologies.variant() == variant
    dry_run.check_fits(of_variant(variant, size))


def test_a_machine_that_is_too_small_has_no_variant(gpus, one_device):
    assert [row[0] for row in topologies.VARIANTS] == list(machines.MACHINES) and topologies.variant() == "cpu"
    gpus(2, 8192)
    with pytest.raises(ValueError, match=r"no variant for 2 × NVIDIA X of 8\.00 GiB: the smallest has 14 GiB; JAX_PLATFORMS=cpu"):
        topologies.variant()


def test_a_run_that_does_not_fit_the_cpu_is_refused(monkeypatch, one_device):
    monkeypatch.setattr("tba_jax.run.processes.memory", lambda: 16 * GIB)
    found = of_variant("cpu", "0.5")
    dry_run.check_fits(found)
    assert "with 3 searchers" in answered(searchers__count=3, replay__capacity=1000)[3]
    monkeypatch.setattr("tba_jax.run.processes.memory", lambda: 1 * GIB)
    with pytest.raises(ValueError, match=r"does not fit this machine .*together does not fit: .* of 1\.00 GiB.*smaller model"):
        dry_run.check_fits(found)


def test_the_variant_is_named(tmp_path, one_device, capfd, monkeypatch):
    monkeypatch.chdir(tiny_run.ROOT)
    flags = ["--config=configs/gsm8k_qwen2_5_1_5b.py", f"--workdir={tmp_path / 'run'}", "--for_this_machine"]
    flags += [f"--config.{name}={value}" for name, value in (DATA | {"model.preset": "qwen2.5-0.5b"}).items()]
    assert command_line.execute(main, [*flags, "--dry_run=full", "--config.learner.steps=3"]) == 0
    said = capfd.readouterr()
    assert "for this machine: --config=configs/gsm8k_qwen2_5_1_5b.py:cpu\n" in said.err and not (tmp_path / "run").exists()
    assert [line.split()[0] for line in said.out.splitlines()[:4]] == [*dry_run.ROLES, "together"]
    printed = json.loads(said.out[said.out.index("\n{") : said.out.index("\nparameters:")])
    assert printed["task"]["response_length"] == 256 and printed["learner"]["steps"] == 3
    assert re.search(r"total +[\d,]+", said.out)
    for role in dry_run.ROLES:
        assert re.search(rf"{role} +\d+\.\d{{3}}  \(", said.out), f"no memory estimate of the {role}"


def programs(role: str, *, devices: int = 1, **settings) -> dict[str, Program]:
    return dry_run.programs(composition.build(tiny_run.config(**settings)), RUN, role=role, devices=DEVICES[:devices])


def bytes_of(tree) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


@pytest.fixture(scope="module")
def made(tmp_path_factory, one_device_throughout):
    """A real trainer that has begun, with its lease, and a real searcher with weights."""
    s = tiny_run.settings(tmp_path_factory.mktemp("made") / "run", tiny_run.config())
    join(s, may_change_schedule=True)
    trainer = training.make_trainer(s, publish_every_steps=1)
    trainer.publish_unless_there()
    trainer.flush_snapshot()
    searcher = make_searcher(s, name="searcher", account=TimeAccount())
    searcher.refresh()
    searcher.search()
    yield trainer, searcher
    searcher.close()
    trainer.close()
    trainer.lease.release()


def test_what_roles_hold_is_what_a_dry_run_compiles_for(made):
    trainer, searcher = made
    of_trainer, of_searcher, lane = programs("trainer"), programs("searcher"), searcher._engine._lanes[0]
    assert [*of_trainer] == PROGRAMS["trainer"] and [*of_searcher] == PROGRAMS["searcher"] == [*programs("evaluator")]
    program, reference = trainer.program, searcher._reference.params
    placed = program.place(program._whole_rows(trainer._contract.row_shape()))
    pairs = {
        "state": (trainer.state, of_trainer["update"].arguments[0]),
        "rows": (program._rescored(placed), of_trainer["update"].arguments[2]),
        "weights": (lane._weights, of_searcher["decode"].arguments[0]),
        "caches": ((lane._prompts, lane._slots), of_searcher["decode"].arguments[1:3]),
        "reference": (reference, of_searcher["scoring by the reference"].arguments[0]),
    }
    for name, (arrays, shapes) in pairs.items():
        for x, shape in zip(jax.tree.leaves(arrays), jax.tree.leaves(shapes), strict=True):
            assert (x.shape, x.dtype) == (shape.shape, shape.dtype), name
            assert x.sharding.is_equivalent_to(shape.sharding, x.ndim), name
    beside = {name: bytes_of(tree) for name, tree in of_trainer["update"].beside.items()}
    assert beside["snapshots to be written"] == 2 * bytes_of(program.policy_params)
    assert beside["checkpoint to be written"] == bytes_of(program.state)
    decode, scored = (of_searcher[name].beside for name in ("decode", "scoring by the reference"))
    policy = bytes_of(lane._weights)
    assert bytes_of(decode["reference"]) == bytes_of(reference) and bytes_of(scored["policy in use"]) == policy
    assert policy < bytes_of(decode["next policy"]) < 1.5 * policy, "one set of weights, and one parameter more"
    assert bytes_of(scored["caches"]) == bytes_of((lane._prompts, lane._slots))
    text = of_trainer["update"].lower().as_text(debug_info=True)
    assert re.search(r'"jit\([^"]*/update/', text) and re.search(r'"jit\([^"]*[/(]score[/)]', text), "names for profilers"


def test_settings_decide_what_a_role_holds_and_which_programs_it_has(tmp_path):
    unscored = programs("searcher", learner__reference__kind="none")
    assert [*unscored] == DECODES and "reference" not in unscored["decode"].beside
    in_place = programs("searcher", searchers__swap_memory="in_place")
    assert "next policy from its snapshot" not in in_place and "next policy" not in in_place["decode"].beside
    moving = dict(learner__objective="tba_prime", learner__reference__kind="reset", learner__reference__reset_optimizer=True)
    reset = programs("trainer", **moving, lora__rank=2)
    assert {"scoring by the moving reference", "copy to the moving reference", "restart of moments"} <= reset.keys()
    assert "moving reference" in reset["update"].beside and "frozen weights" not in reset["update"].beside
    split = programs("trainer", devices=4, learner__mesh__fsdp=2, learner__mesh__data=2)["update"]
    size, whole = (Measure().size(each.beside["checkpoint to be written"]) for each in (split, programs("trainer")["update"]))
    assert 0.5 <= size / whole < 0.55
    warm, run = composition.build(tiny_run.config(warm_start__steps=2, warm_start__batch_size=4)), layout.RunDir(tmp_path)
    begun = ["init of the warm start", "update of the warm start", *PROGRAMS["trainer"]]
    assert [*dry_run.programs(warm, run, role="trainer", devices=DEVICES[:1])] == begun
    run.initial_reference.parent.mkdir(parents=True, exist_ok=True)
    run.initial_reference.write_text("{}")
    assert [*dry_run.programs(warm, run, role="trainer", devices=DEVICES[:1])] == PROGRAMS["trainer"]


def with_settings(experiment: composition.Experiment, **settings) -> composition.Experiment:
    config = experiment.config.copy_and_resolve_references()
    config.update_from_flattened_dict({name.replace("__", "."): value for name, value in settings.items()})
    return dataclasses.replace(experiment, config=config)


def test_models_of_the_task_lie_beside_all_programs_of_their_devices():
    c = small_recipes.config("tldr_pythia:small")
    c.task.prompt_length = 128
    summaries, models = composition.build(c), {"reward model", "gold model"}
    made = dry_run.programs(summaries, RUN, role="evaluator", devices=DEVICES[:1])
    assert [*made] == [*PROGRAMS["searcher"], "pass of the reward model", "pass of the gold model"]
    for name, program in made.items():
        assert set(program.beside) & models == models - {name.removeprefix("pass of the ")}
    apart = with_settings(summaries, searchers__task_devices=2)
    alone = dry_run.programs(apart, RUN, role="searcher", devices=DEVICES[:3])
    assert [*alone] == PROGRAMS["searcher"] and not any("reward model" in program.beside for program in alone.values())
    task = dry_run.fit_task(apart, role="searcher", on=topologies.of_jax(DEVICES[:3]))
    assert task is not None and task.devices.count == 2 and task.mesh == "searchers.task_devices=2"
    (fit,) = task.fits  # each device has a whole copy
    assert not fit.beside and fit.arguments == Measure().size(made["pass of the reward model"].arguments)
    full = dataclasses.replace(task, devices=dataclasses.replace(task.devices, on_host=False, limit=1 << 20))
    said = dry_run.describe_programs([full], config=apart.config)
    assert "searcher, task  does not fit" in said and "change task.tldr.batch_rows=" in said
    assert dry_run.fit_task(summaries, role="searcher", on=topologies.of_jax(DEVICES[:1])) is None


def test_a_role_that_does_not_fit_is_told_what_to_change():
    room = {"temporaries": ("learner.micro_batch_tokens", "task.custom.judge")}
    sizes = dict(arguments=1 << 30, temporaries=20 << 30, outputs=1 << 30, aliased=1 << 30, beside={"snapshots": 1 << 30})
    fit = Fit(name="update", program=Program(function=print, arguments=(), room=room), **sizes, refused=True)
    on = topologies.Devices(count=1, limit=16 << 30, where="a TPU")
    found = dry_run.RoleFit(who="trainer", devices=on, mesh="", fits=[fit])
    said = dry_run.describe_programs([found], config=tiny_run.config())
    numbers = "does not fit: 22.00 GiB of 16.00 GiB (update); most of it: temporaries, 20.00 GiB"
    assert said.startswith(f"trainer    {numbers}; change learner.micro_batch_tokens=0, task.custom.judge\n")
    on_host = dataclasses.replace(found, devices=dataclasses.replace(on, on_host=True))
    both = [on_host, dataclasses.replace(on_host, who="searcher")]
    said = dry_run.describe_programs(both, config=tiny_run.config(searchers__count=2))
    assert "together   may not fit: at most 66.00 GiB of 16.00 GiB; " in said


@pytest.fixture
def stand_ins(monkeypatch):
    monkeypatch.setattr(topologies, "devices", lambda topology: DEVICES)


def test_gpus_are_divided_among_the_roles(stand_ins, gpus, monkeypatch):
    """As under --role=all. Of GPUs that are not here, 90 % of what each role may take is its limit by proxy."""
    experiment = composition.build(tiny_run.config(searchers__count=1))
    found = topologies.of_roles(experiment, {"all": "H100x4"}, *dry_run.ROLES)
    assert {role: on.count for role, on in found.items()} == {"trainer": 2, "searcher": 1, "evaluator": 1}
    assert all(on.limit == pytest.approx(0.9 * 0.95 * 79.6 * 2**30) for on in found.values())
    one = topologies.of_roles(experiment, {"all": "MI300Xx1@192"}, *dry_run.ROLES)
    assert [round(on.limit / 2**30 / 192 / 0.9, 3) for on in one.values()] == [0.475, 0.237, 0.237]
    with pytest.raises(ValueError, match="up to 64 GPUs of a role, not 65"):
        topologies.of_roles(experiment, {"trainer": "L4x65"}, "trainer")
    with pytest.raises(ValueError, match=r"learner\.mesh make up 8 GPUs for trainer; there are 4"):
        topologies.of_roles(with_settings(experiment, learner__mesh__fsdp=8), {"all": "H100x4"}, "trainer")
    gpus(4)
    there = [SimpleNamespace(platform="gpu", device_kind="X", memory_stats=lambda: {"bytes_limit": 7})] * 4
    monkeypatch.setattr(gpus_lib, "jax_devices", lambda: there)
    here = dry_run._here(invocation(experiment, RUN), dry_run.ROLES, gpus_lib.visible(), role="all")
    assert {role: (on.count, on.limit) for role, on in here.items()} == {
        role: (on.count, int(0.95 * (81559 << 20))) for role, on in found.items()
    }


def test_an_answer_by_proxy_is_marked_and_nothing_is_written(stand_ins, tmp_path, capsys, one_device, monkeypatch):
    asked: list[None] = []
    monkeypatch.setattr(processes, "stop_at_once", lambda: asked.append(None))
    flags = ["--dry_run=full", "--topology=H100x2", "--role=trainer", "--config.searchers.count=1"]
    assert command_line.execute(main, tiny_run.command(tmp_path / "run", *flags)[3:]) == 0
    said = capsys.readouterr().out
    assert re.match(r"trainer    fits: .* of 68\.06 GiB \(.*\); by TPU proxy\n", said)
    assert "(by TPU proxy, for 1 of H100x2)" in said and said.index("\nconfig:") > said.index("trainer on") and asked
    assert not (tmp_path / "run").exists()


def test_sizes_in_what_the_compiler_says():
    told = "required for HLO temporaries (32.50G) exceeds available HBM (15.75G). HLO"
    assert sizes_in(told) == [int(32.5 * 2**30), int(15.75 * 2**30)]
    assert sizes_in("Used 2.00T of 95.73G hbm. Exceeded") == [2 << 40, int(95.73 * 2**30)]
    assert sizes_in("error E1000 in module jit_update") == []


@pytest.mark.slow
def test_programs_compile_for_a_tpu_that_is_not_here(tmp_path):
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("the TPU's compiler is not installed: pip install -e '.[tpu]'")
    both, split = "--topology=trainer=v5p:2x2x1,v5e:1x1", ["--config.learner.mesh.fsdp=2", "--config.learner.queries=4"]
    done = tiny_run.call(tiny_run.command(tmp_path / "run", "--dry_run", both, *split), timeout=600)
    assert len(re.findall(r"(?m)^(trainer|searcher|evaluator) +fits: ", done.stdout)) == 3, done.stdout + done.stderr
    assert " of 95.7" in done.stdout and " of 15.7" in done.stdout and "data=2 × fsdp=2" in done.stdout
    refused = tiny_run.call(tiny_run.command(tmp_path / "run", "--dry_run", "--topology=v5p:3x3x3"))
    assert refused.returncode == 2 and "'v5p:3x3x3' is no topology" in refused.stderr
