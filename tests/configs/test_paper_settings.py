"""Recipes of the paper's rows against the numbers of the paper and its authors' code, setting by setting, and docs/recipes.md."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from configs import gsm8k_rho1b, math_qwen2_5_7b, red_team_gpt2, small
from tba_jax.experiment import checks, composition, meshes
from tba_jax.schemas import flatten
from tests.support import paper_settings

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize("recipe", paper_settings.CONFIGS)
def test_every_setting_is_that_of_the_paper_or_a_departure(recipe):
    paper, departures = paper_settings.PAPER[recipe], paper_settings.DEPARTURES[recipe]
    there = flatten(paper_settings.CONFIGS[recipe]().to_dict())
    assert not set(paper) & set(departures) and all(departure.why for departure in departures.values())
    stated = {**paper, **{name: departure.ours for name, departure in departures.items()}}
    assert {name: there[name] for name in stated} == stated


def test_recipes_of_rows_of_the_paper_are_in_the_table():
    told = {path.stem for path in (ROOT / "configs").glob("*.py") if "Departures from the authors' code" in path.read_text()}
    assert told == {recipe.partition(":")[0] for recipe in paper_settings.CONFIGS}


def test_the_page_has_the_table():
    """Else: python -m tests.support.paper_settings prints it."""
    table = "\n".join(paper_settings.table())
    assert (ROOT / "docs" / "recipes.md").read_text().endswith(table + "\n")


SYNCHRONOUS = {
    "schedule.mode": "interleaved",
    "searchers.queries_per_batch": 7,
    "searchers.samples_per_query": 20,
    "replay.recent_probability": 1.0,
    "replay.recent_window": 1,
    "replay.merge_duplicates": False,
    "replay.min_rows": 0,
    "learner.mesh.data": 4,
    "learner.micro_batch_tokens": 81_920,
}
INSTRUCT = {"model.path": "Qwen/Qwen2.5-7B-Instruct"}


@pytest.mark.parametrize(
    "recipe, variant, beside, differences",
    [
        (gsm8k_rho1b, "lr3e-6", "", {"learner.learning_rate": 3e-6}),
        (gsm8k_rho1b, "lr1e-6", "", {"learner.learning_rate": 1e-6}),
        (gsm8k_rho1b, "synchronous", "", SYNCHRONOUS),
        # Baselines merge no responses anyway.
        (gsm8k_rho1b, "synchronous-grpo", "grpo", {k: v for k, v in SYNCHRONOUS.items() if k != "replay.merge_duplicates"}),
        (math_qwen2_5_7b, "instruct", "", INSTRUCT),
        (math_qwen2_5_7b, "instruct-grpo", "grpo", INSTRUCT),
    ],
)
def test_a_variant_that_is_no_row_of_the_paper_differs_in_its_settings_alone(recipe, variant, beside, differences):
    config = recipe.get_config(variant)
    checks.check(config, new=True)
    given, before = (flatten(c.to_dict()) for c in (config, recipe.get_config(beside)))
    assert {name: value for name, value in given.items() if value != before[name]} == differences


def test_all_roles_of_the_synchronous_baseline_have_the_same_four_devices():
    """And an update has the rows of one batch: those of seven queries, twenty of each."""
    c = gsm8k_rho1b.get_config("synchronous")
    paths = ("task.gsm8k.train_path", "task.gsm8k.heldout_path")
    c.update_from_flattened_dict(
        dict.fromkeys(paths, str(small.FOLDER / "gsm8k.jsonl")) | {"model.path": str(small.FOLDER / "llama")}
    )
    experiment = composition.build(c, new=True)
    for role in meshes.roles_of(c):
        meshes.check(experiment, role=role, devices=4)
        assert meshes.shape(experiment, role=role, devices=4) == (4, 1, 1)
    assert (c.learner.queries, c.learner.completions, c.schedule.lag, c.schedule.updates_per_search) == (7, 20, 0, 1)


def test_the_attack_prompt_asks_for_a_fourth_instruction_and_fits(data_dir):
    c = red_team_gpt2.get_config()
    title, *numbered = c.task.red_team.attack_prompt.split("\n")
    assert title.endswith(":") and [line[:2] for line in numbered] == ["1.", "2.", "3.", "4."] and numbered[-1] == "4."
    tokenizer = Tokenizer.from_file(str(data_dir / "tokenizers" / "gpt2" / "tokenizer.json"))
    assert len(tokenizer.encode(c.task.red_team.attack_prompt).ids) <= c.task.prompt_length
