"""The replay buffer of a trainer: what it merges and when, and the counts of successes that lie beside snapshots."""

import shutil

import numpy as np
import pytest

from tba_jax.commands import audit
from tba_jax.experiment import training
from tba_jax.replay import ledger, success_counts
from tba_jax.replay.log import LogWriter
from tba_jax.replay.reader import LogReader
from tba_jax.roles.trainer.buffer import ReplayBuffer
from tba_jax.telemetry import metrics
from tests.support import frozen_runs, tiny_run

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


def test_rows_of_other_runs_are_not_counted_and_the_metrics_tell_how_hard_the_own_are(tmp_path, frozen):
    source = frozen(tmp_path / "source", batches=2, **POSTERIOR)
    s = frozen(tmp_path / "run", batches=1, **POSTERIOR)
    append_rewards(s, "later", (1.0, 0.0, 0.0, 0.5))
    mounting = frozen_runs.config(**POSTERIOR, replay__mount=(str(source.run.root),), learner__steps=2)
    s = tiny_run.settings(s.run.root, mounting)
    assert training.trainer(s)() == 0
    assert beside(s, 2) == by_hand(s)
    line = metrics.read_lines(s.run.metrics("trainer"))[-1]
    rates = np.array([successes / trials for successes, trials in by_hand(s).values()])
    assert line["success_rate"] == pytest.approx(rates.mean())
    assert line["queries_failed"] + line["queries_mixed"] + line["queries_solved"] == pytest.approx(1)


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
    """Journal lines tell where rows were merged: another buffer does the same again, under whatever window of its own."""
    s = frozen(tmp_path / "run", batches=1, **NEAR)
    log = LogWriter(s.run.replay, "near", s.experiment.contract.row_shape(), rows_per_append=4, segment_appends=4, info={})
    append_near_copies(s, log, [0.9, 0.1, 0.1, 0.1])
    buffer, again = (ReplayBuffer(s.config, s.experiment.contract, s.run, recent_window=window) for window in (1, 4))
    buffer.follow()
    lines = []
    for step in range(6):
        buffer.tail.poll()
        buffer.integrate(step=step)
        lines.append({"step": step + 1, "visible": buffer.take_visible(), "writers": [], "rows": []})
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
    again.expect(lines)
    for line in lines:
        again._again.do(line)
    assert again.index.state() == buffer.index.state()
    buffer.close()
