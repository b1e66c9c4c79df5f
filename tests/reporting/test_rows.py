"""The table of rows and draws: what it holds is the log and the journal, whatever comes, expires, is damaged or does not fit."""

import json

import numpy as np
import pytest

from tba_jax.replay import journal
from tba_jax.replay.expiry import remove_segments
from tba_jax.replay.reader import LogReader
from tba_jax.reporting import rows as rows_lib
from tba_jax.reporting.rows import RowTable
from tests.support.tiny_log import SHAPE, make_rows, writer

WRITERS = ("w0", "w1", "w2")


def table(root, patience: float = 0.0) -> RowTable:
    return RowTable(LogReader(root, SHAPE, patience_seconds=patience), beside(root, "journal"))


def beside(root, name: str):
    """A folder that is not in the replay log."""
    return root.with_name(f"{root.name}-{name}")


def identities(found: RowTable) -> list[str]:
    found.advance()
    return sorted("{}:{}".format(*found.name(key)) for key in found.rows["key"].tolist())


def named(name: str, *rows: range) -> list[str]:
    return [f"{name}:{row}" for each in rows for row in each]


def damage(root, append: int) -> None:
    """Cuts the data file of an append of four rows, which its commit has written, of the log w0."""
    log, rng = writer(root, segment_appends=8), np.random.default_rng(0)
    for number in range(4):
        before = set((root / "w0").rglob("d/*"))
        log.append(make_rows(4 * number, 4) | {"ref_logprobs": rng.normal(size=(4, 6)).astype(np.float32)})
        if number == append:
            file = max(set((root / "w0").rglob("d/*")) - before, key=lambda path: path.stat().st_size)
    file.write_bytes(file.read_bytes()[:40])


def test_the_figures_are_those_of_the_log(tmp_path):
    log, rows = writer(tmp_path), make_rows(0, 8)
    rows["policy_step"] = np.array([[5, 7, 6, -1, -1, -1], [-1] * 6] * 4, np.int32)
    for begin in (0, 4):
        log.append({name: column[begin : begin + 4] for name, column in rows.items()})
    found = table(tmp_path)
    found.advance()
    assert found.problems == [] and found.committed == 8 and identities(found) == named("w0", range(8))
    assert found.rows["newest_step"].tolist() == [7, -1] * 4 and found.rows["oldest_step"].tolist() == [5, -1] * 4
    for name in ("query_id", "reward", "response_length", "finished"):
        np.testing.assert_array_equal(found.rows[name], rows[name])
    ratios = [sum(row) for row in (rows["policy_logprobs"] - rows["ref_logprobs"]).tolist()]
    np.testing.assert_allclose(found.rows["log_ratio"], ratios)


def test_only_what_is_new_is_read(tmp_path, monkeypatch):
    logs = [writer(tmp_path, name) for name in WRITERS[:2]]
    for log in logs:
        for begin in range(0, 20, 4):
            log.append(make_rows(begin, 4))
    found = table(tmp_path)
    assert identities(found) == sorted(named("w0", range(20)) + named("w1", range(20)))
    read, asked = LogReader.read, []
    monkeypatch.setattr(LogReader, "read", lambda self, *span, **how: (asked.append(span), read(self, *span, **how))[1])
    logs[1].append(make_rows(20, 4))
    assert len(identities(found)) == 44 and asked == [("w1", 20, 24)]


def test_damaged_and_expired_rows_are_left_out_and_damage_is_named(tmp_path):
    damage(tmp_path, 1)
    other = writer(tmp_path, "w1")
    for begin in range(0, 28, 4):
        other.append(make_rows(begin, 4))
    remove_segments(tmp_path, {"w1": [0]})
    found = table(tmp_path)
    kept = sorted(named("w0", range(4), range(8, 16)) + named("w1", range(12, 28)))
    for _ in range(2):
        assert identities(found) == kept
        assert any("4 rows are damaged" in told and "w0: rows 4 to 7" in told for told in found.problems)


