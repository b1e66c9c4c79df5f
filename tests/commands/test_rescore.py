"""Rows scored again by a new version of the reward: beside the old ones, whole or absent, and what trains on them."""

import re
import shutil

import numpy as np
import pytest

from tba_jax import trajectory
from tba_jax.commands import audit, command_line, rescore
from tba_jax.experiment import training
from tba_jax.replay import journal
from tba_jax.replay.log import LogWriter
from tba_jax.replay.reader import LogReader
from tba_jax.replay.segment import remove_segments
from tba_jax.storage import layout
from tba_jax.storage.lease import EpochLease
from tba_jax.tasks.arithmetic import Arithmetic
from tba_jax.tasks.interface import Query, Scores
from tba_jax.telemetry import metrics
from tests.commands.test_command_line import refusal
from tests.support import frozen_runs, tiny_run

pytestmark = pytest.mark.usefixtures("one_device_throughout")


@pytest.fixture
def source(frozen, tmp_path):
    """A run with 48 rows of one writer, scored by version 1."""
    return frozen(tmp_path / "source", batches=3)


@pytest.fixture
def version_2(monkeypatch):
    """The reward becomes the number of sevens, and its parts those and the length."""

    def rewards(self, queries, responses, finished):
        parts = np.array([[response.count("7"), len(response)] for response in responses], np.float32)
        return Scores(reward=parts[:, 0] + 0.25 * parts[:, 1], parts=parts)

    monkeypatch.setattr(Arithmetic, "reward_version", 2)
    monkeypatch.setattr(Arithmetic, "reward_parts", ("sevens", "length"))
    monkeypatch.setattr(Arithmetic, "rewards", rewards)


def rows_in(folder, shape) -> tuple[str, dict[str, np.ndarray]]:
    reader = LogReader(folder, shape)
    ((writer, head),) = reader.heads().items()
    assert not reader.problems
    return writer, reader.read(writer, 0, head)


def test_rewards_are_new_and_everything_else_is_as_it_was(source, version_2, capsys):
    before = frozen_runs.contents(source.run.root)
    command_line.execute(rescore, [f"--workdir={source.run.root}"])
    assert "48 rows of 1 writers have reward version 2" in capsys.readouterr().out
    after = frozen_runs.contents(source.run.root)
    assert {name: after[name] for name in before} == before, "what the run holds is never overwritten"
    assert all(name.startswith("rewards/") for name in set(after) - set(before))
    contract = tiny_run.settings(source.run.root, source.config).experiment.contract
    writer, old = rows_in(source.run.replay, source.experiment.contract.row_shape())
    again, new = rows_in(source.run.rescored(2), contract.row_shape())
    assert again == writer and set(new["reward_version"]) == {2} and set(old["reward_version"]) == {1}
    for name in set(old) - {"reward", "reward_parts", "reward_version"}:
        np.testing.assert_array_equal(new[name], old[name], err_msg=name)
    for i in range(len(new["row"])):
        text = source.experiment.tokenizer.decode(trajectory.response(new, i).tolist())
        assert new["reward_parts"][i].tolist() == [text.count("7"), len(text)]
        # A response that was cut keeps the reward that the config gives such responses.
        assert new["reward"][i] == (text.count("7") + 0.25 * len(text) if new["finished"][i] else -1.0)
    assert new["finished"].any() and not new["finished"].all()
    assert "48 rows of 1 writers have reward version 2" in rescore.rescore(source.run.root)
    assert frozen_runs.contents(source.run.root) == after, "a second time changes nothing"


def test_a_new_run_trains_on_them_and_its_batches_can_be_audited(source, version_2, tmp_path):
    rescore.rescore(source.run.root)
    s = frozen_runs.offline(tmp_path / "run", source.run.root, learner__steps=4)
    assert training.trainer(s)() == 0
    lines = journal.read_lineage(s.run.journal)
    assert [line["reward_version"] for line in lines] == [2] * 4
    writer, new = rows_in(source.run.rescored(2), s.experiment.contract.row_shape())
    points = metrics.read_lines(s.run.metrics("trainer"))
    means = [new["reward"][[row for _, row in line["rows"]]].mean() for line in lines]
    np.testing.assert_allclose([point["reward"] for point in points], means, rtol=1e-5)
    run = audit.open_run(s.run.root)
    assert audit.rebuild_batch(run, 3)[1]
    assert all(account.balances for account in audit.accounts(run).values())
    assert audit.regenerate(run, f"{writer}:3")[1]


