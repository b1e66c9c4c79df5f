"""--for_this_machine: which variant is picked for a machine, what variants set, and what is refused before anything is loaded."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from configs import gsm8k_qwen2_5_1_5b as recipe
from configs import machines
from tba_jax import main
from tba_jax.commands import command_line
from tba_jax.experiment import composition, this_machine
from tests.support import random_checkpoints, tiny_run

ROWS = tiny_run.ROOT / "configs" / "small_data" / "gsm8k.jsonl"
GIB = 1 << 30


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Path:
    """A tokenizer of one id a byte, and no weights."""
    folder = random_checkpoints.byte_tokenizer(tmp_path_factory.mktemp("tokens") / "model")
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": random_checkpoints.END}))
    return folder


@pytest.fixture
def gpus(tmp_path, monkeypatch):
    """A machine with so many GPUs of so many MiB, by an nvidia-smi that prints them."""

    def make(count: int, mebibytes: int) -> None:
        program, numbers = tmp_path / "nvidia-smi", " ".join(map(str, range(count)))
        line = f"echo $i, GPU-$i, NVIDIA X, {mebibytes}, {mebibytes - 300}"
        program.write_text(f"#!/bin/sh\nfor i in {numbers}; do {line}; done\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        for name in ("CUDA_VISIBLE_DEVICES", "JAX_PLATFORMS"):
            monkeypatch.delenv(name, raising=False)

    return make


@pytest.fixture
def chips(monkeypatch):
    """A host with so many TPU chips of so many GiB, by JAX."""

    def make(count: int, gib: float) -> None:
        chip = SimpleNamespace(platform="tpu", device_kind="TPU", memory_stats=lambda: {"bytes_limit": int(gib * GIB)})
        monkeypatch.setattr(jax, "devices", lambda *_: [chip] * count)

    return make


@pytest.mark.parametrize(
    "count, mebibytes, variant",
    [
        *[(8, 81559, "8x80gb"), (7, 81559, "1x80gb"), (1, 81559, "1x80gb"), (1, 143771, "1x80gb")],  # H100, H200
        *[(8, 24564, "1x24gb"), (1, 23034, "1x24gb"), (1, 46068, "1x24gb"), (4, 15360, "1x16gb")],  # RTX 4090, L4, L40S, T4
    ],
)
def test_gpus_pick_a_variant(count, mebibytes, variant, gpus):
    gpus(count, mebibytes)
    assert this_machine.variant() == variant


@pytest.mark.parametrize(
    "count, gib, variant", [(4, 95.7, "v5p-8"), (8, 15.75, "v5e-8"), (1, 15.75, "v5e-1"), (8, 31.2, "v5e-8"), (1, 95.7, "v5e-1")]
)
def test_chips_pick_a_variant(count, gib, variant, chips):
    chips(count, gib)
    assert this_machine.variant() == variant


def test_other_machines(gpus, one_device):
    assert this_machine.variant() == "cpu"
    gpus(2, 8192)
    with pytest.raises(ValueError, match=r"no variant for 2 × NVIDIA X of 8\.00 GiB: the smallest has 14 GiB; JAX_PLATFORMS=cpu"):
        this_machine.variant()


def test_every_row_of_the_table_has_a_variant():
    assert [row.variant for row in this_machine.TABLE] == list(machines.MACHINES)


def experiment(variant: str, preset: str, tokenizer: Path) -> composition.Experiment:
    c = recipe.get_config(variant)
    rows = {f"task.gsm8k.{split}_path": str(ROWS) for split in ("train", "heldout")}
    c.update_from_flattened_dict(rows | {"model.path": str(tokenizer), "model.preset": preset, "task.long_prompts": "skip"})
    return composition.build(c, weights=False, new=True)


@pytest.mark.parametrize(
    "variant, count, mebibytes, preset",
    [
        *[("8x80gb", 8, 81559, "qwen2.5-1.5b"), ("1x80gb", 1, 81559, "qwen2.5-1.5b")],
        *[("1x24gb", 1, 23034, "qwen2.5-0.5b"), ("1x16gb", 1, 15360, "qwen2.5-0.5b"), ("1x16gb", 4, 15360, "qwen2.5-1.5b")],
    ],
)
def test_a_variant_for_gpus_passes_the_checks_and_fits_by_the_estimate(variant, count, mebibytes, preset, gpus, tokenizer):
    gpus(count, mebibytes)
    this_machine.check_fits(experiment(variant, preset, tokenizer))


@pytest.mark.parametrize("variant, count, gib", [("v5p-8", 4, 95.7), ("v5e-8", 8, 15.75), ("v5e-1", 1, 15.75)])
def test_a_variant_for_tpus_passes_the_checks_and_fits_by_the_estimate(variant, count, gib, chips, tokenizer):
    chips(count, gib)
    this_machine.check_fits(experiment(variant, "qwen2.5-0.5b", tokenizer))


def test_the_variant_for_cpus_has_short_rows_and_few_steps(monkeypatch, tokenizer, one_device):
    monkeypatch.setattr("tba_jax.run.machine.memory", lambda: 16 * GIB)
    found = experiment("cpu", "qwen2.5-0.5b", tokenizer)
    this_machine.check_fits(found)
    c = found.config
    assert (c.task.prompt_length, c.learner.steps, c.searchers.count, c.lora.rank) == (256, 200, 1, 16)
    monkeypatch.setattr("tba_jax.run.machine.memory", lambda: 1 * GIB)
    with pytest.raises(ValueError, match=r"does not fit this machine .*together does not fit: .* of 1\.00 GiB.*smaller model"):
        this_machine.check_fits(found)


def test_a_machine_takes_no_more_than_a_recipe_has():
    c = recipe.get_config()
    c.searchers.slots, c.evaluation.batch_size, c.lora.rank, c.learner.learning_rate = 8, 4, 2, 0.5
    machines.apply(c, "1x24gb")
    assert (c.searchers.slots, c.evaluation.batch_size, c.lora.rank, c.learner.learning_rate) == (8, 4, 2, 0.5)
    with pytest.raises(ValueError, match="no variant 'abacus': this recipe has those of the machines 8x80gb, 1x80gb"):
        recipe.get_config("abacus")


def call(folder: Path, tokenizer: Path, *more: str) -> list[str]:
    data = [f"--config.task.gsm8k.{split}_path={ROWS}" for split in ("train", "heldout")]
    model = [f"--config.model.path={tokenizer}", "--config.model.preset=qwen2.5-0.5b"]
    return ["--config=configs/gsm8k_qwen2_5_1_5b.py", f"--workdir={folder / 'run'}", "--for_this_machine", *more, *model, *data]


def test_the_variant_is_named_and_flags_change_it(tmp_path, tokenizer, one_device, capfd, monkeypatch):
    monkeypatch.chdir(tiny_run.ROOT)
    assert command_line.execute(main, call(tmp_path, tokenizer, "--dry_run=full", "--config.learner.steps=3")) == 0
    said = capfd.readouterr()
    assert "for this machine: --config=configs/gsm8k_qwen2_5_1_5b.py:cpu\n" in said.err and not (tmp_path / "run").exists()
    assert '"response_length": 256' in said.out and '"steps": 3' in said.out


def test_only_a_whole_new_run_takes_a_variant(tmp_path, tokenizer, one_device, capfd, monkeypatch):
    monkeypatch.chdir(tiny_run.ROOT)
    for flags, words in {
        ("--role=searcher",): "--for_this_machine places all roles",
        ("--config=configs/gsm8k_qwen2_5_1_5b.py:small",): "it needs --config=RECIPE.py, not configs/gsm8k_qwen2_5_1_5b.py:small",
        ("--config=configs/demo.py",): "--config=configs/demo.py:cpu: no variant 'cpu'",
    }.items():
        with pytest.raises(SystemExit) as ended:
            command_line.execute(main, call(tmp_path, tokenizer, *flags))
        assert ended.value.code == 2 and words in capfd.readouterr().err
