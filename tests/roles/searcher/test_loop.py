"""The loop of a searcher's process: what ends it, what it tells of its batches, and what becomes of rows without a reward."""

import contextlib
import dataclasses
import os
import threading
import time
import types

import jax
import numpy as np
import pytest

from tba_jax import sharding
from tba_jax.experiment import jobs
from tba_jax.roles.searcher import loop
from tba_jax.roles.searcher.appender import SearchReport
from tba_jax.roles.searcher.loop import RewardWatch, SearchRecord
from tba_jax.roles.work import Work
from tba_jax.run.processes import NoRewards
from tba_jax.storage import contract, layout, published
from tba_jax.storage.layout import RunDir
from tba_jax.tasks.interface import Scores
from tba_jax.telemetry import alarms, metrics, status
from tests.support import tiny_run
from tests.support.tiny_searcher import ROWS, Held, Q, S, committed, publish, rows_of_the_stream, run_searcher


def break_pointer(s: jobs.Invocation) -> None:
    """Storage refuses to read the newest version."""
    (s.run.root / "policy" / published.POINTER / "000009-0000000001").mkdir()


def finish(s: jobs.Invocation) -> None:
    layout.write_json(s.run.finished, {"step": contract.steps_of(s.run)})


def waits(s: jobs.Invocation) -> str:
    return status.read(s.run.metrics("tested")).waits


def test_a_searcher_takes_up_snapshots_until_the_run_is_finished(quick, caplog):
    caplog.set_level("INFO", logger="tba_jax")
    s, made = quick(searchers__max_updates_ahead=1, learner__steps=1)
    told = set()

    def look() -> None:
        """After each two batches the trainer has room for two more once the searcher has the next snapshot, and ends the run
        after three."""
        step = committed(s) // (2 * ROWS)
        if step == 3:
            finish(s)
        elif step not in published.kept(s.run.policies):
            publish(s, step)
        elif made.sampler.step == step:
            layout.write_json(s.run.demand, {"share": 2 * ROWS, "heads": {made.writer: 2 * ROWS * step}})
        told.add(waits(s))

    layout.write_json(s.run.demand, {"share": 2 * ROWS, "heads": {made.writer: 0}})
    run_searcher(s, made, look)
    assert told == {"", "the trainer, which has the rows of searchers.max_updates_ahead=1 updates before it, or soon will"}
    assert [record.message for record in caplog.records if "waits for the trainer" in record.message] == [
        "waits for the trainer, which has the rows of searchers.max_updates_ahead=1 updates before it, or soon will"
    ]
    rows = rows_of_the_stream(s, made, 6 * Q)
    assert rows["policy_step"].max(axis=1).tolist() == [step for step in range(3) for _ in range(2 * ROWS)]
    tokens = rows["response_length"].reshape(6, ROWS).sum(axis=1).tolist()
    lines = metrics.read_lines(s.run.metrics("tested"))
    # The first batch, which holds the compilation, is not measured.
    assert [(line["step"], line["policy_step"]) for line in lines] == [(2, 0), (3, 1), (4, 1), (5, 2), (6, 2)]
    assert [(line["rows"], line["tokens"]) for line in lines] == [(ROWS, count) for count in tokens[1:]]