def test_rows_that_storage_does_not_give_yet_come_later(tmp_path):
    log = writer(tmp_path, segment_appends=1)
    for begin in (0, 4, 8):
        log.append(make_rows(begin, 4))
    found = table(tmp_path, patience=60.0)
    away = beside(tmp_path, "away")
    (tmp_path / "w0" / "000001" / "d").rename(away)
    assert identities(found) == named("w0", range(4)) and "from 4 on cannot be read yet" in found.problems[0]
    away.rename(tmp_path / "w0" / "000001" / "d")
    assert identities(found) == sorted(named("w0", range(12))) and found.problems == []


def test_of_more_rows_than_are_kept_those_are_read_that_each_writer_wrote_last(tmp_path, monkeypatch):
    monkeypatch.setattr(rows_lib, "MOST_ROWS", 12)
    for name, count in (("w0", 32), ("w1", 16)):
        log = writer(tmp_path, name)
        for begin in range(0, count, 4):
            log.append(make_rows(begin, 4))
    found = table(tmp_path)
    assert identities(found) == named("w0", range(24, 32)) + named("w1", range(12, 16))
    assert any("48 are committed" in told for told in found.problems)


@pytest.mark.parametrize("missing", [("w0", 99), ("w0", -1)])
def test_rows_that_cannot_be_read_are_named_and_the_others_come(tmp_path, missing):
    damage(tmp_path, 2)
    reader = LogReader(tmp_path, SHAPE, patience_seconds=0)
    reader.heads()
    rows, there, lost = rows_lib.read_some(reader, [("w0", 13), ("w0", 9), missing, ("w0", 1)])
    assert rows["row"].tolist() == [13, 1] and there == [0, 3] and len(lost) == 2 and "rows 8 to 11" in lost[0]


def write_lines(folder, epoch: int, steps: range, salt: int = 0) -> None:
    """Journal lines with random draws of 20 rows of each writer."""
    folder.mkdir(exist_ok=True)
    with open(folder / f"epoch-{epoch:06d}.jsonl", "a") as file:
        for step in steps:
            rng = np.random.default_rng([step, salt])
            ids = [(WRITERS[rng.integers(3)], int(rng.integers(20))) for _ in range(int(rng.integers(5)))]
            line = journal.journal_line(step=step, visible=[], ids=ids, reward_version=1, key=step, rows={})
            file.write(json.dumps(line | {"epoch": epoch}) + "\n")


def test_draws_are_those_of_the_lines_that_a_trainer_would_replay(tmp_path):
    for name in WRITERS:
        log = writer(tmp_path, name)
        for begin in range(0, 20, 4):
            log.append(make_rows(begin, 4))
    folder, found = beside(tmp_path, "journal"), table(tmp_path)
    for epoch, steps in (
        (1, range(1, 20)),
        (1, range(20, 25)),
        (2, range(12, 15)),
        (1, range(25, 40)),
        (2, range(15, 17)),
        (3, range(17, 30)),
    ):
        write_lines(folder, epoch, steps, salt=epoch)
        if epoch == 3:
            write_lines(folder, 4, range(0))  # a trainer that has done no step yet
        found.advance()
        ids = {line["step"]: journal.line_ids(line) for line in journal.read_lineage(folder)}
        keys = found.rows["key"].tolist()
        drawn = {key: [step for step, rows in ids.items() for each in rows if each == found.name(key)] for key in keys}
        assert found.last_step == max(ids) and found.draws_of(keys) == drawn
        assert found.counts().tolist() == [len(drawn[key]) for key in keys]
    assert found.problems == [] and found.resumes == [11, 16]


def test_a_damaged_journal_is_named(tmp_path):
    writer(tmp_path).append(make_rows(0, 4))
    write_lines(beside(tmp_path, "journal"), 1, range(1, 9))
    path = beside(tmp_path, "journal") / "epoch-000001.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:2], "[]\n", *lines[3:]]))
    found = table(tmp_path)
    assert identities(found) == named("w0", range(4)) and "epoch-000001.jsonl line 3" in found.problems[0]
