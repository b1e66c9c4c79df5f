"""The replay buffer: the counts beside snapshots, and appends of the log that no checkpoint needs."""

import shutil
from types import SimpleNamespace

import numpy as np
import pytest

from tba_jax.commands import audit
from tba_jax.experiment import jobs
from tba_jax.replay import success_counts
from tba_jax.replay.index import ReplayIndex
from tba_jax.replay.log import Append, LogWriter, registration
from tba_jax.replay.reader import LogReader
from tba_jax.roles.trainer.buffer import Need, Retention
from tba_jax.storage import layout, published, snapshots
from tests.support import frozen_runs, tiny_run
from tests.support.tiny_log import SHAPE, make_rows, objects, writer

pytestmark = pytest.mark.usefixtures("one_device_throughout")
POSTERIOR = {"searchers__prompt_selection": "posterior", "replay__success_decay": 0.5}
POSTERIOR |= {"replay__merge_duplicates": False, "task__missing_eos_reward": 0.0}


def by_hand(s) -> dict[int, tuple[float, float]]:
    """Query -> discounted successes and trials of the rows in the log with rewards within [0, 1], S consecutive rows a visit."""
    S, found = s.config.searchers.samples_per_query, dict[int, tuple[float, float]]()
    for _, rows in sorted(frozen_runs.rows(s).items()):
        for begin in range(0, len(rows["row"]), S):
            rewards = rows["reward"][begin : begin + S].astype(float)
            counted = rewards[(rewards >= 0) & (rewards <= 1)]
            successes, trials = found.get(query := int(rows["query_id"][begin]), (0.0, 0.0))
            found[query] = successes / 2 + float(counted.sum()), trials / 2 + len(counted)
    return {query: counts for query, counts in found.items() if counts[1]}


def beside(s, step: int) -> dict[int, tuple[float, float]]:
    counts = success_counts.read(published.kept(s.run.policies)[step])
    columns = (column.tolist() for column in (counts.query_id, counts.successes, counts.trials))
    return {query: (successes, trials) for query, successes, trials in zip(*columns, strict=True)}


def append_rewards(s, writer: str, rewards: tuple[float, ...]) -> None:
    """Four rows each of a query of the log, and of two others, with these rewards."""
    for number in range(3):
        changes = {"query_id": (..., number)} if number else {}
        frozen_runs.append_changed(s, f"{writer}-{number}", reward=(..., np.roll(rewards, number)), **changes)


def test_counts_lie_beside_every_snapshot_and_a_resume_comes_to_the_same(tmp_path, frozen, caplog):
    """Rows come between steps, some of rewards that are no success rate: they are trained on, told, and not counted."""
    s = frozen(tmp_path / "run", batches=2, **POSTERIOR)
    append_rewards(s, "later", (1.0, 0.0, 0.0, 0.5))
    assert beside(s, 0) == {}
    frozen_runs.train(s, until=3, abandon=True)
    expected = by_hand(s)
    assert beside(s, 2) == expected and len(expected) >= 3
    append_rewards(s, "more", (0.0, 1.0, 7.5, 1.0))
    frozen_runs.train(s, until=6, abandon=True)  # with a checkpoint of step 5
    there = {step: beside(s, step) for step in (2, 4, 6)}
    assert there[2] == expected and there[4] != there[2] and there[4] == there[6] == by_hand(s)
    shutil.rmtree(s.run.policies)
    shutil.rmtree(s.run.checkpoints)
    with frozen_runs.trainer(s) as again:  # from the log and the whole journal
        again.flush_snapshot()
        assert {step: beside(s, step) for step in there} == there
        for _ in range(2):
            again.report_problems()
    assert caplog.text.count("has the reward ") == 1


@pytest.mark.parametrize(
    ("first", "stop", "needed"), [(0, 4, True), (4, 8, False), (8, 12, True), (12, 16, False), (16, 24, True)]
)
def test_an_append_is_needed_for_its_resident_rows_and_beyond_the_head(first, stop, needed):
    need = Need(20, np.array([0, 9, 11]))
    assert need.needs(Append("a", first, stop, "20260101T0000")) == needed


