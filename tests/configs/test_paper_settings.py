"""Recipes of the paper's rows against the numbers of the paper and its authors' code, which docs/recipes.md lists."""

import re
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from configs import gsm8k_rho1b, red_team_gpt2, small
from tba_jax.experiment import composition, meshes
from tba_jax.schemas import flatten
from tests.support import small_recipes

ROOT = Path(__file__).parent.parent.parent
_, EQUAL, DIFFERENT = re.split(r"^## (?:Equal|Different)$", (ROOT / "docs" / "recipes.md").read_text(), flags=re.MULTILINE)


def cells(table: str) -> list[list[str]]:
    """The rows of a table of the page, the first one without the line below it."""
    rows = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in table.splitlines() if line.startswith("|")]
    return [rows[0], *rows[2:]]


def shown(value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(f"`{item}`" for item in value)
    return f"{value:.4g}" if isinstance(value, float) else f"{value:,}" if type(value) is int else str(value)


def test_recipes_have_the_settings_of_the_page():
    """What the paper and its authors' code set, and what recipes set in its place, stands in docs/recipes.md alone."""
    (_, *recipes), *equal = cells(EQUAL)
    configs = {recipe: flatten(small_recipes.config(recipe).to_dict()) for recipe in recipes}
    rows = [(recipe, *row) for together, *row in cells(DIFFERENT)[1:] for recipe in together.split(", ")]
    different = {(recipe, name.strip("`")): (ours, why) for recipe, name, _, ours, why in rows}
    for (recipe, name), (ours, why) in different.items():
        assert shown(configs[recipe][name]) == ours and why, (recipe, name)
    for name, *stated in equal:
        for recipe, value in zip(recipes, stated, strict=True):
            own = (recipe, name.strip("`"))
            assert (own in different) == (value == "differs") or not value, own
            assert value in ("", "differs") or shown(configs[recipe][own[1]]) == value, own
    told = {path.stem for path in (ROOT / "configs").glob("*.py") if "Departures from the authors' code" in path.read_text()}
    assert told == {recipe.partition(":")[0] for recipe in recipes}


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
