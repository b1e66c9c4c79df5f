"""The loop of a searcher's process: what ends it, and what it writes of itself."""

import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tba_jax.experiment import jobs
from tba_jax.roles.searcher import loop, reward_watch
from tba_jax.roles.searcher.samples import SampleTables
from tba_jax.run import processes
from tba_jax.storage import contract, grants, layout, snapshots
from tba_jax.storage.requests import RequestRate
from tba_jax.tasks.interface import Scores
from tba_jax.telemetry import alarms, metrics, status
from tba_jax.telemetry.alarms import Watch
from tba_jax.telemetry.device_peaks import Peaks
from tba_jax.telemetry.record import TimeAccount, Window
from tests.support.tiny_searcher import ROWS, Held, Q, S, committed, publish, rows_of_the_stream, run_searcher, weights


def cut_short(folder: Path) -> None:
    os.truncate(folder / "embedding.weight" / "c" / "0" / "0", 100)


def unreadable(folder: Path) -> None:
    (folder / snapshots.COMMIT).unlink()
    (folder / snapshots.COMMIT).mkdir()


@pytest.mark.parametrize("limit", [0, ROWS], ids=["searching", "waiting"])
def test_storage_that_cannot_be_read_stops_the_searcher(make, limit):
    s, made = make(searchers__max_rows_per_snapshot=limit)

    def look() -> None:
        if committed(s) and not snapshots.is_committed(s.run.policies, 1):
            publish(s, 1, unreadable)

    with pytest.raises(OSError, match=r"00000001/commit\.json"):
        run_searcher(s, made, look)
    assert rows_of_the_stream(s, made, committed(s) // S)["policy_step"].max() == 0


@pytest.mark.parametrize(("step", "traced"), [(3, 1), (4, 0)])
def test_a_searcher_that_starts_after_the_window_of_a_profile_traces_nothing(make, step, traced):
    """One that dies often would fill the disk with traces."""
    s, made = make()
    publish(s, step)

    def look() -> None:
        if committed(s) >= 2 * ROWS:
            layout.write_json(s.run.finished, {"step": s.config.learner.steps})

    run_searcher(s, made, look, profile=Window(3, 2))
    assert len([*s.run.profiles("tested").rglob("*.xplane.pb")]) == traced


def test_a_damaged_snapshot_is_told_once_and_the_next_one_is_taken(make, caplog):
    """Published behind a whole one: the searcher goes on with that, waits when its rows are asked, and says for what."""
    s, made = make(searchers__max_rows_per_snapshot=2 * ROWS)
    told = set()

    def look() -> None:
        waits = status.read(s.run.metrics("tested")).waits
        if committed(s) and not snapshots.is_committed(s.run.policies, 1):
            publish(s, 1, cut_short)
        elif waits and not snapshots.is_committed(s.run.policies, 2):
            told.add(waits)
            if "damaged" in waits:
                time.sleep(0.1)  # many polls long
                publish(s, 2)
        elif committed(s) >= 4 * ROWS:
            layout.write_json(s.run.finished, {"step": s.config.learner.steps})

    run_searcher(s, made, look)
    assert set(rows_of_the_stream(s, made, committed(s) // S)["policy_step"].max(axis=1)) == {0, 2}
    (damaged,) = [record.message for record in caplog.records if "00000001" in record.message]
    assert "step 1 is damaged" in damaged and "embedding.weight" in damaged and f"remove {s.run.policies}/00000001" in damaged
    assert any(each.startswith("a snapshot newer than step 0") and damaged in each for each in told)


def test_a_searcher_whose_only_snapshot_is_damaged_waits_until_it_is_published_again(make):
    s, made = make(searchers__max_rows_per_snapshot=ROWS)
    (s.run.policies / "00000000" / snapshots.COMMIT).write_bytes(b"")
    told = set()

    def look() -> None:
        waits = status.read(s.run.metrics("tested")).waits
        if "is damaged" in waits and not committed(s):
            told.add(waits)
            snapshots.save(s.run.policies / "00000000", weights(s, 0), snapshots.SnapshotInfo(0, 2), dtype="float32")
        elif committed(s) >= ROWS:
            layout.write_json(s.run.finished, {"step": s.config.learner.steps})

    run_searcher(s, made, look)
    (waits,) = told
    assert waits.startswith("the first snapshot; the snapshot of step 0 is damaged") and "is not valid JSON" in waits
    assert committed(s) == ROWS and rows_of_the_stream(s, made, Q)["policy_step"].max() == 0


def test_a_search_that_fails_ends_the_refresher(make):
    s, made = make()
    publish(s, 1, scale=np.nan)
    with pytest.raises(FloatingPointError, match=r"policy step 1 are not finite at response token 0 of query [0-9a-f]{16} "):
        run_searcher(s, made, lambda: None)
    assert committed(s) == 0


def test_a_searcher_takes_up_snapshots_until_the_run_is_finished(make):
    s, made = make(searchers__max_rows_per_snapshot=2 * ROWS)

    def look() -> None:
        """The next snapshot is published when all rows of the one before are there, and the end of the run after three."""
        step = committed(s) // (2 * ROWS)
        if step == 3:
            layout.write_json(s.run.finished, {"step": s.config.learner.steps})
        elif not snapshots.is_committed(s.run.policies, step):
            publish(s, step)

    run_searcher(s, made, look)
    rows = rows_of_the_stream(s, made, 6 * Q)
    assert rows["policy_step"].max(axis=1).tolist() == [step for step in range(3) for _ in range(2 * ROWS)]
    tokens = rows["response_length"].reshape(6, ROWS).sum(axis=1).tolist()
    lines = metrics.read_lines(s.run.metrics("tested"))
    # The first batch, which holds the compilation, is not measured.
    assert [(line["step"], line["policy_step"]) for line in lines] == [(2, 0), (3, 1), (4, 1), (5, 2), (6, 2)]
    assert [(line["rows"], line["tokens"]) for line in lines] == [(ROWS, count) for count in tokens[1:]]


@pytest.mark.parametrize("mine", [3, 1000])
def test_the_run_says_when_it_is_finished(make, mine):
    """It is extended while the searcher works, whose own learner.steps counts for nothing."""
    s, made = make(searchers__max_rows_per_snapshot=0, learner__steps=mine)
    stored, looks = contract.read(s.run), []
    steps = stored["config"]["learner"]["steps"]

    def write(steps: int) -> None:
        layout.write_json(s.run.config, stored | {"config": stored["config"] | {"learner": {"steps": steps}}})

    def look() -> None:
        looks.append(committed(s))
        if len(looks) == 1:
            write(steps + 5)
            layout.write_json(s.run.finished, {"step": steps})
        elif committed(s) >= 3 * ROWS:
            write(steps)

    begin = time.monotonic()
    run_searcher(s, made, look)
    assert time.monotonic() - begin < 50 and committed(s) >= 3 * ROWS, "it ends by the file, and not before"


def test_a_task_that_fails_stops_the_searcher(make):
    def fails(scores: Scores) -> Scores:
        raise KeyError("the task's own mistake")

    s, made = make(task=lambda task: Held(task, lambda scores: scores, fails), searchers__reward_batches=2)
    with pytest.raises(KeyError, match="own mistake"):
        run_searcher(s, made, lambda: None)
    assert committed(s) == ROWS
    rows_of_the_stream(s, made, Q)


def test_a_reward_that_hangs_keeps_nobody_from_the_end(make):
    """A searcher does not wait for missing rewards once its run has finished or its storage is broken."""
    for broken in (False, True):
        hanging = threading.Event()

        def hangs(scores: Scores, hanging: threading.Event = hanging) -> Scores:
            hanging.wait()
            return scores

        changes = dict(searchers__reward_batches=2, searchers__stop_seconds=0.5)
        s, made = make(str(broken), task=lambda task: Held(task, lambda scores: scores, hangs), **changes)

        def look(s: jobs.Invocation = s, broken: bool = broken) -> None:
            if committed(s) == ROWS and not s.run.finished.exists() and not snapshots.is_committed(s.run.policies, 1):
                if broken:
                    publish(s, 1, unreadable)
                else:
                    layout.write_json(s.run.finished, {"step": s.config.learner.steps})

        begin = time.monotonic()
        if broken:
            with pytest.raises(OSError, match="00000001"):
                run_searcher(s, made, look)
        else:
            run_searcher(s, made, look)
        assert time.monotonic() - begin < 30 and committed(s) == ROWS
        hanging.set()
        time.sleep(0.2)
        assert committed(s) == ROWS, "nothing is appended after the end"


def no_reward(scores: Scores) -> Scores:
    return Scores(np.full_like(scores.reward, np.nan), scores.parts, "KeyError: 'x'")


def test_a_searcher_without_rewards_says_so_writes_little_and_gives_up(make, monkeypatch):
    monkeypatch.setattr(reward_watch, "FIRST_PAUSE", 0.2)
    s, made = make(task=lambda task: Held(task, *[no_reward] * 1000), searchers__give_up_seconds=1.0)
    with pytest.raises(processes.NoRewards, match=r"no row has a reward: (\d+) of \1 failed, KeyError: 'x'"):
        run_searcher(s, made, lambda: None)
    assert committed(s) <= 8 * ROWS
    assert "KeyError: 'x'" in status.read(s.run.metrics("tested")).trouble


def test_a_searcher_goes_on_once_there_are_rewards_again(make, monkeypatch):
    monkeypatch.setattr(reward_watch, "FIRST_PAUSE", 0.05)
    s, made = make(task=lambda task: Held(task, *[no_reward] * 5))

    def look() -> None:
        if committed(s) >= 9 * ROWS:
            layout.write_json(s.run.finished, {"step": s.config.learner.steps})

    run_searcher(s, made, look)
    assert committed(s) >= 9 * ROWS
    assert status.read(s.run.metrics("tested")).trouble.startswith("some rows have no reward")


def test_a_grant_lets_a_searcher_go_on_that_waits(make):
    """A grant gives a searcher its quota a second time for the same snapshot, and only once the first quota is used up."""
    s, made = make(searchers__max_rows_per_snapshot=ROWS)
    grants.give(s.run, step=0)
    told = []

    def look() -> None:
        waits = status.read(s.run.metrics("tested")).waits
        if waits and committed(s) < 3 * ROWS:
            told.append(waits)
            grants.give(s.run, step=0)  # again and again, as a trainer does: the first may come before all rows are there
        elif committed(s) == 3 * ROWS:
            layout.write_json(s.run.finished, {"step": s.config.learner.steps})

    run_searcher(s, made, look)
    assert committed(s) == 3 * ROWS
    assert rows_of_the_stream(s, made, 3 * Q)["policy_step"].max() == 0
    assert told[0].startswith(f"a snapshot newer than step 0: the rows of searchers.max_rows_per_snapshot={ROWS} are asked")


def test_rates_are_those_of_appends(make):
    """Reports that are read together, since the first of them was late, tell the same as if they were not."""
    late, writer = threading.Event(), MetricLines()
    s, made = make(task=lambda task: Held(task, lambda scores: (late.wait(60), scores)[1]), searchers__reward_batches=4)
    made.refresh()
    for _ in range(3):
        made.advance()
    late.set()
    reports = made.appended(wait_seconds=None)
    tables, watch = SampleTables(writer, s.config), Watch(s.run.metrics("tested"), s.config, role="searcher")
    peaks = Peaks(flops=1e12, bandwidth=1e10)
    loop.Rates(writer, TimeAccount(), RequestRate([]), tables, watch, peaks).write(reports)
    for line, report in zip(writer.lines, reports[1:], strict=True):
        done = report.work - reports[0].work
        assert 0 < done.tokens <= done.computed and done.flops > 0 and done.bytes > 0
        assert line["mfu"] == pytest.approx(done.flops / (report.time - reports[0].time) / 1e12)
        assert line["bandwidth_share"] == pytest.approx(done.bytes / (report.time - reports[0].time) / 1e10)
        elapsed = report.time - reports[0].time
        assert elapsed > 0 and line["rows_per_second"] == pytest.approx((reports.index(report)) * ROWS / elapsed)
    made.close()


def test_rewards_that_fail_now_and_then_are_an_alarm(make):
    def broken(scores: Scores) -> Scores:
        return Scores(np.where(np.arange(ROWS) < 3, np.nan, scores.reward), scores.parts, "a timeout")

    s, made = make(searchers__max_rows_per_snapshot=0, task=lambda task: Held(task, *[broken] * 10))
    publish(s, 1)

    def look() -> None:
        if committed(s) >= 9 * ROWS and not s.run.finished.exists():
            layout.write_json(s.run.finished, {"step": s.config.learner.steps})

    run_searcher(s, made, look)
    (alarm,) = alarms.read(s.run.metrics("tested"))
    assert alarm.kind == "rewards_fail" and "24 of the 96 responses" in alarm.sentence and alarm.step == 8


class MetricLines:
    shows_tables = False

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def write(self, step: int, scalars: dict[str, Any]) -> None:
        self.lines.append({"step": step, **scalars})
