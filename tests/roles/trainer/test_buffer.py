"""The counts of successes that lie beside the snapshots of a trainer."""

import shutil

import numpy as np
import pytest

from tba_jax.commands import audit
from tba_jax.replay import success_counts
from tba_jax.replay.reader import LogReader
from tests.support import frozen_runs

pytestmark = pytest.mark.usefixtures("one_device_throughout")


POSTERIOR = {
    "searchers__prompt_selection": "posterior",
    "replay__success_decay": 0.5,
    "replay__merge_duplicates": False,
    "task__missing_eos_reward": 0.0,
}


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
    return {query: counts for query, counts in found.items() if counts[1]}


def beside(s, step: int) -> dict[int, tuple[float, float]]:
    counts = success_counts.read(s.run.policies, step)
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
    frozen_runs.train(s, until=8, abandon=True)  # with a checkpoint of step 5
    there = {step: beside(s, step) for step in (2, 4, 6, 8)}
    assert there[2] == expected and there[4] != there[2] and there[4] == there[8] == by_hand(s)
    shutil.rmtree(s.run.policies)
    with frozen_runs.trainer(s) as again:  # from the checkpoint
        again.flush_snapshot()
        assert {step: beside(s, step) for step in (6, 8)} == {step: there[step] for step in (6, 8)}
    shutil.rmtree(s.run.policies)
    shutil.rmtree(s.run.checkpoints)
    with frozen_runs.trainer(s) as again:  # from the log and the whole journal
        again.flush_snapshot()
        assert {step: beside(s, step) for step in there} == there
        for _ in range(2):
            again.report_problems()
    assert caplog.text.count("has the reward ") == 1
    index = audit.rebuild_index(audit.open_run(s.run.root))
    assert index.success_counts.state() == again.index.success_counts.state()
