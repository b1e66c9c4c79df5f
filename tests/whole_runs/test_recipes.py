"""Recipes of pretrained models, from end to end with tiny random ones: they search, train, publish, evaluate and export."""

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from configs import baselines, countdown_qwen2_5, gsm8k_rho1b, math_qwen2_5_7b, own_task, tldr_pythia
from tba_jax import trajectory
from tba_jax.experiment import checks, jobs
from tba_jax.replay.reader import LogReader
from tba_jax.run import contract, layout, processes
from tests.support import random_checkpoints, tiny_checkpoints, tiny_run
from tests.support.small_recipes import P_END, PRETRAINED, SMALL, STEPS, check_run, problems


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def stories(folder: Path) -> dict[str, str]:
    for name in ("train", "heldout"):
        rows = [{"opening": f"Once upon a {name} {i}", "words": "a e"} for i in range(8)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {f"task.custom.{name}_path": str(folder / f"{name}.jsonl") for name in ("train", "heldout")}


def posts(folder: Path) -> dict[str, str]:
    """TL;DR's rows; and reward models with the policy's tokenizer, random ones."""
    rows = [{"subreddit": "cats", "title": f"Cat {i}", "post": "It sleeps.\n" * 3, "summary": f"Sleeps {i}h."} for i in range(8)]
    paths = {}
    for name in ("train", "heldout"):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        paths[f"task.tldr.{name}_path"] = str(folder / f"{name}.jsonl")
    for seed, name in enumerate(("reward", "gold"), start=1):
        tokenizer = folder / "model-tokenizer"
        made = random_checkpoints.write(folder / name, "pythia-410m", tokenizer, labels=1, seed=seed)
        paths[f"task.tldr.{name}_path"] = str(made)
    return paths


def gsm8k(folder: Path, data: Path) -> dict[str, str]:
    """The shortest of its real rows: prompts of about one length are prefilled by one program."""
    for name in ("train", "test"):
        lines = (data / "gsm8k" / f"{name}.jsonl").read_text().splitlines(keepends=True)
        (folder / f"{name}.jsonl").write_text("".join(sorted(lines, key=len)[:16]))
    return {"task.gsm8k.train_path": str(folder / "train.jsonl"), "task.gsm8k.heldout_path": str(folder / "test.jsonl")}


# Behind a colon: the variant.
CASES = {
    "gsm8k": (gsm8k_rho1b, "llama-3.2-1b", "pythia", "accuracy"),
    "gsm8k:vine_ppo": (gsm8k_rho1b, "llama-3.2-1b", "gpt2", "accuracy"),
    "math": (math_qwen2_5_7b, "qwen2.5-7b", "qwen2.5", "accuracy"),
    "countdown": (countdown_qwen2_5, "qwen2.5-0.5b", "gpt2", "accuracy"),
    "tldr": (tldr_pythia, "pythia-410m", "pythia", "reward"),
    "own task": (own_task, "pythia-410m", "pythia", "mentioned"),
}


def test_every_recipe_of_a_pretrained_model_runs_here():
    here = {Path(module.__file__).name for module, *_ in CASES.values()}
    assert here | {"red_team_gpt2.py", "red_team_llama3_2_1b.py"} == set(PRETRAINED), "test_recipes_red_team has those two"


# Answers that are graded, rewards of a model, a task in a file; the others differ from these by settings.
BY_DEFAULT = ("gsm8k", "tldr", "own task")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in BY_DEFAULT else [pytest.mark.slow]) for name in CASES])
def test_a_recipe_runs_in_turn(name, tmp_path, data_dir, one_device):
    recipe, preset, tokenizer, score_name = CASES[name]
    kind, *variant = name.split(":")
    c = recipe.get_config(*variant)
    ends = dict(p_end=P_END, temperature=c.sampling.temperature)
    model = random_checkpoints.write(tmp_path / "model", preset, data_dir / "tokenizers" / tokenizer, **ends)
    c.update_from_flattened_dict(SMALL | {"model.path": str(model), "schedule.mode": "interleaved"})
    c.learner.micro_batch_tokens = 4 * (c.task.prompt_length + c.task.response_length)
    if c.learner.reference.kind == "reset":
        c.learner.reference.reset_steps = 1  # so that it happens
    inputs = {"gsm8k": functools.partial(gsm8k, data=data_dir), "math": problems, "tldr": posts, "own task": stories}
    c.update_from_flattened_dict(inputs.get(kind, lambda _: {})(tmp_path))
    s = tiny_run.settings(tmp_path / "run", c)
    assert jobs.everything(s)() == 0
    check_run(s.run, score_name, tmp_path / "exported", str(model))
    if name == "tldr":
        report = layout.read_json(s.run.evaluations / f"{layout.step_name(STEPS)}.json")
        assert 0 <= report["greedy_win_rate"] <= 1
        assert report["ref_perplexity"] == pytest.approx(np.exp(report["ref_nll_per_token"]))