def another(source, name: str) -> tuple[LogWriter, dict[str, np.ndarray]]:
    shape = source.experiment.contract.row_shape()
    rows = {column: values[:24].copy() for column, values in rows_in(source.run.replay, shape)[1].items()}
    return LogWriter(source.run.replay, name, shape, rows_per_append=4, segment_appends=2, info={}), rows


def append(log: LogWriter, rows: dict[str, np.ndarray], begin: int = 0, end: int = 24) -> None:
    for start in range(begin, end, 4):
        log.append({name: column[start : start + 4] for name, column in rows.items()})


def test_what_is_interrupted_is_not_seen_and_taken_up_again(source, version_2, tmp_path, monkeypatch):
    """The second of two writers is interrupted midway. Its invalid row stays invalid, and a reward of NaN becomes finite."""
    log, rows = another(source, "second-1")
    rows["query_id"][1], rows["tokens"][1, 0], rows["reward"][1:3] = 1, 9999, np.nan
    append(log, rows)
    commit = LogWriter.append

    def failing(self, rows):
        if self.writer == "second-1" and rows["row"][0] == 12:
            raise OSError("the disk is full")
        return commit(self, rows)

    with monkeypatch.context() as patch, pytest.raises(OSError, match="the disk is full"):
        patch.setattr(LogWriter, "append", failing)
        rescore.rescore(source.run.root)
    s = frozen_runs.offline(tmp_path / "run", source.run.root)
    shape = s.experiment.contract.row_shape()
    assert "second-1" not in LogReader(source.run.rescored(2), shape).heads()
    with pytest.raises(ValueError, match=r"reward_version: 1 there, 2 here; python -m tba_jax rescore --workdir=.*source"):
        training.trainer(s)
    told = rescore.rescore(source.run.root)
    assert "72 rows of 2 writers have reward version 2" in told and "24 of them scored now" in told
    again = LogReader(source.run.rescored(2), shape).read("second-1", 0, 24)
    assert np.isfinite(again["reward"]).tolist() == [True, False, *[True] * 22]


def test_what_cannot_be_rescored_is_refused(source, version_2, capsys, monkeypatch):
    def refused() -> str:
        return refusal(capsys, rescore, f"--workdir={source.run.root}")

    log, rows = another(source, "late-1")
    append(log, rows, end=4)
    rescore.rescore(source.run.root)
    append(log, rows, begin=4)
    assert "late-1 has 4 of the 24 rows of writer late-1, which was still at work then" in refused()
    shutil.rmtree(source.run.rescored(2))
    lease = EpochLease.acquire(source.run.lease)
    assert "held by process" in refused()
    lease.release()
    remove_segments(source.run.replay, {"late-1": [1]})
    assert re.search(r"all of the 24 rows of writer late-1 any more: .*replay.retention=all", refused())
    shutil.rmtree(source.run.replay / "late-1")
    (source.run.replay / "writers" / "late-1.json").unlink()
    with monkeypatch.context() as patch:
        patch.setattr(Arithmetic, "queries", lambda self, split: [Query(f"1{n}+1=") for n in range(40)])
        assert re.search(r"row frozen-.*:0 answers query .* which is not the task's any more", refused())
    assert not source.run.rescored(2).exists()
    monkeypatch.setattr(Arithmetic, "reward_version", 1)
    assert "nothing to do" in rescore.rescore(source.run.root)
    stored = layout.read_json(source.run.config)
    layout.write_json(source.run.config, stored | {"contract": stored["contract"] | {"tokenizer": "another"}})
    assert "is not what it was in more than its reward; tokenizer: 'another' there" in refused()