def test_what_no_checkpoint_needs_is_removed_and_accounted_for(tmp_path):
    """An append of 16 rows a step, and a window of 24 rows; a checkpoint every step, of which two are kept."""
    changes = dict(schedule__mode="interleaved", evaluation__enabled=False, task__missing_eos_reward=-1.0)
    changes |= dict(replay__capacity=24, replay__retention="checkpoints", checkpoint__every_steps=1)
    c = tiny_run.config(**changes, learner__steps=6, learner__logprob_gap_every_steps=0)
    s = tiny_run.settings(tmp_path / "run", c)
    run = s.run
    assert jobs.everything(s)() == 0
    reader = audit.open_run(run.root).reader
    (writer,) = reader.heads()
    gone = sorted(set(range(6)) - {append.first // 16 for append in reader.appends(writer)})
    assert gone and max(gone) < 4
    account = audit.accounts(audit.open_run(run.root))[writer]
    told = layout.read_json(run.finished)
    assert account.balances and account.committed == 96 and account.resident == 24 and told["balanced"]
    text, balanced = audit.describe_ledger(audit.open_run(run.root))
    assert balanced and f"not in the log any more: {16 * len(gone)} rows of {writer}" in text
    line = next(line for line in audit.open_run(run.root).lines if any(row // 16 in gone for _, row in line["rows"]))
    with pytest.raises(ValueError, match=rf"step {line['step']} cannot be rebuilt: .*{writer}.* are not in the log"):
        audit.rebuild_batch(audit.open_run(run.root), line["step"])
    # A kill before the last checkpoint was whole: the one before is restored, and all that its steps drew is still there.
    expected = snapshots.fingerprint(published.kept(run.policies)[6])
    assert layout.steps_in(run.checkpoints) == [5, 6]
    for folder in (published.kept(run.policies)[6], run.checkpoints / "00000006"):
        shutil.rmtree(folder)
    assert jobs.everything(s)() == 0
    assert snapshots.fingerprint(published.kept(run.policies)[6]) == expected
    assert layout.read_json(run.finished)["epoch"] == 2 and layout.read_json(run.finished)["balanced"]


def test_a_checkpoint_has_the_rows_of_its_moment(tmp_path, frozen):
    s = frozen(tmp_path / "run", batches=2)
    with frozen_runs.trainer(s) as trainer:
        before = trainer.buffer.state()
        trainer.poll()
        trainer.buffer.integrate(step=0)
        assert before["visible"] == [] and trainer.buffer.state()["visible"]


def test_a_silent_writer_is_closed_and_goes_on_where_it_was(tmp_path, frozen):
    changes = dict(replay__capacity=24, replay__retention="checkpoints", checkpoint__every_steps=1, replay__close_seconds=1e-6)
    s = frozen(tmp_path / "run", batches=2, **changes)
    frozen_runs.append_changed(s, "dead-1")
    frozen_runs.train(s, until=2, abandon=True)
    for number in range(8):
        frozen_runs.append_changed(s, f"more-{number}")
    frozen_runs.train(s, until=6, abandon=True)
    text, balanced = audit.describe_ledger(audit.open_run(s.run.root))
    assert balanced and "closed writers)" in text and "dead-1" not in text, text
    assert "dead-1" not in audit.open_run(s.run.root).reader.heads() and not registration(s.run.replay, "dead-1").exists()
    again = LogWriter(s.run.replay, "dead-1", (reader := audit.open_run(s.run.root).reader).shape, info={})
    again._next_row = 4
    rows = dict(reader.read("more-7", 0, 4))
    again.append(rows | {"row": np.arange(4, 8)})
    frozen_runs.train(s, until=7, abandon=True)
    account = audit.accounts(audit.open_run(s.run.root))["dead-1"]
    assert account.balances and account.committed == 4 and account.resident >= 1


def test_what_came_after_a_writer_was_closed_is_not_removed(tmp_path):
    log = writer(tmp_path)
    for first in (0, 4):
        log.append(make_rows(first, 4))
    reader = LogReader(tmp_path, SHAPE)
    reader.look()
    retention = Retention(tmp_path, SimpleNamespace(index=None, reader=reader))
    retention._needs = {2: ({}, {"w0": 4})}
    retention.remove_unneeded([2])
    retention.close()
    assert LogReader(tmp_path, SHAPE).heads() == {"w0": 8} and len(objects(tmp_path)) == 1
    assert registration(tmp_path, "w0").exists()


@pytest.mark.parametrize("name", ["w0", "given-0"])
def test_a_writer_that_comes_and_is_closed_between_two_checkpoints_is_removed(tmp_path, name):
    """Once no checkpoint from before it is kept, also by a trainer that was started again. What was given is still known."""
    writer(tmp_path, name).append(make_rows(0, 4))
    (reader := LogReader(tmp_path, SHAPE)).look()
    index = ReplayIndex(shape=SHAPE, capacity=9, capacity_per_query=9, vocab_size=9)
    retention = Retention(tmp_path, SimpleNamespace(index=index, reader=reader))
    retention.note(1)
    index.skip(name, 0, 4, kind="damaged")
    index.close([name])
    retention.note(2)
    retention.remove_unneeded([1, 2])
    retention.close()
    assert len(objects(tmp_path, name)) == 1
    retention = Retention(tmp_path, SimpleNamespace(index=index, reader=reader))
    retention.note(2)
    retention.note(3)
    retention.remove_unneeded([2, 3])
    retention.close()
    assert not objects(tmp_path, name) and registration(tmp_path, name).exists() == (name == "given-0")
