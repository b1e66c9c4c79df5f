"""The replay buffer of a trainer."""

import dataclasses
import shutil

import jax
import numpy as np
import pytest

from tba_jax.commands import audit, show
from tba_jax.experiment import jobs, training
from tba_jax.replay import journal, ledger, success_counts
from tba_jax.replay.log import LogWriter
from tba_jax.replay.reader import LogReader
from tba_jax.tasks.interface import Scores
from tba_jax.telemetry import metrics
from tba_jax.telemetry.record import TimeAccount
from tests.support import frozen_runs, tiny_run
from tests.support.tiny_searcher import Held

pytestmark = pytest.mark.usefixtures("one_device_throughout")


def test_one_reader_serves_resume_steps_and_expiry(tmp_path, frozen, monkeypatch):
    s = frozen(tmp_path / "run", replay__retention="checkpoints")
    frozen_runs.train(s, until=6, abandon=True)  # a checkpoint of step 5 to restore, a step to do again
    made, init = [], LogReader.__init__

    def counted(reader: LogReader, *arguments, **settings) -> None:
        made.append(reader)
        init(reader, *arguments, **settings)

    monkeypatch.setattr(LogReader, "__init__", counted)
    assert int(frozen_runs.train(s, until=12, abandon=False).step) == 12
    assert len(made) == 1


POSTERIOR = dict(searchers__prompt_selection="posterior", replay__success_decay=0.5)


def by_hand(s) -> dict[int, tuple[float, float]]:
    """Query -> discounted successes and trials of the rows in the log with rewards within [0, 1], S consecutive rows a visit."""
    reader, S = LogReader(s.run.replay, s.experiment.contract.row_shape()), s.config.searchers.samples_per_query
    found: dict[int, tuple[float, float]] = {}
    for writer, head in sorted(reader.heads().items()):
        rows = reader.read(writer, 0, head)
        for begin in range(0, head, S):
            rewards = rows["reward"][begin : begin + S].astype(float)
            counted = rewards[(rewards >= 0) & (rewards <= 1)]
            successes, trials = found.get(query := int(rows["query_id"][begin]), (0.0, 0.0))
            found[query] = successes / 2 + float(counted.sum()), trials / 2 + len(counted)
    return found


def beside(s, step: int) -> dict[int, tuple[float, float]]:
    counts = success_counts.read(s.run.policies, step)
    columns = (column.tolist() for column in (counts.query_id, counts.successes, counts.trials))
    return {query: (successes, trials) for query, successes, trials in zip(*columns, strict=True)}


def searched(workdir, **changes):
    """A run of 6 batches of rewards 0 and 1, that nobody writes to any more."""
    s = tiny_run.settings(workdir, tiny_run.config(**{**POSTERIOR, **changes}))
    training.reference(s)()
    with frozen_runs.trainer(s):
        pass
    right = dataclasses.replace(s, experiment=dataclasses.replace(s.experiment, task=Held(s.experiment.task, *6 * [halves])))
    searcher = jobs.make_searcher(right, name="frozen", account=TimeAccount())
    searcher.refresh()
    for _ in range(6):
        searcher.search()
    searcher.close()
    return s


def halves(scores: Scores) -> Scores:
    """Of every third query the first half of the responses succeeds, of the next all, and of the last none."""
    query, sample = np.divmod(np.arange(len(scores.reward)), 4)
    reward = np.where(query % 3 == 0, sample < 2, query % 3 == 1).astype(np.float32)
    return dataclasses.replace(scores, reward=reward)


def test_counts_lie_beside_every_snapshot_and_a_resume_comes_to_the_same(tmp_path):
    """Rows come between steps: 4 batches, 3 steps, the others, and on. The snapshots that a resume writes again are the same."""
    s = searched(tmp_path / "run")
    assert beside(s, 0) == {}
    frozen_runs.train(s, until=3, abandon=True)
    expected = by_hand(s)
    assert beside(s, 2) == expected
    more = jobs.make_searcher(s, name="later", account=TimeAccount())
    more.refresh()
    more.search()
    more.close()
    frozen_runs.train(s, until=8, abandon=True)  # with a checkpoint of step 5
    there = {step: beside(s, step) for step in (2, 4, 6, 8)}
    assert there[2] == expected and there[4] != there[2] and there[4] == there[8]
    shutil.rmtree(s.run.policies)
    with frozen_runs.trainer(s) as again:  # from the checkpoint
        again.flush_snapshot()
        assert {step: beside(s, step) for step in (6, 8)} == {step: there[step] for step in (6, 8)}
    shutil.rmtree(s.run.policies)
    shutil.rmtree(s.run.checkpoints)
    with frozen_runs.trainer(s) as again:  # from the log and the whole journal
        again.flush_snapshot()
        assert {step: beside(s, step) for step in there} == there
    index = audit.rebuild_index(audit.open_run(s.run.root))
    assert index.success_counts.state() == again.index.success_counts.state()


def test_rows_of_other_runs_are_not_counted(tmp_path):
    source = searched(tmp_path / "source")
    c = tiny_run.config(**POSTERIOR, replay__mount=(str(source.run.root),), searchers__count=0)
    s = tiny_run.settings(tmp_path / "run", c)
    training.reference(s)()
    frozen_runs.train(s, until=2, abandon=True)
    assert beside(s, 2) == {}


