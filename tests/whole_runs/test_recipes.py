"""The variant `small` of every recipe, from end to end: it searches, trains, publishes, evaluates and exports.

That of red-teaming is in test_recipes_red_team.
"""

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from configs import baselines, small, tldr_pythia
from tba_jax import trajectory
from tba_jax.experiment import checks, jobs
from tba_jax.storage import layout
from tests.support import frozen_runs, random_checkpoints, tiny_checkpoints, tiny_run
from tests.support.small_recipes import RECIPES, STEPS, check_run, config


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


# Recipe -> what its evaluation reports as the score.
PRETRAINED = {
    "gsm8k_rho1b:small": "accuracy",
    "gsm8k_rho1b:small-vine_ppo": "accuracy",
    "gsm8k_rho1b:small-synchronous": "accuracy",
    "gsm8k_qwen2_5_1_5b:small": "accuracy",
    "math_qwen2_5_7b:small": "accuracy",
    "tldr_pythia:small": "reward",
    "own_task:small": "mentioned",
    "story_sentiment:small": "reward",
    "distill:small": "reward",
}
# Rewards of a model; the others differ by settings, and test_privacy runs a task of a file.
BY_DEFAULT = ("tldr_pythia:small",)
# Recipes that make their own policy.
WARM_STARTED = ("countdown", "guess", "reasoning_gym", "demo", "demo_baselines", "demo_tba_prime", "demo_vine_ppo")


def variants(name: str) -> list[str]:
    """Of a recipe, made small."""
    return ["small-vine_ppo", "small-grpo"] if name == "demo_baselines" else ["small"]


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_has_a_small_variant_that_needs_nothing_else(name):
    for variant in variants(name):
        c = config(f"{name}:{variant}")
        checks.check(c, new=True)
        assert c.learner.steps == STEPS and c.model.compute_dtype == "float32" and c.warm_start.steps <= 10
        paths = [value for section in (c.model, *c.task.values()) if hasattr(section, "items") for value in _paths(section)]
        there = [path for path in paths if path.startswith(str(small.FOLDER))]
        assert all(Path(path).exists() for path in there) and bool(there) == bool(c.model.path)
    with pytest.raises(ValueError, match="smal"):
        config(f"{name}:smal")


def _paths(section) -> list[str]:
    return [value for name, value in section.items() if name.endswith("path") and value]


def runs_in_turn(recipe: str, workdir: Path) -> jobs.Invocation:
    c = config(recipe)
    c.schedule.mode = "interleaved"
    s = tiny_run.settings(workdir, c)
    assert jobs.everything(s)() == 0
    return s


@pytest.mark.parametrize(
    "recipe", [pytest.param(name, marks=[] if name in BY_DEFAULT else [pytest.mark.slow]) for name in PRETRAINED]
)
def test_a_recipe_runs_in_turn(recipe, tmp_path, one_device):
    s = runs_in_turn(recipe, tmp_path / "run")
    check_run(s.run, PRETRAINED[recipe], tmp_path / "exported", s.config.model.path)
    if recipe.startswith("tldr"):
        report = layout.read_json(s.run.evaluations / f"{layout.step_name(STEPS)}.json")
        assert 0 <= report["greedy_win_rate_strict"] <= report["greedy_win_rate_ties_half"] <= 1
        assert report["sampled_ref_perplexity_per_response_token"] == pytest.approx(np.exp(report["ref_nll_per_token"]))
        check_rewards(s)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [f"{name}:{variant}" for name in WARM_STARTED for variant in variants(name)])
def test_a_recipe_that_makes_its_policy_runs_in_turn(recipe, tmp_path, one_device):
    s = runs_in_turn(recipe, tmp_path / "run")
    assert layout.read_json(s.run.evaluations / f"{layout.step_name(STEPS)}.json")["step"] == STEPS


def test_every_small_variant_is_run():
    run = {recipe.partition(":")[0] for recipe in PRETRAINED} | set(WARM_STARTED)
    assert run | {"red_team_gpt2", "red_team_llama3_2_1b"} == set(RECIPES), "test_recipes_red_team has those two"


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


def check_rewards(s: jobs.Invocation) -> None:
    """Rewards and scores of rows against the reward model, one row at a time."""
    folder = Path(s.config.task.tldr.reward_path)
    config, params = tiny_checkpoints.load(folder)
    text = Tokenizer.from_file(str(folder / "tokenizer.json"))
    (rows,) = frozen_runs.rows(s).values()
    for i in range(len(rows["row"])):
        prompt, response = rows["tokens"][i, : rows["prompt_length"][i]].tolist(), trajectory.response(rows, i).tolist()
        end, finished = text.token_to_id(random_checkpoints.END), bool(rows["finished"][i])
        words = [token for token in response if token != end]
        # A reward model reads text: bytes that are none are replaced.
        row = np.array([text.encode(text.decode(prompt + words)).ids + [end] * finished], np.int32)
        score = float(tiny_checkpoints.scores(params, row, np.ones_like(row, bool), config)[0, 0])
        np.testing.assert_allclose(rows["reward_parts"][i], [score], atol=1e-5)
        np.testing.assert_allclose(rows["reward"][i], score if finished else -1.0, atol=1e-5)