def test_a_damaged_snapshot_is_told_once_and_the_next_one_is_taken(quick, caplog):
    """Published behind a whole one: the searcher goes on with that, and names it where it waits for the trainer."""
    s, made = quick(searchers__max_updates_ahead=1)
    layout.write_json(s.run.demand, {"share": 2 * ROWS, "heads": {made.writer: 0}})
    told = set()

    def look() -> None:
        if committed(s) and 1 not in published.kept(s.run.policies):
            publish(s, 1, lambda folder: os.truncate(folder / "embedding.weight" / "c" / "0" / "0", 100))
        elif (sentence := waits(s)) and 2 not in published.kept(s.run.policies):
            told.add(sentence)
            if "damaged" in sentence:
                time.sleep(0.05)  # many polls long
                publish(s, 2)
        elif made.sampler.step == 2 and committed(s) < 4 * ROWS:
            layout.write_json(s.run.demand, {"share": 2 * ROWS, "heads": {made.writer: 2 * ROWS}})
        elif committed(s) >= 4 * ROWS:
            finish(s)

    run_searcher(s, made, look)
    assert set(rows_of_the_stream(s, made, committed(s) // S)["policy_step"].max(axis=1)) == {0, 2}
    (damaged,) = {each.message for each in caplog.records if "00000001" in each.message and "waits" not in each.message}
    assert "step 1 is damaged" in damaged and "embedding.weight" in damaged and f"{s.run.policies}/00000001-" in damaged
    assert any(each.startswith("the trainer, which has") and damaged in each for each in told)


def test_weights_and_tasks_that_fail_stop_the_searcher_and_its_refresher(quick):
    s, made = quick("weights")
    publish(s, 1, scale=np.nan)
    with pytest.raises(FloatingPointError, match="are not finite"):
        run_searcher(s, made, lambda: None)
    assert committed(s) == 0

    def fails(scores: Scores) -> Scores:
        raise KeyError("the task's own mistake")

    s, made = quick("task", task=lambda task: Held(task, lambda scores: scores, fails), searchers__reward_batches=2)
    with pytest.raises(KeyError, match="own mistake"):
        run_searcher(s, made, lambda: None)
    rows_of_the_stream(s, made, Q)


@pytest.mark.parametrize("broken", [False, True], ids=["finished", "broken storage"])
def test_a_reward_that_hangs_keeps_nobody_from_the_end(quick, broken, monkeypatch):
    monkeypatch.setattr("tba_jax.roles.searcher.appender.LOOK_SECONDS", 0.1)
    hanging = threading.Event()
    held = dict(task=lambda task: Held(task, lambda scores: scores, lambda scores: (hanging.wait(), scores)[1]))
    s, made = quick(**held, searchers__reward_batches=2, searchers__stop_seconds=0.1)

    def look() -> None:
        if committed(s) == ROWS and not ended:
            ended.append(break_pointer(s) if broken else finish(s))

    begin, ended = time.monotonic(), []
    with pytest.raises(OSError, match="000009-0000000001") if broken else contextlib.nullcontext():
        run_searcher(s, made, look)
    assert time.monotonic() - begin < 30 and committed(s) == ROWS
    hanging.set()
    time.sleep(0.05)
    assert committed(s) == ROWS, "nothing is appended after the end"


def no_reward(scores: Scores) -> Scores:
    return Scores(np.full_like(scores.reward, np.nan), scores.parts, "KeyError: 'x'")


@pytest.mark.parametrize("failures", [5, 1000])
def test_a_searcher_without_rewards_says_so_writes_little_and_gives_up_or_goes_on(quick, monkeypatch, failures):
    monkeypatch.setattr(loop, "FIRST_PAUSE", 0.05)
    patience = 0.3 if failures == 1000 else 60.0
    own = dict(searchers__give_up_seconds=patience, searchers__reward_batches=2)  # 32 would be under way on a slow machine
    s, made = quick(task=lambda task: Held(task, *[no_reward] * failures), **own)
    gives_up = pytest.raises(NoRewards, match=r"no row has a reward: (\d+) of \1 failed, KeyError: 'x'")
    with gives_up if failures == 1000 else contextlib.nullcontext():
        run_searcher(s, made, lambda: finish(s) if committed(s) >= 9 * ROWS else None)
    trouble = status.read(s.run.metrics("tested")).trouble
    if failures == 1000:
        assert committed(s) <= 8 * ROWS and "KeyError: 'x'" in trouble
    else:
        assert committed(s) >= 9 * ROWS and trouble.startswith("some rows have no reward")


SCORED = SearchReport(
    time=0.0, rows=64, tokens=1, reward=0.5, unscored=0, finished=1.0, policy_step=0, slot_idle=0.0, value_tokens=0,
    useful_token_share=1.0, failure="",
)  # fmt: skip
FAILED = dataclasses.replace(SCORED, unscored=64, reward=float("nan"), failure="KeyError: 'x'")


@pytest.fixture
def clock() -> types.SimpleNamespace:
    return types.SimpleNamespace(now=0.0)


@pytest.fixture
def watch(clock) -> RewardWatch:
    return RewardWatch(give_up_seconds=100.0, clock=lambda: clock.now)


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


def test_rewards_that_hang_are_said_and_given_up_and_slow_ones_are_waited_for(watch, clock):
    for grades in range(9):  # one batch takes longer than the searcher's patience, and each of its grades does not
        watch.look(waiting=3, grades=grades)
        clock.now += 60
    for _ in range(9):
        watch.note(SCORED)
        watch.look(waiting=3, grades=8)
        clock.now += 30
    assert watch.trouble == "3 batches have waited 30 s for their rewards"
    clock.now += 71
    with pytest.raises(NoRewards, match=r"3 batches have waited 101 s .* none came within searchers.give_up_seconds=100; raise"):
        watch.look(waiting=3, grades=8)


def test_rates_are_those_of_appends_since_they_began_and_failures_are_an_alarm(tmp_path):
    """The first batch holds the compilation. Batches that are told late are counted by the time of their append."""
    config = tiny_run.config(metrics__peak_flops=1e3, metrics__peak_bandwidth=1e2, metrics__sinks=())
    mesh = sharding.make_mesh((1, 1, 1), setting="test", devices=jax.local_devices()[:1])
    record = SearchRecord(config, RunDir(tmp_path), "tested", status=status.Status(None), mesh=mesh)
    for number in (1, 2, 3):
        done = Work(tokens=10 * number, computed=20 * number, flops=400 * number, bytes=50 * number)
        changes = dict(time=100.0 + 4 * number, tokens=10 * number, value_tokens=6, unscored=number - 1)
        report = dataclasses.replace(SCORED, work=done, **changes)
        assert record.note(report) == number
        if number == 1:
            record.begin(report.time)
        else:
            record.write(number, report, {"more": 0.5})
    for _ in range(5):  # eight batches with those before
        record.note(dataclasses.replace(SCORED, rows=12, unscored=6, failure="a timeout"))
    record.close()
    second, third = metrics.read_lines(RunDir(tmp_path).metrics("tested"))
    assert (second["step"], third["step"], third["more"], third["unscored"]) == (2, 3, 0.5, 3)
    rates = ("rows_per_second", "tokens_per_second", "computed_tokens_per_second", "value_tokens_per_second")
    assert [second[name] for name in rates] == [16.0, 5.0, 5.0, 1.5] and [third[name] for name in rates] == [16.0, 6.25, 5.0, 1.5]
    assert (third["mfu"], third["bandwidth_share"]) == (0.1, 0.125)
    (alarm,) = alarms.read(RunDir(tmp_path).metrics("tested"))
    assert alarm.kind == "rewards_fail" and "33 of the 252 responses" in alarm.sentence and alarm.step == 8
