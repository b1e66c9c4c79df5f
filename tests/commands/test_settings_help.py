"""What --help tells of settings, read from the schemas as text."""

import ast

import pytest

from configs import base, supervised
from tba_jax.commands.settings_help import BASE, SUPERVISED, recipes
from tba_jax.schemas import flatten


@pytest.mark.parametrize("program, config", [(BASE, base), (SUPERVISED, supervised)], ids=["base", "supervised"])
def test_every_setting_is_told_with_its_default(program, config):
    leaves = flatten(config.get_config().to_dict())
    told = {entry.name: entry.default for entry in entries(program.schema) if entry.default}
    assert set(told) == set(leaves)
    for name in told.keys() - {"task.missing_eos_reward", "sampling.explore_temperature_factor"}:  # no literals
        assert ast.literal_eval(told[name]) == leaves[name], name


def test_a_section_is_told_with_its_comments():
    told = BASE.describe("learner.reference").splitlines()
    assert "learner.reference.reset_steps = 50  [at_least=1]  # ρ" in told
    kind = next(i for i, line in enumerate(told) if line.startswith("learner.reference.kind = 'initial'"))
    assert "'ema'" in told[kind]
    assert told[kind - 1].startswith("# ") and "reset_steps" in " ".join(told[:kind])
    assert not any(line.startswith("learner.steps") for line in told)


def test_one_setting_is_told():
    (line,) = (line for line in BASE.describe("replay.capacity").splitlines() if line.startswith("replay"))
    assert line.startswith("replay.capacity = 50000  [at_least=1")
    assert "learner.mesh.data = -1" in BASE.describe("learner.mesh")


@pytest.mark.parametrize("asked, near", [("lerner", "learner"), ("learner.stepz", "learner.steps"), ("task.gsm", "task.gsm8k")])
def test_an_unknown_section_names_the_nearest(asked, near):
    with pytest.raises(ValueError, match=f"--help={asked}: .*did you mean '{near}'"):
        BASE.describe(asked)


def test_recipes_are_told_by_their_first_lines():
    found = recipes()
    assert found["configs/demo.py"].startswith("The embedded demo")
    assert all(found.values()) and not {"configs/base.py", "configs/baselines.py", "configs/supervised.py"} & set(found)
