"""Dry runs without compiling: the answer for every recipe and every preset, and for machines that are not this one."""

import json
import os
import types
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from configs import gsm8k_qwen2_5_1_5b, machines
from tba_jax import main
from tba_jax.commands import command_line
from tba_jax.experiment import answer, compiling, composition, joining
from tba_jax.models.presets import PRESETS
from tba_jax.roles import gpus as gpus_lib
from tba_jax.schemas import flatten
from tba_jax.storage import layout
from tests.support import random_checkpoints, small_recipes, tiny_run

# Lengths that a tokenizer of one id a byte needs, and that every preset has positions for.
LENGTHS = {"task.prompt_length": 880, "task.response_length": 128, "learner.micro_batch_tokens": 0}
GIB = 1 << 30


@pytest.mark.parametrize("number, recipe", [*enumerate(small_recipes.RECIPES)])
def test_every_recipe_and_every_preset_is_answered(recipe, number, one_device):
    """From shapes and a tokenizer: neither weights nor a config of the policy are there. Recipes take turns with the presets."""
    small = small_recipes.config(f"{recipe}:{'small-rloo' if recipe == 'demo_baselines' else 'small'}")
    kept = ("task.", "model.path", "learner.queries", "replay.merge")
    inputs = {name: value for name, value in flatten(small.to_dict()).items() if name.startswith(kept)}
    variant = {"demo_baselines": ":rloo", "tldr_pythia": ":410m"}.get(recipe, "")
    for preset in list(PRESETS)[number :: len(small_recipes.RECIPES)]:
        c = small_recipes.config(recipe + variant)
        c.update_from_flattened_dict(inputs | LENGTHS | {"model.preset": preset})
        experiment = composition.build(c, weights=False, new=True)
        said = answer.describe(experiment)
        assert said.splitlines()[0].startswith("trainer    ") and "nan" not in said
        assert "not checked: the programs, which --compile and --topology compile; weights of the policy" in said
        assert experiment.policy.model.layers == PRESETS[preset].layers


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


@pytest.fixture
def chips(monkeypatch) -> Callable[[int, float], None]:
    """A host with so many TPU chips of so many GiB, by JAX."""

    def make(count: int, gib: float) -> None:
        chip = SimpleNamespace(platform="tpu", device_kind="TPU", memory_stats=lambda: {"bytes_limit": int(gib * GIB)})
        monkeypatch.setattr(jax, "devices", lambda *_: [chip] * count)

    return make


def answered(**changes: Any) -> list[str]:
    return answer.describe(composition.build(tiny_run.config(**changes), weights=False)).splitlines()


LARGE = {"searchers__count": 1, "model__compute_dtype": "bfloat16", "learner__queries": 4}
RHO = LARGE | {"model__preset": "rho-math-1b"}
IN_TURN = RHO | {"schedule__mode": "interleaved"}


def test_gpus_are_answered_for_without_jax(gpus, monkeypatch):
    """Four GPUs of 80 GB: two for the trainer, one for the searcher, one for the evaluator."""
    gpus(4)
    monkeypatch.setattr(answer.jax, "devices", lambda *_: pytest.fail("JAX must not look for GPUs"))
    first, second, third, fourth = answered(**RHO)[:4]
    assert first.startswith("trainer    fits: about ") and "(GPUs 0, 1, 95.0% of the memory)" in first
    assert second.startswith("searcher   fits: ") and third.startswith("evaluator  fits: ")
    assert "for this machine: 4 × NVIDIA X." in fourth


