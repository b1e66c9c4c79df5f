"""Searchers whose rows are of no use say so."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from configs import story_sentiment
from tba_jax.models import parameters
from tba_jax.roles.searcher import alarm_rules
from tba_jax.run import layout, snapshots
from tba_jax.tasks.interface import Scores
from tba_jax.telemetry import alarms
from tests.support import tiny_run
from tests.support.tiny_searcher import ROWS, Held, committed, publish, run_searcher, weights


def told(finished: float, unscored: int = 0, **settings: Any) -> list[str]:
    """The kinds of alarm of batches of 100 responses, of which this share ends by itself."""
    return told_under(tiny_run.config(**settings), finished, unscored)


def told_under(c: Any, finished: float, unscored: int = 0) -> list[str]:
    points = [{"rows": 100, "finished_rows": round(100 * finished), "unscored": unscored}] * alarm_rules.BATCHES
    assert all(rule(points[1:], c) is None for rule in alarm_rules.RULES.values())  # too few to judge
    return [kind for kind, rule in alarm_rules.RULES.items() if rule(points, c) is not None]


def test_responses_that_end_and_have_rewards_are_no_alarm():
    assert told(1.0) == told(0.05) == [] == told(0.5, task__missing_eos_reward=-1.0)
    assert told(1.0, unscored=2) == []


def test_what_is_meant_to_be_cut_is_no_alarm():
    assert told(0.0) == ["never_ends"]
    assert told(0.0, task__min_response_length=6) == []  # as long as the limit: no response may end
    assert told(0.0, task__force_eos=True) == []
    assert told_under(story_sentiment.get_config(), 0.0) == []  # continuations of stories, which are longer


@pytest.fixture
def make_endless(make) -> Callable[..., Any]:
    """A searcher with a snapshot 1 whose policy hardly ever ends a response; snapshot 0 is not used."""

    def made(**changes: Any) -> Any:
        s, searcher = make(searchers__max_rows_per_snapshot=0, **changes)
        flat = parameters.flatten(jax.tree.map(lambda leaf: 30.0 * np.asarray(leaf), weights(s, 1)))
        (name,) = [name for name in flat if name.endswith("embedding.weight")]
        flat[name][s.experiment.tokenizer.eos_id] = 0.0  # logit 0 where others are far above it
        draft = s.run.root / "draft"
        snapshots.save(draft, parameters.unflatten(flat), snapshots.SnapshotInfo(step=1, epoch=1), dtype="float32")
        draft.rename(s.run.policies / layout.step_name(1))
        return s, searcher

    return made


def search(s: Any, made: Any, batches: int = alarm_rules.BATCHES + 1) -> dict[str, alarms.Alarm]:
    def look() -> None:
        if committed(s) >= batches * ROWS and not s.run.finished.exists():
            layout.write_json(s.run.finished, {"step": s.config.learner.steps})

    run_searcher(s, made, look)
    return {alarm.kind: alarm for alarm in alarms.read(s.run.metrics("tested"))}


@pytest.mark.parametrize("reward", [None, -1.0])
def test_responses_that_never_end_are_named(make_endless, reward):
    s, made = make_endless(task__missing_eos_reward=reward)
    found = search(s, made)
    (kind,) = found
    if reward is None:
        assert kind == "never_ends" and "none of the 96 responses" in found[kind].sentence
    else:
        assert kind == "missing_eos_reward" and "all of these get task.missing_eos_reward=-1" in found[kind].sentence
    assert "task.response_length=12" in found[kind].sentence and found[kind].step == alarm_rules.BATCHES


def test_rewards_that_fail_now_and_then_are_named(make):
    def broken(scores: Scores) -> Scores:
        return Scores(np.where(np.arange(ROWS) < 3, np.nan, scores.reward), scores.parts, "a timeout")

    s, made = make(searchers__max_rows_per_snapshot=0, task=lambda task: Held(task, *[broken] * 10))
    publish(s, 1)
    found = search(s, made)
    assert found.keys() == {"rewards_fail"} and "24 of the 96 responses" in found["rewards_fail"].sentence