@pytest.mark.slow
def test_a_recipe_runs_with_real_processes(tmp_path, data_dir):
    ends = dict(p_end=P_END, temperature=gsm8k_rho1b.get_config().sampling.temperature)
    model = random_checkpoints.write(tmp_path / "model", "llama-3.2-1b", data_dir / "tokenizers/pythia", **ends)
    settings = SMALL | gsm8k(tmp_path, data_dir) | {"model.path": str(model), "supervisor.max_restarts": 0}
    flags = [f"--config.{name}={value}" for name, value in settings.items()]
    done = tiny_run.call(
        tiny_run.command(tmp_path / "run", *flags, recipe="configs/gsm8k_rho1b.py:700_steps", tiny=False), timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    check_run(layout.RunDir(tmp_path / "run"), "accuracy", tmp_path / "exported", str(model))
    shutil.rmtree(tmp_path / "run")


def summaries(folder: Path) -> tuple[dict[str, Any], Path]:
    """Settings of the smallest TL;DR recipe with tiny models of its task, and their tokenizer."""
    tokenizer = random_checkpoints.byte_tokenizer(folder / "model-tokenizer")
    for seed, (name, labels) in enumerate([("policy", 0), ("reward", 1), ("gold", 1)]):
        ends = {} if labels else dict(p_end=P_END, temperature=tldr_pythia.get_config().sampling.temperature)
        random_checkpoints.write(folder / name, "pythia-410m", tokenizer, labels=labels, seed=seed, **ends)
    rows = [{"query": f"POST: Cat {i}\n\nTL;DR:", "summary": f"Cat {i}."} for i in range(8)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = SMALL | {f"task.tldr.{name}_path": str(folder / "rows.jsonl") for name in ("train", "heldout")}
    settings |= {f"task.tldr.{name}_path": str(folder / name) for name in ("reward", "gold")}
    return settings | {"model.path": str(folder / "policy"), "task.tldr.compute_dtype": "float32"}, tokenizer


def check_summaries(run: layout.RunDir, folder: Path, tokenizer: Path) -> None:
    for step in (0, STEPS):
        report = layout.read_json(run.evaluations / f"{layout.step_name(step)}.json")
        assert 0 <= report["greedy_win_rate"] <= 1 and report["unscored"] == 0
    check_rewards(run, folder / "reward", tokenizer)


@pytest.mark.slow
def test_models_of_a_task_are_loaded_by_the_processes_that_score(tmp_path):
    """A searcher and an evaluator; rows have the rewards that a loop over them finds again."""
    settings, tokenizer = summaries(tmp_path)
    flags = [f"--config.{name}={value}" for name, value in (settings | {"supervisor.max_restarts": 0}).items()]
    recipe = "configs/tldr_pythia.py:410m-rloo"
    done = tiny_run.call(tiny_run.command(tmp_path / "run", *flags, recipe=recipe, tiny=False), timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    check_summaries(layout.RunDir(tmp_path / "run"), tmp_path, tokenizer)
    (tmp_path / "reward").rename(tmp_path / "elsewhere")
    for role, code in (("trainer", 0), ("searcher", processes.BAD_INPUT)):
        arguments = tiny_run.command(tmp_path / "run", *flags, f"--role={role}", recipe=recipe, tiny=False)
        done = tiny_run.call(arguments, timeout=300)
        assert done.returncode == code, done.stdout + done.stderr
    assert "task.tldr.reward_path=" in done.stderr and "does not exist" in done.stderr


@pytest.mark.parametrize("size", ["410m", "1b", "2.8b"])
def test_summaries_have_a_recipe_for_every_size_and_baseline(size):
    for variant in (size, f"{size}-16-rloo", *(f"{size}-{name}" for name in baselines.BASELINES)):
        c = tldr_pythia.get_config(variant)
        checks.check(c)
        checks.check(c, new=True)
        assert f"pythia{size}-" in c.model.path and f"pythia{size}-" in c.task.tldr.reward_path
    longer = tldr_pythia.get_config(f"{size}-825")
    assert (longer.learner.steps, longer.learner.beta_steps) == (825, 103)
    for wrong, words in [("12b", "no size '12b'"), (f"{size}-rlo", r"no baseline 'rlo' \(did you mean 'rloo'\?\)")]:
        with pytest.raises(ValueError, match=words):
            tldr_pythia.get_config(wrong)


def check_rewards(run: layout.RunDir, folder: Path, tokenizer: Path) -> None:
    """Rewards and scores of rows against the reward model, one row at a time."""
    config, params = tiny_checkpoints.load(folder)
    shape = contract.Contract(**contract.read(run)["contract"]).row_shape()
    reader = LogReader(run.replay, shape)
    ((writer, head),) = reader.heads().items()
    rows = reader.read(writer, 0, head)
    text = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    for i in range(head):
        prompt, response = rows["tokens"][i, : rows["prompt_length"][i]].tolist(), trajectory.response(rows, i).tolist()
        end, finished = text.token_to_id(random_checkpoints.END), bool(rows["finished"][i])
        words = [token for token in response if token != end]
        # A reward model reads text: bytes that are none are replaced.
        read = text.encode(text.decode(prompt + words)).ids + [end] * finished
        row = np.array([read], np.int32)
        score = float(tiny_checkpoints.scores(params, row, np.ones_like(row, bool), config)[0, 0])
        np.testing.assert_allclose(rows["reward_parts"][i], [score], atol=1e-5)
        np.testing.assert_allclose(rows["reward"][i], score if finished else -1.0, atol=1e-5)
