"""Recipes and the flags that change their settings: what is loaded, and the sentence on every mistake."""

from pathlib import Path

import pytest
from absl import flags

from tba_jax.commands import recipes
from tba_jax.schemas import flatten

RECIPE = """from configs import base

def get_config({parameter}):
    c = base.get_config()
    {line}
    return c
"""


@pytest.fixture
def write(tmp_path):
    def write(line: str = "c.learner.steps = 3", parameter: str = "", text: str = "") -> str:
        path = tmp_path / "mine.py"
        path.write_text(text or RECIPE.format(line=line, parameter=parameter))
        return str(path)

    return write


def load(recipe: str, *overrides: str):
    return recipes.load(recipe, overrides, program=recipes.BASE)


def refusal(recipe: str, *overrides: str) -> str:
    with pytest.raises(ValueError) as refused:
        load(recipe, *overrides)
    return str(refused.value)


def test_flags_change_settings_of_every_type(write):
    changed = ["--config.learner.queries=5", "--config.learner.beta_end=1", "--config.replay.mount=('a', 'b')"]
    changed += ["--config.task.name=gsm8k", "--config.task.missing_eos_reward=-1", "--config.evaluation.enabled=false"]
    config = load(write(), *changed, "--noconfig.replay.merge_duplicates", "--config.learner.queries=6")
    assert (config.learner.steps, config.learner.queries, config.learner.beta_end) == (3, 6, 1.0)
    assert config.replay.mount == tuple(str(Path.cwd() / name) for name in "ab")
    assert (config.task.name, config.task.missing_eos_reward) == ("gsm8k", -1.0)
    assert config.evaluation.enabled is config.replay.merge_duplicates is False
    assert config.is_locked and "config" not in flags.FLAGS


def test_paths_are_absolute_once_they_are_read(write, tmp_path, monkeypatch):
    (tmp_path / "org" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    given = {  # setting -> what is given, what is read; names on the hub stay
        "model.path": ("~/model", f"{tmp_path}/home/model"),
        "task.name": ("mine.py:Task", f"{tmp_path}/mine.py:Task"),
        "task.embedding_path": ("org/model", f"{tmp_path}/org/model"),
        "task.story_sentiment.data_path": ("stories.json", f"{tmp_path}/stories.json"),
        "task.red_team.victim_path": ("../model", f"{tmp_path.parent}/model"),
        "task.red_team.classifier_path": ("org/other", "org/other"),
        "replay.mount": ("('runs/a', 's3://bucket/run/')", (f"{tmp_path}/runs/a", "s3://bucket/run")),
    }
    recipe = write("c.task.custom.rows_path = './rows'; c.task.custom.title = './rows'")
    config = load(recipe, *(f"--config.{name}={value}" for name, (value, _) in given.items()))
    found = flatten(config.to_dict())
    assert {name: found[name] for name in given} == {name: value for name, (_, value) in given.items()}
    assert config.task.custom.to_dict() == {"rows_path": f"{tmp_path}/rows", "title": "./rows"}
    assert (config.task.gsm8k.train_path, config.task.tldr.gold_path) == ("openai/gsm8k:main", "")
    monkeypatch.chdir("/")
    assert recipes.override(config, []) == config


def test_a_recipe_may_take_a_name(write):
    recipe = write("c.learner.steps = int(name)", "name")
    assert load(f"{recipe}:7").learner.steps == 7
    assert "needs a name after a colon" in refusal(recipe)
    assert f"{recipe}:many: invalid literal for int()" in refusal(f"{recipe}:many")


def test_a_recipe_that_does_not_exist_names_the_nearest_and_all_others():
    found = recipes.listed()
    assert all(found.values()) and not {"configs/base.py", "configs/baselines.py", "configs/supervised.py"} & set(found)
    told = refusal("dem.py:x")
    assert "did you mean 'configs/demo.py'" in told and "did you mean" not in refusal("configs/zzzzzz.py")
    assert all(each.removeprefix("configs/").removesuffix(".py") in told for each in found)


@pytest.mark.parametrize("recipe", ["configs/demo.py", "demo.py", "demo:small"])
def test_a_recipe_of_the_project_is_found_from_any_folder(recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load(recipe).task.name == "arithmetic"
    (tmp_path / "demo.py").write_text(RECIPE.format(line="c.task.name = 'gsm8k'", parameter="name=''"))
    assert load(recipe).task.name == ("gsm8k" if recipe == "demo.py" else "arithmetic")  # the user's file has this very name


@pytest.mark.parametrize(
    "text, words",
    [
        ("import shared_by_recipes\n", ["line 3 of ", "shared_by_recipes.py"]),
        ("x = 1\n", ["{path} has no function get_config"]),
        ("def get_config():\n    pass\n", ["must return a ConfigDict", "NoneType"]),
        ("def get_config():\n    return 1 / 0\n", ["ZeroDivisionError: division by zero", "line 2 of {path}"]),
        ("from configs.supervised import get_config\n", ["not made from configs/base.py", "python -m tba_jax supervised"]),
        (RECIPE.format(line="c.lerner.steps = 3", parameter=""), ["'lerner' (line 5 of {path}); did you mean 'learner'"]),
    ],
    ids=lambda each: each[:30] if isinstance(each, str) else "",
)
def test_what_a_recipe_does_wrong_is_one_sentence(write, tmp_path, monkeypatch, text, words):
    (tmp_path / "shared_by_recipes.py").write_text("x = 1\n\ny = = 2\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    recipe = write(text=text)
    told = refusal(recipe)
    assert told.startswith(f"--config={recipe}") and "\n" not in told
    for word in words:
        assert word.format(path=recipe) in told


@pytest.mark.parametrize(
    "flag, words",
    [
        ("--config.completions=1", ["'completions'", "did you mean 'learner.completions'"]),
        ("--config.learner=1", ["learner is a section"]),
        ("--config.learner.steps=many", ["--config.learner.steps=many", "a whole number", "500"]),
    ],
)
def test_a_flag_that_changes_no_setting_is_one_sentence(flag, words):
    told = refusal("configs/base.py", flag)
    assert "\n" not in told and all(word in told for word in words)
    assert ("did you mean" in told) == any("did you mean" in word for word in words)


@pytest.mark.parametrize("program", recipes.PROGRAMS, ids=["base", "supervised"])
def test_every_path_is_marked(program):
    rules = program.schema.rules
    assert {name for name in rules if name.endswith("path")} <= (marked := {name for name, rule in rules.items() if rule.path})
    of_runs = {"task.name", "replay.mount", "searchers.engine_python", "searchers.engine_folder"}
    others = {"data.train", "data.heldout"} if program is recipes.SUPERVISED else of_runs
    assert {name for name in marked if not name.endswith("path")} == others
