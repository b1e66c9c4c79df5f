"""Dry runs without compiling: the answer for every recipe with every preset, and for machines that are not this one."""

import os
import types
from pathlib import Path
from typing import Any

import pytest

from tba_jax.experiment import answer, compiling, composition, joining
from tba_jax.models.presets import PRESETS
from tba_jax.roles import gpus as gpus_lib
from tba_jax.schemas import flatten
from tba_jax.storage import layout
from tests.support import random_checkpoints, small_recipes, tiny_run

# Lengths that a tokenizer of one id a byte needs, and that every preset has positions for.
LENGTHS = {"task.prompt_length": 880, "task.response_length": 128, "learner.micro_batch_tokens": 0}


# One of each architecture, and the others.
FIRST = list({shape.architecture: preset for preset, shape in PRESETS.items()}.values())
OTHERS = [preset for preset in PRESETS if preset not in FIRST]


@pytest.mark.parametrize("presets", [FIRST, pytest.param(OTHERS, marks=pytest.mark.slow)], ids=["one of each kind", "the others"])
@pytest.mark.parametrize("recipe", small_recipes.RECIPES)
def test_every_recipe_is_answered_with_every_preset(recipe, presets, tmp_path, one_device):
    """From shapes and a tokenizer: neither weights nor a config of the policy are there."""
    small = small_recipes.config(f"{recipe}:{'small-rloo' if recipe == 'demo_baselines' else 'small'}")
    kept = ("task.", "model.path", "learner.queries", "replay.merge")
    inputs = {name: value for name, value in flatten(small.to_dict()).items() if name.startswith(kept)}
    variant = {"demo_baselines": ":rloo", "tldr_pythia": ":410m"}.get(recipe, "")
    # The models of a task are read again with each preset.
    for preset in presets if small.task.name not in ("red_team", "tldr") else presets[:2]:
        c = small_recipes.config(recipe + variant)
        c.update_from_flattened_dict(inputs | LENGTHS | {"model.preset": preset})
        experiment = composition.build(c, weights=False, new=True)
        said = answer.describe(experiment)
        assert said.splitlines()[0].startswith("trainer    ") and "nan" not in said
        assert "not checked: the programs, which --compile and --topology compile; weights of the policy" in said
        assert experiment.policy.model.layers == PRESETS[preset].layers


@pytest.fixture
def gpus(tmp_path, monkeypatch):
    """A machine with so many GPUs, of 80 GB if not otherwise said, by an nvidia-smi that prints them."""

    def make(count: int, used: int = 480, memory: int = 81559) -> None:
        program = tmp_path / "nvidia-smi"
        ids = " ".join(map(str, range(count)))
        name = "NVIDIA H100 80GB HBM3"
        program.write_text(f"#!/bin/sh\nfor i in {ids}; do echo $i, GPU-$i, {name}, {memory}, {memory - used}; done\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.delenv("JAX_PLATFORMS", raising=False)

    return make


def answered(**changes: Any) -> str:
    return answer.describe(composition.build(tiny_run.config(**changes), weights=False))


LARGE = {"searchers__count": 1, "model__compute_dtype": "bfloat16", "learner__queries": 4}


def test_gpus_are_answered_for_without_jax(gpus, monkeypatch):
    """Four GPUs of 80 GB: two for the trainer, one for the searcher, one for the evaluator."""
    gpus(4)
    monkeypatch.setattr(answer.jax, "devices", lambda *_: pytest.fail("JAX must not look for GPUs"))
    first, second, third, fourth = answered(**LARGE, model__preset="rho-math-1b").splitlines()[:4]
    assert first.startswith("trainer    fits: about ") and "(GPUs 0, 1, 95.0% of the memory)" in first
    assert second.startswith("searcher   fits: ") and third.startswith("evaluator  fits: ")
    assert "for this machine: 4 × NVIDIA H100 80GB HBM3." in fourth


def test_what_does_not_fit_is_an_answer_too(gpus):
    """20 bytes of each of 8.03 · 10⁹ parameters, and 8 to publish: 209.4 GiB; and GPUs that others have filled."""
    gpus(4)
    whole = dict(model__preset="llama-3.1-8b", learner__mesh__fsdp=1, learner__micro_batch_tokens=0)
    said = answered(**LARGE, **whole).splitlines()
    assert said[0].startswith("trainer    does not fit: about 209.") and "most of it: weights, gradient, update, AdamW" in said[0]
    gpus(1)
    said = answered(searchers__count=1, evaluation__enabled=False, learner__mesh__fsdp=2, learner__queries=4)
    assert said.startswith("all roles  does not fit: learner.mesh make up 2 GPUs for trainer; there are 1")
    gpus(4, used=61_200)
    said = answered(**LARGE, **whole).splitlines()
    assert "; other processes hold 59.8 of the 79.6 GiB of GPU 0, 59.8 of" in said[0]
    said = answered(**LARGE, model__preset="rho-math-1b", schedule__mode="interleaved").splitlines()
    assert said[0].startswith("all roles  does not fit: GPU 0 has 19.9 GiB free, and this role takes 59.7 GiB")


def test_roles_in_turn_share_the_gpus(gpus):
    """Each role fits the three quarters of a GPU that JAX takes, and not all three of them."""
    gpus(1, memory=51_200)
    said = answered(**LARGE, model__preset="rho-math-1b", schedule__mode="interleaved").splitlines()
    assert all(" fits: about " in line for line in said[:3]) and said[3].startswith("together   does not fit: about "), said[:4]


def test_roles_are_compiled_for_the_gpus_that_they_would_be_given(gpus, monkeypatch):
    gpus(4)
    there = [types.SimpleNamespace(platform="gpu", number=i) for i in range(4)]
    monkeypatch.setattr(compiling.gpus, "jax_devices", lambda: there)
    experiment = composition.build(tiny_run.config(**LARGE, model__preset="rho-math-1b"), weights=False)
    run = joining.Invocation(
        experiment=experiment, run=layout.RunDir(Path("nowhere")), name="", label="", allow_change=(), arguments=()
    )
    visible = gpus_lib.visible()
    found = compiling._here(run, compiling.ROLES, visible, role="all")
    assert {role: len(on.devices) for role, on in found.items()} == {"trainer": 2, "searcher": 1, "evaluator": 1}
    assert all(on.limit == pytest.approx(0.95 * (81559 << 20), rel=0.01) for on in found.values())
    assert compiling._here(run, ["searcher"], visible, role="searcher") == {"searcher": compiling.Devices(devices=there)}


def test_a_machine_whose_memory_all_roles_share(monkeypatch, one_device):
    sizes = dict(searchers__count=3, replay__capacity=1000)
    said = answered(**sizes).splitlines()
    assert said[3].startswith("together   fits: about ") and said[3].endswith("with 3 searchers")
    monkeypatch.setattr(answer.machine, "memory", lambda: 300 << 10)
    said = answered(**sizes).splitlines()
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