def test_what_does_not_fit_is_an_answer_too(gpus):
    """20 bytes of each of 8.03 · 10⁹ parameters, and 8 to publish: 209.4 GiB; and GPUs that others have filled."""
    gpus(4)
    whole = dict(model__preset="llama-3.1-8b", learner__mesh__fsdp=1, learner__micro_batch_tokens=0)
    said = answered(**LARGE, **whole)[0]
    assert said.startswith("trainer    does not fit: about 209.") and "most of it: weights, gradient, update, AdamW" in said
    gpus(4, used=61_200)
    assert "; other processes hold 59.8 of the 79.6 GiB of GPU 0, 59.8 of" in answered(**LARGE, **whole)[0]
    assert answered(**IN_TURN)[0].startswith("all roles  does not fit: GPU 0 has 19.9 GiB free, and this role takes 59.7 GiB")
    gpus(1)
    said = answered(searchers__count=1, evaluation__enabled=False, learner__mesh__fsdp=2, learner__queries=4)[0]
    assert said.startswith("all roles  does not fit: learner.mesh make up 2 GPUs for trainer; there are 1")
    gpus(1, memory=51_200)  # roles in turn fit the three quarters of a GPU that JAX takes one by one, and not together
    said = answered(**IN_TURN)
    assert all(" fits: about " in line for line in said[:3]) and said[3].startswith("together   does not fit: about "), said[:4]


def test_roles_are_compiled_for_the_gpus_that_they_would_be_given(gpus, monkeypatch):
    gpus(4)
    there = [types.SimpleNamespace(platform="gpu", number=i) for i in range(4)]
    monkeypatch.setattr(compiling.gpus, "jax_devices", lambda: there)
    experiment = composition.build(tiny_run.config(**RHO), weights=False)
    settings = dict(run=layout.RunDir(Path("nowhere")), name="", label="", allow_change=(), arguments=())
    s, visible = joining.Invocation(experiment=experiment, **settings), gpus_lib.visible()
    found = compiling._here(s, compiling.ROLES, visible, role="all")
    assert {role: len(on.devices) for role, on in found.items()} == {"trainer": 2, "searcher": 1, "evaluator": 1}
    assert all(on.limit == pytest.approx(0.95 * (81559 << 20), rel=0.01) for on in found.values())
    assert compiling._here(s, ["searcher"], visible, role="searcher") == {"searcher": compiling.Devices(devices=there)}


def test_a_machine_whose_memory_all_roles_share(monkeypatch, one_device):
    sizes = dict(searchers__count=3, replay__capacity=1000)
    said = answered(**sizes)[3]
    assert said.startswith("together   fits: about ") and said.endswith("with 3 searchers")
    monkeypatch.setattr(answer.machine, "memory", lambda: 300 << 10)
    said = answered(**sizes)
    assert "searcher   fits: about" in said[1] and said[3].startswith("together   does not fit: about")


def test_nothing_is_fetched_from_the_hub(tmp_path, monkeypatch):
    """Of a hub id, config and tokenizer are fetched; weights that nobody fetched are named."""
    asked: list[list[str]] = []
    folder = random_checkpoints.byte_tokenizer(tmp_path / "snapshot")
    model = random_checkpoints.write(tmp_path / "model", "gpt2", folder)
    (folder / "config.json").write_bytes((model / "config.json").read_bytes())

    def download(name: str, *, allow_patterns: list[str], local_files_only: bool) -> str:
        asked.append(allow_patterns)
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda *_, **__: None)
    c = tiny_run.config(model__path="somebody/something", task__prompt_length=64)
    experiment = composition.build(c, weights=False, new=True)
    settings = dict(name="", label="", allow_change=(), arguments=())
    joining.check_dry_run(joining.Invocation(experiment=experiment, run=layout.RunDir(tmp_path / "run"), **settings))
    assert "weights of model.path=somebody/something, which are not on this machine" in answer.describe(experiment)
    assert asked and not any("safetensors" in pattern for patterns in asked for pattern in patterns)


def test_every_machine_picks_its_variant(gpus, chips, one_device):
    """H100 and H200; RTX 4090, L4, L40S, T4; TPUs."""
    assert [row[0] for row in answer.VARIANTS] == list(machines.MACHINES)
    assert answer.variant() == "cpu"
    for count, gib, variant in ((4, 95.7, "v5p-8"), (8, 15.75, "v5e-8"), (1, 15.75, "v5e-1"), (8, 31.2, "v5e-8")):
        chips(count, gib)
        assert answer.variant() == variant
    for count, memory, variant in (
        *((8, 81559, "8x80gb"), (7, 81559, "1x80gb"), (1, 143771, "1x80gb")),
        *((8, 24564, "1x24gb"), (1, 23034, "1x24gb"), (1, 46068, "1x24gb"), (4, 15360, "1x16gb")),
    ):
        gpus(count, memory)
        assert answer.variant() == variant
    gpus(2, 8192)
    with pytest.raises(ValueError, match=r"no variant for 2 × NVIDIA X of 8\.00 GiB: the smallest has 14 GiB; JAX_PLATFORMS=cpu"):
        answer.variant()


