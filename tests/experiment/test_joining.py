"""Joining a run with mistakes that were found before."""

import dataclasses

import pytest

from tba_jax.experiment import joining
from tests.support import tiny_run


def test_after_a_mistake_no_device_is_asked_for_and_no_weights_are_fetched(tmp_path, monkeypatch):
    fetched, asked = [], []
    monkeypatch.setattr(joining.initial_policy, "check", lambda *_, fetch, **__: fetched.append(fetch))
    s = tiny_run.settings(tmp_path / "run", tiny_run.config())
    wrong = dataclasses.replace(s, mistakes=joining.Mistakes())
    wrong.mistakes.require(False, "a mesh is wrong")
    with pytest.raises(ValueError, match="a mesh is wrong"):
        joining.join(wrong, may_change_schedule=False, check=lambda: asked.append("devices"))
    assert fetched == [False] and not asked and not (tmp_path / "run" / "config.json").exists()
    joining.join(s, may_change_schedule=False, check=lambda: asked.append("devices"))
    assert fetched == [False, True] and asked
