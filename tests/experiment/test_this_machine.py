"""Settings for the machine that is there: CPUs, GPUs, small disks, and what is refused before anything is loaded."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from configs import gsm8k_qwen2_5_1_5b as recipe
from tba_jax import main
from tba_jax.commands import command_line
from tba_jax.experiment import checks, this_machine
from tba_jax.run import file_systems, layout
from tests.support import random_checkpoints, tiny_checkpoints, tiny_run

ROWS = tiny_run.ROOT / "configs" / "small_data" / "gsm8k.jsonl"
SMALL = "python -m tba_jax.main --config=configs/gsm8k_qwen2_5_1_5b.py:small --workdir=runs/small"
GIB = 1 << 30


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Path:
    """A tokenizer of one id a byte, and no weights."""
    folder = random_checkpoints.byte_tokenizer(tmp_path_factory.mktemp("tokens") / "model")
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": random_checkpoints.END}))
    return folder


@pytest.fixture
def choose(tmp_path, tokenizer):
    """Chooses for a policy of a preset's shape."""

    def choose(preset: str = "qwen2.5-0.5b", model: Path = tokenizer, **flags) -> this_machine.Chosen:
        settings = {name.replace("__", "."): value for name, value in flags.items()} | {"model.path": str(model)}
        settings |= {f"task.gsm8k.{split}_path": str(ROWS) for split in ("train", "heldout")} | {"model.preset": preset}
        c = recipe.get_config()
        c.update_from_flattened_dict(settings)
        run = layout.RunDir(tmp_path / "run")
        chosen = this_machine.choose(c, recipe.get_config(), run, named=settings, small=SMALL)
        checks.check(chosen.config, weights=False, new=True)
        return chosen

    return choose


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine with so many GPUs of so many GiB, by an nvidia-smi that prints them, where JAX has its package for GPUs."""

    def make(count: int, gib: float, *, supported: bool = True) -> None:
        memory, numbers = int(gib * 1024), " ".join(map(str, range(count)))
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\nfor i in {numbers}; do echo $i, GPU-$i, NVIDIA X, {memory}, {memory - 300}; done\n")
        program.chmod(0o755)
        if supported:
            (tmp_path / "jax_cuda12_plugin.py").write_text("")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        for name in ("CUDA_VISIBLE_DEVICES", "JAX_PLATFORMS"):
            monkeypatch.delenv(name, raising=False)

    return make


@pytest.fixture
def memory(monkeypatch):
    """The memory of a machine without accelerators."""

    def make(gib: float) -> None:
        monkeypatch.setattr("tba_jax.run.machine.memory", lambda: int(gib * GIB))

    return make


@pytest.fixture
def free(monkeypatch):
    """A function that sets the free space of every disk, in GiB."""

    def make(gib: float) -> None:
        monkeypatch.setattr(file_systems, "free", lambda folder: int(gib * GIB))

    make(500)
    return make


def test_a_cpu_gets_short_sequences_small_batches_and_fewer_steps(choose, free, memory, one_device):
    memory(64)
    chosen = choose()
    c = chosen.config
    assert (c.task.prompt_length, c.task.response_length, c.task.long_prompts) == (256, 256, "skip")
    assert (c.learner.steps, c.learner.warmup_steps, c.learner.decay_steps, c.learner.beta_steps) == (200, 10, 100, 100)
    assert c.searchers.count == 1 and c.model.compute_dtype == "float32" and c.lora.rank == 0
    assert chosen.settings["learner.steps"] == (1000, 200) and "--config.learner.steps=200" in chosen.flags
    assert [line.split()[:2] for line in chosen.told] == [
        [who, "fits:"] for who in ("trainer", "searcher", "evaluator", "together", "disk")
    ]


def test_all_held_out_queries_are_too_many_for_a_cpu(choose, free, memory, one_device, monkeypatch):
    memory(64)
    of_recipe = recipe.get_config()
    of_recipe.evaluation.queries = 0
    monkeypatch.setattr(recipe, "get_config", of_recipe.copy_and_resolve_references)
    assert choose().config.evaluation.queries == 64
    assert choose(evaluation__queries=0).config.evaluation.queries == 0, "a flag names it"


def test_what_a_flag_names_stays(choose, free, memory, one_device):
    memory(64)
    c = choose(learner__steps=4, task__response_length=300, publish__keep=9, learner__queries=5).config
    assert (c.learner.steps, c.task.response_length, c.publish.keep, c.learner.queries) == (4, 300, 9, 5)
    assert (c.learner.warmup_steps, c.learner.decay_steps, c.evaluation.every_steps) == (0, 2, 1), "in proportion to the steps"


def test_a_cpu_of_several_devices_gets_batches_that_divide(choose, free, memory):
    memory(256)
    c = choose(task__long_prompts="skip").config
    assert c.learner.queries * c.learner.completions % 8 == 0 and c.evaluation.batch_size % 8 == 0


def test_adapters_come_where_all_weights_do_not_fit(choose, free, memory, one_device):
    memory(24)
    chosen = choose()
    c = chosen.config
    assert (c.lora.rank, c.learner.learning_rate) == (16, 1e-5)
    assert "adapters are trained, because with all weights" in chosen.told[0] and "does not fit" in chosen.told[0]


def test_too_little_memory_is_refused_with_numbers_and_the_small_form(choose, free, memory, one_device):
    memory(24)
    with pytest.raises(ValueError, match=r"together does not fit: about \d+\.\d+ GiB of 16\.80 GiB") as refused:
        choose("qwen2.5-7b")
    assert str(refused.value).endswith(SMALL) and "not even with" in str(refused.value)


def test_too_little_disk_means_fewer_files_then_adapters_then_no_run(choose, free, memory, one_device):
    memory(64)
    free(22)
    c = choose().config
    assert (c.publish.keep, c.checkpoint.keep, c.replay.retention, c.lora.rank) == (3, 1, "checkpoints", 0)
    free(6)
    assert choose().config.lora.rank == 16
    free(1)
    with pytest.raises(ValueError, match=r"disk does not fit: about \d\.\d+ GiB of the 1\.00 GiB left on .*publish\.keep=3"):
        choose()


@pytest.mark.parametrize(
    "count, gib, preset, searchers, rank",
    [
        (1, 80, "qwen2.5-0.5b", 1, 0),
        (1, 24, "qwen2.5-0.5b", 1, 0),
        (1, 16, "qwen2.5-0.5b", 1, 16),
        (1, 80, "qwen2.5-1.5b", 1, 0),
        (4, 24, "qwen2.5-0.5b", 3, 0),
        (8, 80, "qwen2.5-1.5b", 3, 0),
        (8, 80, "qwen2.5-7b", 3, 0),
    ],
)
def test_gpus_get_what_fits_them(count, gib, preset, searchers, rank, choose, machine, free):
    machine(count, gib)
    c = choose(preset, task__long_prompts="skip").config
    assert (c.searchers.count, c.lora.rank, c.schedule.mode) == (searchers, rank, "asynchronous")
    assert (c.task.response_length, c.learner.steps) == (512, 1000), "the recipe's own"


@pytest.mark.parametrize("count", [1, 4, 8])
def test_the_roles_of_a_tpu_take_turns_in_one_process(count, choose, free, monkeypatch):
    chip = SimpleNamespace(platform="tpu", device_kind="TPU v5 lite", memory_stats=lambda: {"bytes_limit": int(15.75 * GIB)})
    monkeypatch.setattr(jax, "devices", lambda *_: [chip] * count)
    c = choose(task__long_prompts="skip").config
    assert (c.schedule.mode, c.task.response_length, c.learner.steps) == ("interleaved", 512, 1000)
    assert c.learner.queries * c.learner.completions % count == 0 and c.evaluation.batch_size % count == 0


def test_a_gpu_that_is_too_small_is_refused(choose, machine, free):
    machine(1, 16)
    with pytest.raises(ValueError, match=r"does not fit this machine \(1 × NVIDIA X\).*GPU 0 is too small.*GiB.*smaller model"):
        choose("qwen2.5-7b")


def test_a_gpu_that_jax_cannot_use_is_told_of(choose, machine, free):
    machine(2, 24, supported=False)
    with pytest.raises(ValueError, match=r"2 × GPU \(0, 1\), but JAX has no support.*ACCELERATOR=cuda12.*JAX_PLATFORMS=cpu"):
        choose()


def test_a_tokenizer_without_the_characters_of_prompts_is_refused(choose, tmp_path, free, memory, one_device):
    memory(64)
    letters = tiny_checkpoints.write_letters(tmp_path / "letters", "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ .,?'")
    with pytest.raises(
        ValueError, match=r"changes the text of \d+ of \d+ train prompts.*such as '.*\d.*', which the policy reads"
    ):
        choose(model=letters, task__stop_strings=())


def arguments(tmp_path: Path, tokenizer: Path, *more: str) -> list[str]:
    data = [f"--config.task.gsm8k.{split}_path={ROWS}" for split in ("train", "heldout")]
    model = [f"--config.model.path={tokenizer}", "--config.model.preset=qwen2.5-0.5b"]
    own = ["--config=configs/gsm8k_qwen2_5_1_5b.py", f"--workdir={tmp_path / 'run'}", "--for_this_machine", *more]
    return [*own, *model, *data]


def test_a_dry_run_shows_what_would_be_chosen(tmp_path, tokenizer, free, memory, one_device, capfd, monkeypatch):
    memory(64)
    monkeypatch.chdir(tiny_run.ROOT)
    assert command_line.execute(main, arguments(tmp_path, tokenizer, "--dry_run", "--config.learner.queries=4")) == 0
    said = capfd.readouterr()
    assert "disk       fits" in said.out and "steps 1000 → 200" in said.err and not (tmp_path / "run").exists()


def test_the_refusal_names_the_recipes_own_small_form(tmp_path, tokenizer, free, memory, one_device, capfd, monkeypatch):
    memory(1)
    monkeypatch.chdir(tiny_run.ROOT)
    with pytest.raises(SystemExit) as ended:
        command_line.execute(main, arguments(tmp_path, tokenizer, "--config.learner.queries=4"))
    assert ended.value.code == 2 and capfd.readouterr().err.strip().endswith(SMALL) and not (tmp_path / "run").exists()


def test_only_a_whole_new_run_is_fitted(tmp_path, tokenizer, capfd, monkeypatch):
    monkeypatch.chdir(tiny_run.ROOT)
    with pytest.raises(SystemExit):
        command_line.execute(main, arguments(tmp_path, tokenizer, "--role=searcher"))
    assert "--for_this_machine places all roles" in capfd.readouterr().err
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text("{}")
    with pytest.raises(SystemExit):
        command_line.execute(main, arguments(tmp_path, tokenizer))
    assert f"workdir '{tmp_path / 'run'}' holds one" in capfd.readouterr().err