ROWS = tiny_run.ROOT / "configs" / "small_data" / "gsm8k.jsonl"
DATA = {f"task.gsm8k.{split}_path": str(ROWS) for split in ("train", "heldout")}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Path:
    """A tokenizer of one id a byte, and no weights."""
    folder = random_checkpoints.byte_tokenizer(tmp_path_factory.mktemp("tokens") / "model")
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": random_checkpoints.END}))
    return folder


def of_variant(variant: str, size: str, tokenizer: Path) -> composition.Experiment:
    c = gsm8k_qwen2_5_1_5b.get_config(variant)
    c.update_from_flattened_dict(DATA | {"model.path": str(tokenizer), "model.preset": f"qwen2.5-{size}b"})
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
def test_a_variant_passes_the_checks_and_fits_by_the_estimate(variant, count, memory, size, gpus, chips, tokenizer):
    (chips if variant.startswith("v") else gpus)(count, memory)
    answer.check_fits(of_variant(variant, size, tokenizer))


def test_the_variant_for_cpus_has_short_rows_and_few_steps(monkeypatch, tokenizer, one_device):
    monkeypatch.setattr("tba_jax.run.machine.memory", lambda: 16 * GIB)
    found = of_variant("cpu", "0.5", tokenizer)
    answer.check_fits(found)
    c = found.config
    assert (c.task.prompt_length, c.learner.steps, c.searchers.count, c.lora.rank) == (256, 200, 1, 16)
    monkeypatch.setattr("tba_jax.run.machine.memory", lambda: 1 * GIB)
    with pytest.raises(ValueError, match=r"does not fit this machine .*together does not fit: .* of 1\.00 GiB.*smaller model"):
        answer.check_fits(found)


def test_a_machine_takes_no_more_than_a_recipe_has():
    c = gsm8k_qwen2_5_1_5b.get_config()
    c.searchers.slots, c.evaluation.batch_size, c.lora.rank, c.learner.learning_rate = 8, 4, 2, 0.5
    machines.apply(c, "1x24gb")
    assert (c.searchers.slots, c.evaluation.batch_size, c.lora.rank, c.learner.learning_rate) == (8, 4, 2, 0.5)
    with pytest.raises(ValueError, match="no variant 'abacus': this recipe has those of the machines 8x80gb, 1x80gb"):
        gsm8k_qwen2_5_1_5b.get_config("abacus")


def test_the_variant_is_named_and_only_a_whole_new_run_takes_one(tmp_path, tokenizer, one_device, capfd, monkeypatch):
    monkeypatch.chdir(tiny_run.ROOT)
    settings = DATA | {"model.path": tokenizer, "model.preset": "qwen2.5-0.5b"}
    flags = ["--config=configs/gsm8k_qwen2_5_1_5b.py", f"--workdir={tmp_path / 'run'}", "--for_this_machine"]
    flags += [f"--config.{name}={value}" for name, value in settings.items()]
    assert command_line.execute(main, [*flags, "--dry_run=full", "--config.learner.steps=3"]) == 0
    said = capfd.readouterr()
    assert "for this machine: --config=configs/gsm8k_qwen2_5_1_5b.py:cpu\n" in said.err and not (tmp_path / "run").exists()
    assert '"response_length": 256' in said.out and '"steps": 3' in said.out
    for flag, words in {
        "--role=searcher": "--for_this_machine places all roles",
        "--config=configs/gsm8k_qwen2_5_1_5b.py:small": "it needs --config=RECIPE.py, not configs/gsm8k_qwen2_5_1_5b.py:small",
        "--config=configs/demo.py": "--config=configs/demo.py:cpu: no variant 'cpu'",
    }.items():
        with pytest.raises(SystemExit) as ended:
            command_line.execute(main, [*flags, flag])
        assert ended.value.code == 2 and words in capfd.readouterr().err
