"""What --help tells of settings and recipes."""

import pytest

from tba_jax.commands.settings_help import BASE, SUPERVISED, recipes


@pytest.mark.parametrize("program", [BASE, SUPERVISED], ids=["base", "supervised"])
def test_every_setting_is_told(program):
    told = "".join(program.describe(section) for section in program.sections())
    missing = [name for name in program.schema.rules if f"\n{name} = " not in told and ".mesh." not in name]
    assert not missing and "\nevaluation.mesh = " in BASE.describe("evaluation.mesh.data")


def test_a_section_is_told_with_its_comments():
    told = BASE.describe("learner.reference").splitlines()
    assert "learner.reference.reset_steps = setting(50, at_least=1)  # ρ" in told
    kind = next(i for i, line in enumerate(told) if line.startswith("learner.reference.kind = "))
    assert told[kind - 1].startswith("# ") and "reset_steps" in " ".join(told[:kind])
    assert not any(line.startswith("learner.steps") for line in told)


@pytest.mark.parametrize("asked, near", [("lerner", "learner"), ("learner.stepz", "learner.steps"), ("task.gsm", "task.gsm8k")])
def test_an_unknown_section_names_the_nearest(asked, near):
    with pytest.raises(ValueError, match=f"--help={asked}: .*did you mean '{near}'"):
        BASE.describe(asked)


def test_recipes_are_told_by_their_first_lines():
    found = recipes()
    assert found["configs/demo.py"].startswith("The embedded demo")
    assert all(found.values()) and not {"configs/base.py", "configs/baselines.py", "configs/supervised.py"} & set(found)
