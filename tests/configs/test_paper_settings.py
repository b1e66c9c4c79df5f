"""Recipes of the paper's rows against the numbers of the paper and its authors' code, setting by setting, and docs/recipes.md."""

import importlib
from pathlib import Path

import pytest

from tests.support import paper_settings

ROOT = Path(__file__).parent.parent.parent
recipes = pytest.mark.parametrize("recipe", paper_settings.CONFIGS)


@recipes
def test_every_setting_that_decides_is_that_of_the_paper_or_a_departure_or_pinned(recipe):
    """A default that changes moves no recipe, and a new setting needs a line of the table."""
    paper, departures, unstated = paper_settings.stated(recipe)
    there = paper_settings.deciding(paper_settings.CONFIGS[recipe]())
    assert not set(paper) & set(departures) and {*paper, *departures} <= set(there)
    for name, value in there.items():
        known = {name: departure.ours for name, departure in departures.items()} | dict(paper) | dict(unstated)
        assert name in known, f"{name}: neither stated by the paper, nor a departure, nor pinned"
        assert value == known[name], name


@recipes
def test_a_departure_is_a_line_of_the_docstring(recipe):
    """None is unexplained: a reason here, and the setting's name in the docstring, or in that of the recipe it begins with."""
    name = recipe.partition(":")[0]
    told = importlib.import_module(f"configs.{name}").__doc__
    if "those of configs/red_team_gpt2.py" in told:
        told += importlib.import_module("configs.red_team_gpt2").__doc__
    _, listed = told.split("Departures from the authors' code", 1)
    for setting, departure in paper_settings.DEPARTURES[recipe].items():
        assert departure.why and f"{setting}: " in listed, setting
        assert departure.theirs != departure.ours or setting == "learner.row_divisor"


def test_recipes_of_rows_of_the_paper_are_in_the_table():
    told = {path.stem for path in (ROOT / "configs").glob("*.py") if "Departures from the authors' code" in path.read_text()}
    assert told == {recipe.partition(":")[0] for recipe in paper_settings.CONFIGS}


def test_the_page_has_the_table():
    """Else: python -m tests.support.paper_settings prints it."""
    table = "\n".join(paper_settings.table())
    assert (ROOT / "docs" / "recipes.md").read_text().endswith(table + "\n")
