"""What a run is: its settings against defaults and recipe, its processes, its state."""

import math

from tba_jax.experiment.schema import SCHEMA
from tba_jax.reporting import about
from tba_jax.run.contract import plain


def config(**changes):
    made = SCHEMA.defaults()
    made.update_from_flattened_dict({name.replace("__", "."): value for name, value in changes.items()})
    return plain(made.to_dict())


def test_only_settings_that_differ_are_listed():
    assert about.settings(config(), None) == []
    (found,) = about.settings(config(learner__steps=7), None)
    assert (found.name, found.value, found.default) == ("learner.steps", "7", str(SCHEMA.defaults().learner.steps))


def test_a_recipe_is_a_third_column():
    recipe = config(learner__steps=7, learner__queries=3)
    found = {each.name: each for each in about.settings(config(learner__steps=7, learner__queries=4), recipe)}
    assert found["learner.steps"].recipe == "7" and found["learner.queries"].recipe == "3"
    assert about.settings(config(), recipe) != []


def test_secrets_are_not_shown():
    stored = config()
    stored["task"]["custom"] = {"api_key": "abc", "url": "https://me:def@host"}
    shown = {each.name: each.value for each in about.settings(stored, None)}
    assert shown["task.custom.api_key"] == "(not told)" and shown["task.custom.url"] == "https://(not told)@host"
    assert dict(about.contract({"task": {"api_key": "abc"}})) == {"task.api_key": "(not told)"}


def test_settings_that_this_version_does_not_know_are_shown():
    stored = config()
    stored["learner"]["forgotten"] = [1, 2]
    (found,) = about.settings(stored, None)
    assert (found.name, found.value, found.default) == ("learner.forgotten", "[1, 2]", "(there is none)")


def test_the_newest_start_of_each_role_counts():
    starts = [
        {"role": "trainer", "time": t, "host": f"h{t}", "devices": "cpu", "code": {"version": "1", "commit": ""}} for t in (1, 2)
    ]
    (found,) = about.processes(starts, {"w0": {"host": "other"}})
    assert (found.role, found.host, found.started, found.starts, found.code) == ("trainer", "h2", 2.0, 2, "version 1")


def test_without_events_the_writers_tell_of_their_processes():
    (found,) = about.processes([], {"w0": {"host": "here", "started": "x"}})
    assert (found.role, found.host, found.code) == ("w0", "here", "") and math.isnan(found.started)


def test_versions_that_changed_show_both():
    starts = [{"versions": {"jax": "1"}}, {"versions": {"jax": "2", "flax": "3"}}, {"versions": "odd"}, {}]
    assert about.versions(starts) == {"flax": "3", "jax": "1 → 2"}


def test_a_run_is_finished_stopped_at_work_or_silent():
    def state(finished, newest, ended=False):
        return about.state(step=5, steps=10, finished=finished, ended=ended, newest=newest, now=10_000.0)

    assert state(True, 0.0).startswith("Finished") and "5 of 10" in state(True, 0.0)
    assert state(False, 9_990.0).startswith("At work") and "silent for 83 min" in state(False, 5_000.0)
    assert "has written anything" in state(False, 0.0)
    assert state(False, 9_990.0, ended=True) == "Stopped: step 5 of 10."