def test_the_metrics_tell_how_hard_the_queries_are(tmp_path):
    s = searched(tmp_path / "run")
    c = s.config.copy_and_resolve_references()
    c.learner.steps = 3
    assert training.trainer(tiny_run.settings(tmp_path / "run", c))() == 0
    line = metrics.read_lines(s.run.metrics("trainer"))[-1]
    rates = np.array([successes / trials for successes, trials in by_hand(s).values()])
    assert line["success_rate"] == pytest.approx(rates.mean())
    assert line["queries_failed"] + line["queries_mixed"] + line["queries_solved"] == pytest.approx(1)
    assert min(line["queries_failed"], line["queries_mixed"], line["queries_solved"]) > 0.1
    assert sum(line["success_rate_histogram"]["counts"]) == len(rates) == line["buffer_queries"]
    assert show.show(s.run.root, "newest", 1).splitlines()[1].startswith(f"of {len(rates)} queries, ")


def test_a_row_whose_reward_is_no_success_rate_is_told_and_not_counted(tmp_path, caplog):
    """A searcher that chooses uniformly writes such rows: they are trained on, and the counts of the others go on."""
    s = searched(tmp_path / "run")
    frozen_runs.append_changed(s, "another-1", reward=(2, 7.5))
    assert int(frozen_runs.train(s, until=12, abandon=False).step) == 12
    with frozen_runs.trainer(s) as trainer:
        trainer.report_problems()
        trainer.report_problems()
    assert caplog.text.count("row another-1:2 has the reward 7.5") == 1
    reader = LogReader(s.run.replay, s.experiment.contract.row_shape())
    assert reader.heads().keys() > {"another-1"}
    assert beside(s, 12) == by_hand(s)


NEAR = dict(
    replay__merge_keep="best",
    replay__merge_edit_distance=0.3,
    replay__recent_probability=1.0,
    replay__recent_window=1,
    learner__queries=1,
)


def append_near_copies(s, log: LogWriter, rewards: list[float]) -> None:
    """Four responses that differ in one token, and from those of other appends in two, to a query of the frozen log."""
    reader = LogReader(s.run.replay, s.experiment.contract.row_shape())
    source = next(writer for writer in reader.heads() if writer.startswith("frozen-"))
    rows = {name: column.copy() for name, column in reader.read(source, 0, 4).items()}
    rows["row"] += log.next_row - rows["row"][0]
    rows["response_length"][:] = 6
    for i, start in enumerate(rows["prompt_length"].tolist()):
        rows["tokens"][i, start : start + 6] = 5, 6, 7, 8, 5 + log.next_row // 4 % 5, 5 + i
    rows["policy_step"][:], rows["reward"] = 0, np.float32(rewards)
    log.append(rows)


def test_near_copies_of_a_better_row_are_drawn_while_they_are_recent_and_merged_afterwards(tmp_path, frozen):
    s = frozen(tmp_path / "run", batches=1, **NEAR)
    log = LogWriter(s.run.replay, "near", s.experiment.contract.row_shape(), rows_per_append=4, segment_appends=4, info={})
    append_near_copies(s, log, [0.9, 0.1, 0.1, 0.1])
    with frozen_runs.trainer(s) as trainer:
        buffer = trainer.buffer
        for step in range(6):
            buffer.tail.poll()
            buffer.integrate(step=step)
            if step:
                slots = buffer.draw(step=step)
                assert sorted(buffer.index.ids(slots)) == [("near", row) for row in range(4 * step, 4 * step + 4)]
                found = buffer.provenance(slots, buffer.index.reward[slots], step=step + 1)
                assert found["distinct_rows_per_group"] == 4
            append_near_copies(s, log, [0.2, 0.3, 0.4, 0.5])
        near = [row for writer, row in buffer.index.ids(np.flatnonzero(buffer.index.slot_query >= 0)) if writer == "near"]
        assert sorted(near) == [0, 20, 21, 22, 23], "the better row, and those of the recent window"
        found = buffer.provenance(np.repeat(slots[:2], 2), buffer.index.reward[slots], step=6)
        assert found["distinct_rows_per_group"] == 2
        accounts = ledger.accounts(buffer.index, buffer.index.heads)
        assert accounts["near"].evicted["duplicate"] == 19 and all(each.balances for each in accounts.values())


def test_a_resume_merges_where_the_journal_says_whatever_its_own_window_is(tmp_path, frozen):
    """8 steps with a checkpoint at 5; then from the checkpoint under a longer window, and from the journal alone."""
    s = frozen(tmp_path / "run", **NEAR)
    log = LogWriter(s.run.replay, "near", s.experiment.contract.row_shape(), rows_per_append=4, segment_appends=4, info={})
    with frozen_runs.trainer(s) as trainer:
        for step in range(8):
            append_near_copies(s, log, [step % 3, 0.2, 0.3, step / 9])
            trainer.poll()
            assert trainer.step() is not None
        expected = jax.device_get(trainer.state), trainer.index.state()
    lines = [*journal.read_lineage(s.run.journal)]
    merged = [line["step"] for line in lines if any("merged_before" in record for record in line["visible"])]
    assert min(merged) <= 5 < max(merged)
    longer = tiny_run.settings(tmp_path / "run", frozen_runs.config(**{**NEAR, "replay__recent_window": 4}))
    for lost in (None, s.run.checkpoints):
        if lost is not None:
            shutil.rmtree(lost)
        with frozen_runs.trainer(longer) as again:
            jax.tree.map(np.testing.assert_array_equal, jax.device_get(again.state), expected[0])
            assert again.index.state() == expected[1]
