"""What a searcher tells of its batches; and of rows that get no reward: what is said, when it pauses, and when it gives up."""

import dataclasses
import types

import jax
import pytest

from tba_jax import sharding
from tba_jax.roles.searcher.report import RewardWatch, SearchRecord, SearchReport
from tba_jax.roles.work import Work
from tba_jax.run.processes import NoRewards
from tba_jax.storage.layout import RunDir
from tba_jax.telemetry import alarms, metrics
from tba_jax.telemetry.status import Status
from tests.support import tiny_run

SCORED = SearchReport(
    time=0.0, rows=64, tokens=1, reward=0.5, unscored=0, finished=1.0, policy_step=0, slot_idle=0.0, seconds=1.0, value_tokens=0,
    useful_token_share=1.0, failure="",
)  # fmt: skip
FAILED = dataclasses.replace(SCORED, unscored=64, reward=float("nan"), failure="KeyError: 'x'")


@pytest.fixture
def clock() -> types.SimpleNamespace:
    return types.SimpleNamespace(now=0.0)


@pytest.fixture
def watch(clock) -> RewardWatch:
    return RewardWatch(give_up_seconds=100.0, clock=lambda: clock.now)


def test_the_share_and_the_first_reason_are_said(watch):
    assert watch.trouble == ""
    for _ in range(2):
        watch.note(FAILED)
    assert watch.trouble == "no row has a reward: 128 of 128 failed, KeyError: 'x'"
    for _ in range(24):
        watch.note(FAILED)
    pauses = "; the searcher pauses, and tries a batch now and then"
    assert watch.trouble == f"no row has a reward: 1,664 of 1,664 failed, KeyError: 'x'{pauses}"
    watch.note(dataclasses.replace(SCORED, unscored=1, failure="ValueError"))
    assert watch.trouble == "some rows have no reward: 1,665 of 1,728 failed, KeyError: 'x'"
    watch.note(FAILED)
    assert watch.trouble == "the last rows have no reward: 1,729 of 1,792 failed, KeyError: 'x'"


def test_after_three_useless_batches_one_is_tried_now_and_then(watch, clock):
    for pause in (0, 0, 5, 10, 20, 40, 60, 60):
        watch.note(FAILED)
        if not pause:
            assert watch.may_search
            continue
        clock.now += pause - 0.1
        assert not watch.may_search
        clock.now += 0.1
        assert watch.may_search
    watch.note(SCORED)
    watch.note(FAILED)
    assert watch.may_search, "grading works again, so one batch without reward does not stop the search"


def test_a_searcher_without_rewards_gives_up(watch, clock):
    for _ in range(4):
        watch.note(FAILED)
        watch.look(waiting=0)
        clock.now += 25
    watch.look(waiting=2)
    assert not watch.may_search, "batches that wait are tries themselves"
    watch.look(waiting=0)
    clock.now += 1
    with pytest.raises(NoRewards, match=r"256 of 256 failed, KeyError: 'x'; .* searchers.give_up_seconds=100"):
        watch.look(waiting=0)


def test_rewards_that_hang_are_said_and_given_up_and_slow_ones_are_waited_for(watch, clock):
    for _ in range(9):
        watch.look(waiting=3)
        clock.now += 60
        watch.note(SCORED)
        watch.look(waiting=3)
    assert watch.trouble == ""
    clock.now += 30
    watch.look(waiting=3)
    assert watch.trouble == "3 batches have waited 30 s for their rewards"
    clock.now += 71
    with pytest.raises(NoRewards, match="3 batches have waited 101 s"):
        watch.look(waiting=3)


def test_grades_that_arrive_one_by_one_are_life(watch, clock):
    """One batch takes longer than the searcher's patience, and each of its grades does not."""
    for grades in range(9):
        watch.look(waiting=1, grades=grades)
        clock.now += 60
    with pytest.raises(NoRewards, match=r"1 batches have waited 120 s .* none came within searchers.give_up_seconds=100; raise"):
        clock.now += 60
        watch.look(waiting=1, grades=8)


@pytest.fixture
def record(tmp_path) -> SearchRecord:
    config = tiny_run.config(metrics__peak_flops=1e3, metrics__peak_bandwidth=1e2)
    mesh = sharding.make_mesh((1, 1, 1), setting="test", devices=jax.local_devices()[:1])
    return SearchRecord(config, RunDir(tmp_path), "tested", status=Status(None), mesh=mesh)


def test_rates_are_those_of_appends_since_they_began(record, tmp_path):
    """The first batch holds the compilation. Batches that are told late are counted by the time of their append."""
    for number in (1, 2, 3):
        done = Work(tokens=10 * number, computed=20 * number, flops=400 * number, bytes=50 * number)
        changes = types.SimpleNamespace(time=100.0 + 4 * number, tokens=10 * number, value_tokens=6, unscored=number - 1)
        report = dataclasses.replace(SCORED, work=done, **vars(changes))
        assert record.note(report) == number
        if number == 1:
            record.begin(report.time)
        else:
            record.write(number, report, {"more": 0.5})
    record.close()
    second, third = metrics.read_lines(RunDir(tmp_path).metrics("tested"))
    assert (second["step"], third["step"], third["more"], third["unscored"]) == (2, 3, 0.5, 3)
    rates = ("rows_per_second", "tokens_per_second", "computed_tokens_per_second", "value_tokens_per_second")
    assert [second[name] for name in rates] == [16.0, 5.0, 5.0, 1.5] and [third[name] for name in rates] == [16.0, 6.25, 5.0, 1.5]
    assert (third["mfu"], third["bandwidth_share"]) == (0.1, 0.125)


def test_rewards_that_fail_now_and_then_are_an_alarm(record, tmp_path):
    for _ in range(8):
        record.note(dataclasses.replace(SCORED, rows=12, unscored=3, failure="a timeout"))
    (alarm,) = alarms.read(RunDir(tmp_path).metrics("tested"))
    assert alarm.kind == "rewards_fail" and "24 of the 96 responses" in alarm.sentence and alarm.step == 8
