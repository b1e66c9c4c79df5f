"""The loop of a searcher's process: what ends it, and what it writes of itself."""

import contextlib
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from tba_jax.experiment import jobs
from tba_jax.roles.searcher import report
from tba_jax.run import processes
from tba_jax.storage import layout, snapshots
from tba_jax.tasks.interface import Scores
from tba_jax.telemetry import metrics, status
from tests.support.tiny_searcher import ROWS, Held, Q, S, committed, publish, rows_of_the_stream, run_searcher


def cut_short(folder: Path) -> None:
    os.truncate(folder / "embedding.weight" / "c" / "0" / "0", 100)


def unreadable(folder: Path) -> None:
    (folder / snapshots.COMMIT).unlink()
    (folder / snapshots.COMMIT).mkdir()


def finish(s: jobs.Invocation) -> None:
    layout.write_json(s.run.finished, {"step": s.config.learner.steps})


def waits(s: jobs.Invocation) -> str:
    return status.read(s.run.metrics("tested")).waits


def test_storage_that_cannot_be_read_stops_a_searcher_that_waits(quick):
    s, made = quick(searchers__max_rows_per_snapshot=ROWS)

    def look() -> None:
        if committed(s) and not snapshots.is_committed(s.run.policies, 1):
            publish(s, 1, unreadable)

    with pytest.raises(OSError, match=r"00000001/commit\.json"):
        run_searcher(s, made, look)
    assert rows_of_the_stream(s, made, committed(s) // S)["policy_step"].max() == 0


def test_a_damaged_snapshot_is_told_once_and_the_next_one_is_taken(quick, caplog):
    """Published behind a whole one: the searcher goes on with that, waits when its rows are asked, and says for what."""
    s, made = quick(searchers__max_rows_per_snapshot=2 * ROWS)
    told = set()

    def look() -> None:
        if committed(s) and not snapshots.is_committed(s.run.policies, 1):
            publish(s, 1, cut_short)
        elif (sentence := waits(s)) and not snapshots.is_committed(s.run.policies, 2):
            told.add(sentence)
            if "damaged" in sentence:
                time.sleep(0.05)  # many polls long
                publish(s, 2)
        elif committed(s) >= 4 * ROWS:
            finish(s)

    run_searcher(s, made, look)
    assert set(rows_of_the_stream(s, made, committed(s) // S)["policy_step"].max(axis=1)) == {0, 2}
    (damaged,) = [record.message for record in caplog.records if "00000001" in record.message]
    assert "step 1 is damaged" in damaged and "embedding.weight" in damaged and f"remove {s.run.policies}/00000001" in damaged
    assert any(each.startswith("a snapshot newer than step 0") and damaged in each for each in told)


def test_a_search_that_fails_ends_the_refresher(quick):
    s, made = quick()
    publish(s, 1, scale=np.nan)
    with pytest.raises(FloatingPointError, match="are not finite"):
        run_searcher(s, made, lambda: None)
    assert committed(s) == 0


def test_a_searcher_takes_up_snapshots_until_the_run_is_finished(quick):
    s, made = quick(searchers__max_rows_per_snapshot=2 * ROWS)

    def look() -> None:
        """The next snapshot is published when all rows of the one before are there, and the end of the run after three."""
        step = committed(s) // (2 * ROWS)
        if step == 3:
            finish(s)
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


def test_the_run_says_when_it_is_finished(quick):
    """Its own learner.steps counts for nothing: it ends by the file, and not before."""
    s, made = quick(searchers__max_rows_per_snapshot=0, learner__steps=3)
    run_searcher(s, made, lambda: finish(s) if committed(s) >= 3 * ROWS else None)
    assert committed(s) >= 3 * ROWS


def test_a_task_that_fails_stops_the_searcher(quick):
    def fails(scores: Scores) -> Scores:
        raise KeyError("the task's own mistake")

    s, made = quick(task=lambda task: Held(task, lambda scores: scores, fails), searchers__reward_batches=2)
    with pytest.raises(KeyError, match="own mistake"):
        run_searcher(s, made, lambda: None)
    assert committed(s) == ROWS
    rows_of_the_stream(s, made, Q)


@pytest.mark.parametrize("broken", [False, True], ids=["finished", "broken storage"])
def test_a_reward_that_hangs_keeps_nobody_from_the_end(quick, broken):
    hanging = threading.Event()
    held = dict(task=lambda task: Held(task, lambda scores: scores, lambda scores: (hanging.wait(), scores)[1]))
    s, made = quick(**held, searchers__reward_batches=2, searchers__stop_seconds=0.1)

    def look() -> None:
        if committed(s) == ROWS and not s.run.finished.exists() and not snapshots.is_committed(s.run.policies, 1):
            publish(s, 1, unreadable) if broken else finish(s)

    begin = time.monotonic()
    with pytest.raises(OSError, match="00000001") if broken else contextlib.nullcontext():
        run_searcher(s, made, look)
    assert time.monotonic() - begin < 30 and committed(s) == ROWS
    hanging.set()
    time.sleep(0.1)
    assert committed(s) == ROWS, "nothing is appended after the end"


def no_reward(scores: Scores) -> Scores:
    return Scores(np.full_like(scores.reward, np.nan), scores.parts, "KeyError: 'x'")


def test_a_searcher_without_rewards_says_so_writes_little_and_gives_up(quick, monkeypatch):
    monkeypatch.setattr(report, "FIRST_PAUSE", 0.05)
    s, made = quick(task=lambda task: Held(task, *[no_reward] * 1000), searchers__give_up_seconds=0.3)
    with pytest.raises(processes.NoRewards, match=r"no row has a reward: (\d+) of \1 failed, KeyError: 'x'"):
        run_searcher(s, made, lambda: None)
    assert committed(s) <= 8 * ROWS
    assert "KeyError: 'x'" in status.read(s.run.metrics("tested")).trouble


def test_a_searcher_goes_on_once_there_are_rewards_again(quick, monkeypatch):
    monkeypatch.setattr(report, "FIRST_PAUSE", 0.05)
    s, made = quick(task=lambda task: Held(task, *[no_reward] * 5))
    run_searcher(s, made, lambda: finish(s) if committed(s) >= 9 * ROWS else None)
    assert committed(s) >= 9 * ROWS
    assert status.read(s.run.metrics("tested")).trouble.startswith("some rows have no reward")


def test_a_grant_lets_a_searcher_go_on_that_waits(quick):
    """A grant gives a searcher its quota a second time for the same snapshot, and only once the first quota is used up."""
    s, made = quick(searchers__max_rows_per_snapshot=ROWS)
    layout.give_grant(s.run, step=0)
    told = []

    def look() -> None:
        if (sentence := waits(s)) and committed(s) < 3 * ROWS:
            told.append(sentence)
            layout.give_grant(s.run, step=0)  # again and again, as a trainer does: the first may come before all rows are there
        elif committed(s) == 3 * ROWS:
            finish(s)

    run_searcher(s, made, look)
    assert committed(s) == 3 * ROWS and rows_of_the_stream(s, made, 3 * Q)["policy_step"].max() == 0
    assert told[0].startswith(f"a snapshot newer than step 0: the rows of searchers.max_rows_per_snapshot={ROWS} are asked")
