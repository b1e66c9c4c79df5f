"""Alarms: what the rules find, what is told, and what they look at of a trainer."""

import json
import logging
import re
import types
from typing import Any
from unittest import mock

import numpy as np
import pytest

from configs import story_sentiment
from tba_jax.roles.trainer.loop import Circumstances
from tba_jax.storage import layout
from tba_jax.telemetry import alarms
from tba_jax.telemetry.alarms import RULES
from tests.support import tiny_run

EXAMPLE = dict(kind="equal_rewards", sentence="all rewards are 0", advice="easier queries")
HEALTHY = {
    "trainer": dict(
        **dict(equal_reward_groups=0.4, reward=0.5, reward_low=0.0, reward_high=1.0, distinct_rows_per_group=4.0, grad_norm=4.0),
        **dict(newest_row_lag=6, skipped_steps=0, disk_free=2.0**30, checkpoint_bytes=2.0**20, logprob_gap_limit=0.1),
        **dict(logprob_gap_alarm=0.0, logprob_gap_max=0.01),
    ),
    "searcher": dict(rows=100, finished_rows=90, unscored=0, turns=300, turn_errors=20),
    "evaluator": dict(rows=100, unscored=2),
}


def points(role: str = "trainer", count: int = 20, **changes: float) -> list[dict[str, float]]:
    return [{**HEALTHY[role], "step": 5 * i, **changes} for i in range(1, count + 1)]


def found(role: str, measured: list[dict[str, float]], c: Any = None, **settings: Any) -> dict[str, str]:
    """Kind -> sentence of what these points give, the last one being the newest."""
    c = c or tiny_run.config(**{"learner__steps": 1000, **settings})
    told = {kind: alarms.found(rule, measured, c) for kind, rule in RULES.items() if rule.role == role}
    return {kind: sentence for kind, sentence in told.items() if sentence}


# Kind, measurements that are just no alarm and just one, settings, and words of the sentence. A row for each rule at least.
SAME = dict(equal_reward_groups=1.0, reward=-1.0, reward_low=-1.0, reward_high=-1.0)
CASES: list[tuple[str, dict[str, float], dict[str, float], dict[str, Any], str]] = [
    ("equal_rewards", dict(equal_reward_groups=0.7, reward=0.25), dict(equal_reward_groups=0.8, reward=0.25), {}, "80% of the"),
    ("equal_rewards", dict(equal_reward_groups=0.96, reward=0.95), dict(equal_reward_groups=0.97, reward=0.5), {}, "from 0 to 1"),
    ("equal_rewards", {}, SAME, {}, "4 of the K rows of a group are distinct"),
    ("solved", dict(equal_reward_groups=0.98, reward=1.0), dict(equal_reward_groups=1.0, reward=1.0), {}, "at step 100 of 1000"),
    ("gradient_clipped", dict(grad_norm=29.0), dict(grad_norm=31.0), {"learner__clip_norm": 1.0}, "learner.clip_norm=1;"),
    ("logprob_gap", {}, dict(logprob_gap_alarm=1.0, logprob_gap_max=float("nan")), {}, "disagree by nan nats on a token"),
    ("searchers_behind", dict(newest_row_lag=64), dict(newest_row_lag=65), {"publish__every_steps": 2}, "at least 65 steps ago"),
    ("searchers_behind", dict(newest_row_lag=160), dict(newest_row_lag=161), {"publish__every_steps": 20}, "every 20 steps"),
    ("searchers_behind", dict(newest_row_lag=164), dict(newest_row_lag=165), {"searchers__lag": 100}, "at least 165 steps ago"),
    ("disk", dict(disk_free=2.0**20), dict(disk_free=2.0**19), {}, "0.00 GiB left"),
    ("missing_eos_reward", dict(finished_rows=6), dict(finished_rows=5), {"task__missing_eos_reward": -1.0}, "eos_reward=-1"),
    ("never_ends", dict(finished_rows=1), dict(finished_rows=0), {}, "0 of the 800 responses"),
    ("rewards_fail", dict(unscored=5), dict(unscored=6), {}, "48 of the 800 responses"),
    ("turns_unread", dict(turn_errors=150), dict(turn_errors=151), {}, "1,208 of the 2,400 turns"),
    ("evaluation_fails", dict(unscored=5), dict(unscored=6), {}, "6 of the 100 held-out responses"),
]


