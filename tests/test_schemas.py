"""Schemas: what a config of the defaults allows, and what a rule refuses."""

from typing import Any

import pytest
from ml_collections.config_dict import ConfigDict, placeholder

from tba_jax.schemas import Rule, Schema, flatten, setting


def schema(**leaves: Any) -> Schema:
    sections = ConfigDict({"part": ConfigDict({"own": ConfigDict()})})
    for name, leaf in leaves.items():
        sections.part[name] = leaf
    return Schema(sections, open_section="part.own")


def test_every_config_is_a_copy_and_locked_but_for_the_open_section():
    made = schema(steps=setting(3, at_least=1), limit=setting(placeholder(float)))
    first = made.defaults()
    first.update_from_flattened_dict({"part.steps": 4, "part.limit": 2})
    first.part.own.size = 4
    assert first.part.limit == 2.0 and isinstance(first.part.limit, float)
    with pytest.raises(AttributeError, match="steps"):
        first.part.step = 4
    with pytest.raises(TypeError):
        first.part.steps = "many"
    assert made.defaults().to_dict() == {"part": {"own": {}, "steps": 3, "limit": None}}


def test_limits_are_told_in_words():
    """tests/experiment/test_checks.py has values at every limit, and beyond it."""
    rules = {
        "at least 1": dict(at_least=1),
        "above 0": dict(above=0),
        "at most 2": dict(at_most=2),
        "below 2": dict(below=2),
        "within [0, 1]": dict(at_least=0, at_most=1),
        "within (0, 1)": dict(above=0, below=1),
        "0 or above 1": dict(above=1, or_zero=True),
        "": {},
    }
    assert {Rule(**rule).limits(): rule for rule in rules.values()} == rules


def test_choices_and_texts_that_must_be_given():
    choices = setting("one", one_of=("one", "two"))
    made = schema(a=choices, b=setting("three", registry="numbers"), c=setting(("one",), one_of=("one", "two")))
    assert [made.rules[f"part.{name}"].limits() for name in "ab"] == ["one of one, two", "one of the numbers"]
    config, registries = made.defaults(), {"numbers": {"three": 3, "four": 4}}
    assert not made.refusals(config, registries)
    for names in ((), ("two",), ("one", "two")):
        config.part.c = names
        assert not made.refusals(config, registries)
    config.part.a, config.part.b, config.part.c = "2", "tree", ("one", "twoo")
    assert made.refusals(config, registries) == {
        "part.a": "part.a='2' is not one of one, two",
        "part.b": "part.b='tree' is not one of three, four (did you mean 'three'?)",
        "part.c": "part.c=('one', 'twoo') holds 'twoo', which is not one of one, two (did you mean 'two'?)",
    }
    made = schema(path=setting("", given=True), on=setting(True, below=1))  # truth is no number
    assert made.refusals(made.defaults(), {}) == {"part.path": "part.path is not given: set --config.part.path=VALUE"}
    assert flatten({"a": {"b": 1, "c": {}}, "d": (2,)}) == {"a.b": 1, "d": (2,)}
