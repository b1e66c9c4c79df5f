"""The replay buffer of a trainer."""

import dataclasses
import shutil

import numpy as np
import pytest

from tba_jax.commands import audit, show
from tba_jax.experiment import jobs, training
from tba_jax.replay import success_counts
from tba_jax.replay.reader import LogReader
from tba_jax.run import metrics
from tba_jax.run.metrics import TimeAccount
from tba_jax.tasks.interface import Scores
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