@pytest.mark.parametrize(("kind", "well", "wrong", "settings", "words"), CASES)
def test_a_rule_finds_what_is_beyond_its_limit_and_nothing_else(kind, well, wrong, settings, words):
    role = RULES[kind].role
    assert found(role, points(role, **well), **settings) == {}
    told = found(role, points(role, **wrong), **settings)
    assert told.keys() == {kind} and words in told[kind] and not re.search(r"[{}]|\.$", told[kind])
    if RULES[kind].points > 1:  # one unlucky point is no alarm
        assert found(role, [*points(role, 19), *points(role, 1, **wrong)], **settings) == {}
        assert kind not in found(role, points(role, RULES[kind].points - 1, **wrong), **settings)


def test_updates_that_are_left_out_are_an_alarm_and_every_rule_has_a_case():
    skipped = [dict(point, skipped_steps=max(0, n - 17)) for n, point in enumerate(points())]
    assert found("trainer", skipped) == {}
    skipped[-1]["skipped_steps"] = 3
    assert "3 updates since 8 measured batches" in found("trainer", skipped)["updates_refused"]
    assert {kind for kind, *_ in CASES} | {"updates_refused"} == RULES.keys()


def test_what_is_meant_or_not_measured_is_no_alarm():
    assert found("trainer", [{"step": 1, "reward": 0.5}] * 20) == {}  # one completion a query, and nothing else is known
    solved = dict(equal_reward_groups=1.0, reward=1.0)
    assert found("trainer", points(**solved), learner__steps=110) == {}, "the run is nearly over"
    assert found("trainer", points(grad_norm=1e9), learner__clip_norm=0.0) == {}
    assert found("trainer", points(newest_row_lag=999), searchers__count=0) == {}
    for cut in (dict(task__min_response_length=6), dict(task__force_eos=True)):
        assert found("searcher", points("searcher", finished_rows=0), **cut) == {}
    assert found("searcher", points("searcher", finished_rows=0), story_sentiment.get_config()) == {}


OTHERS = ["[]", "{}", "null", json.dumps({**EXAMPLE, "time": "x", "step": 1}), "\x00", '{"time": 1.0, "kind": "di']


def test_a_kind_is_told_once_a_run_also_beside_torn_lines_and_read_as_it_was_told(tmp_path, caplog):
    folder = tmp_path / "metrics" / "trainer"
    told, file = alarms.Alarms(folder), folder / "alarms.jsonl"
    for step in (40, 80):
        told.tell(**EXAMPLE, step=step)
    file.write_text(file.read_text() + "\n".join(OTHERS))
    restarted = alarms.Alarms(folder)
    for kind in ("equal_rewards", "disk"):
        restarted.tell(**EXAMPLE | {"kind": kind}, step=120)
    first, second = alarms.read(folder)
    assert {"kind": first.kind, "sentence": first.sentence, "advice": first.advice} == EXAMPLE and first.time > 1e9
    assert (first.step, second.kind, second.step) == (40, "disk", 120)
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2
    assert "all rewards are 0" in caplog.messages[0] and "easier queries" in caplog.messages[0]


@pytest.mark.parametrize(
    ("rewards", "arrivals", "extent"),
    [([1.0, 1.0], 2, (1.0, 1.0)), ([0.0, 1.0], 9, (0.0, 1.0)), ([1.0, 1.0], 9, (None, None))],
)
def test_one_reward_of_all_resident_rows_says_nothing_where_others_were_evicted(tmp_path, rewards, arrivals, extent):
    """A resumed trainer knows nothing of rows that are gone: the one reward may be the best or the worst."""
    index = mock.MagicMock(arrival=np.arange(2), reward=np.array(rewards), row_step=np.full(2, 8), arrivals=arrivals)
    index.__len__.return_value = 2
    trainer = types.SimpleNamespace(
        **dict(index=index, step_number=80, run=layout.RunDir(tmp_path), config=tiny_run.config()),
        buffer=types.SimpleNamespace(has_own_rows=lambda: True),
        program=types.SimpleNamespace(trees=lambda: {"w": np.zeros(4, np.float32)}),
    )
    found = Circumstances(trainer)()
    assert (found.get("reward_low"), found.get("reward_high")) == extent
    assert found["newest_row_lag"] == 72 and found["checkpoint_bytes"] == 16 and found["disk_free"] > 0
