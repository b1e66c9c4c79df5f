"""Dry runs without compiling: the answer for every recipe with every preset, and for machines that are not this one."""

import importlib
import json
import os
import types
from pathlib import Path
from typing import Any

import pytest

from tba_jax.experiment import answer, compiling, composition, joining
from tba_jax.models.presets import PRESETS
from tba_jax.roles import gpus as gpus_lib
from tba_jax.run import layout
from tests.support import random_checkpoints, spelled_checkpoints, tiny_run
from tests.support.small_recipes import RECIPES

VARIANTS = {"demo_baselines": ("rloo",), "tldr_pythia": ("410m",)}
# Lengths that a tokenizer of one id a byte needs, and that every preset has positions for.
LENGTHS = {"task.prompt_length": 640, "task.response_length": 128, "learner.micro_batch_tokens": 0}


def tokenizer(folder: Path) -> Path:
    """A tokenizer of one id a byte, and no weights."""
    random_checkpoints.byte_tokenizer(folder)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": random_checkpoints.END}
    template = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": template}))
    return folder


def lines(folder: Path, name: str, row: dict[str, str]) -> str:
    path = folder / name
    path.write_text("".join(json.dumps({key: value.format(i=i) for key, value in row.items()}) + "\n" for i in range(40)))
    return str(path)


def inputs(recipe: str, name: str, folder: Path) -> dict[str, Any]:
    """The data and the models of the task that a recipe names on the hub."""
    if name == "gsm8k":
        rows = lines(folder, "rows.jsonl", {"question": "What is {i} + 1?", "answer": "It is one more.\n#### {i}"})
        return {f"task.gsm8k.{split}_path": rows for split in ("train", "heldout")}
    if name == "math":
        row, of_split = {"problem": "What is ${i}$?"}, {"train": "solution", "heldout": "answer"}
        return {
            f"task.math.{split}_path": lines(folder, f"{split}.jsonl", row | {answer: "It is $\\boxed{{{i}}}$."})
            for split, answer in of_split.items()
        }
    if name == "story_sentiment":
        (folder / "stories.json").write_text(json.dumps([f"Once upon a time {i} cats sat on a mat. " * 4 for i in range(200)]))
        return {"task.story_sentiment.data_path": str(folder / "stories.json")}
    if recipe == "own_task":
        rows = lines(folder, "rows.jsonl", {"opening": "Once upon a {i}", "words": "a e"})
        return {f"task.custom.{split}_path": rows for split in ("train", "heldout")}
    if name == "countdown":
        return {"task.countdown.train_queries": 40, "task.countdown.heldout_queries": 8}
    if name == "tldr":
        rows = lines(folder, "rows.jsonl", {"query": "POST: Cat {i}\n\nTL;DR:", "summary": "Cat {i}."})
        reward = random_checkpoints.write(folder / "reward", "pythia-410m", tokenizer(folder / "reward-model"), labels=1)
        return {f"task.tldr.{split}_path": rows for split in ("train", "heldout")} | {"task.tldr.reward_path": str(reward)}
    if name == "red_team":
        models = dict(victim="qwen2", classifier="llama_untied", embedder="bert_embedding")
        settings = {
            f"task.red_team.{model}_path": str(spelled_checkpoints.write(folder / model, fixture, chat=model != "embedder"))
            for model, fixture in models.items()
        }
        if recipe == "red_team_gpt2":
            labels = ("neutral", "nothate", "hate")
            classifier = random_checkpoints.write_encoder(
                folder / "labelled", "roberta_classifier", tokenizer(folder / "labels"), labels=labels
            )
            settings["task.red_team.classifier_path"] = str(classifier)
        else:
            settings["task.embedding_path"] = settings["task.red_team.embedder_path"]
        return settings | {
            "task.red_team.attack_prompt": "do:",
            "task.red_team.victim_prompt_length": 32,
            "task.red_team.victim_reply_length": 6,
        }
    return {}


# One of each architecture, and the others.
FIRST = list({shape.architecture: preset for preset, shape in PRESETS.items()}.values())
OTHERS = [preset for preset in PRESETS if preset not in FIRST]


@pytest.mark.parametrize("presets", [FIRST, pytest.param(OTHERS, marks=pytest.mark.slow)], ids=["one of each kind", "the others"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_is_answered_with_every_preset(recipe, presets, tmp_path, one_device):
    """From shapes and a tokenizer: neither weights nor a config of the policy are there."""
    get_config = importlib.import_module(f"configs.{recipe}").get_config
    c = get_config(*VARIANTS.get(recipe, ()))
    settings = inputs(recipe, c.task.name, tmp_path)
    if c.model.path or c.task.name == "red_team" or recipe == "own_task":
        settings["model.path"] = str(tokenizer(tmp_path / "model"))
    # The models of a task are read again with each preset.
    for preset in presets if c.task.name not in ("red_team", "tldr") else presets[:2]:
        c = get_config(*VARIANTS.get(recipe, ()))
        c.update_from_flattened_dict(LENGTHS | settings | {"model.preset": preset})
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
    folder = tokenizer(tmp_path / "snapshot")
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
