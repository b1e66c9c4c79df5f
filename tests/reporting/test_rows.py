"""The table of rows and draws: what it holds is the log and the journal, whatever comes, expires, is damaged or does not fit."""

import json

import numpy as np

from tba_jax.replay import journal
from tba_jax.replay.reader import LogReader
from tba_jax.replay.segment import remove_segments
from tba_jax.reporting import rows as rows_lib
from tba_jax.reporting.rows import RowTable
from tests.support.tiny_log import SHAPE, make_rows, writer

WRITERS = ("w0", "w1", "w2")


def table(root, patience: float = 0.0) -> RowTable:
    return RowTable(LogReader(root, SHAPE, patience_seconds=patience), beside(root, "journal"))


def append(root, name: str, count: int, **settings) -> None:
    """Rows of a writer, in appends of four."""
    log = writer(root, name, **settings)
    for begin in range(0, count, 4):
        log.append(make_rows(begin, 4))


def beside(root, name: str):
    """A folder that is not in the replay log."""
    return root.with_name(f"{root.name}-{name}")


def identities(found: RowTable) -> list[str]:
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
    assert found.problems == [] and found.committed == 8 and identities(found) == named("w0", range(8))
    assert found.rows["newest_step"].tolist() == [7, -1] * 4 and found.rows["oldest_step"].tolist() == [5, -1] * 4
    for name in ("query_id", "reward", "finished"):
        np.testing.assert_array_equal(found.rows[name], rows[name])


def test_damaged_and_expired_rows_are_left_out_and_damage_is_named(tmp_path):
    damage(tmp_path, 1)
    append(tmp_path, "w1", 28)
    remove_segments(tmp_path, {"w1": [0]})
    found = table(tmp_path)
    assert identities(found) == sorted(named("w0", range(4), range(8, 16)) + named("w1", range(12, 28)))
    assert any("4 rows are damaged" in told and "w0: rows 4 to 7" in told for told in found.problems)


def test_rows_that_storage_does_not_give_yet_are_named(tmp_path):
    append(tmp_path, "w0", 12, segment_appends=1)
    (tmp_path / "w0" / "000001" / "d").rename(beside(tmp_path, "away"))
    found = table(tmp_path, patience=60.0)
    assert identities(found) == named("w0", range(4)) and "further rows of writer w0 cannot be read yet" in found.problems[0]


def test_of_more_rows_than_are_kept_those_are_read_that_each_writer_wrote_last(tmp_path, monkeypatch):
    monkeypatch.setattr(rows_lib, "MOST_ROWS", 12)
    append(tmp_path, "w0", 32)
    append(tmp_path, "w1", 16)
    found = table(tmp_path)
    assert identities(found) == named("w0", range(24, 32)) + named("w1", range(12, 16))
    assert any("48 are committed" in told for told in found.problems)


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
        append(tmp_path, name, 20)
    folder = beside(tmp_path, "journal")
    for epoch, steps in ((1, range(1, 40)), (2, range(12, 17)), (3, range(17, 30)), (4, range(0))):
        write_lines(folder, epoch, steps, salt=epoch)
    found = table(tmp_path)
    ids = {line["step"]: journal.line_ids(line) for line in journal.read_lineage(folder)}
    keys = found.rows["key"].tolist()
    drawn = {key: [step for step, rows in ids.items() for each in rows if each == found.name(key)] for key in keys}
    assert found.last_step == max(ids) and found.draws_of(keys) == drawn
    assert found.counts().tolist() == [len(drawn[key]) for key in keys]
    assert found.problems == [] and found.resumes == [11, 16]
