"""The table of rows: what it holds is the log, whatever comes, expires, is damaged or does not fit."""

import itertools
import time

import numpy as np
import pytest

from tba_jax.replay.expiry import remove_segments
from tba_jax.replay.reader import LogReader
from tba_jax.reporting import rows as rows_lib
from tba_jax.reporting.rows import RowTable
from tests.support.tiny_log import SHAPE, make_rows, writer


def table(root, **settings) -> RowTable:
    return RowTable(LogReader(root, SHAPE, patience_seconds=0), **settings)


def identities(found: RowTable) -> set[tuple[str, int]]:
    columns = found.columns
    ids = [(found.writers[number], row) for number, row in zip(columns.writer.tolist(), columns.row.tolist(), strict=True)]
    assert len(set(ids)) == len(ids)
    return set(ids)


def named(writer_name: str, *spans: range) -> set[tuple[str, int]]:
    return {(writer_name, row) for row in itertools.chain(*spans)}


def damage(tmp_path, append: int) -> None:
    """Cuts the data file of an append of four rows, which its commit has written, of the log w0."""
    log, rng = writer(tmp_path, segment_appends=8), np.random.default_rng(0)
    files = []
    for number in range(4):
        before = set((tmp_path / "w0").rglob("d/*"))
        rows = make_rows(4 * number, 4)
        rows["ref_logprobs"] = rng.normal(size=(4, 6)).astype(np.float32)
        log.append(rows)
        files.append(max(set((tmp_path / "w0").rglob("d/*")) - before, key=lambda path: path.stat().st_size))
    files[append].write_bytes(files[append].read_bytes()[:40])


def test_the_columns_are_those_of_the_log(tmp_path):
    log = writer(tmp_path)
    rows = make_rows(0, 8)
    rows["policy_step"] = np.array([[5, 7, 6, -1, -1, -1], [-1] * 6] * 4, np.int32)
    for begin in (0, 4):
        log.append({name: column[begin : begin + 4] for name, column in rows.items()})
    found = table(tmp_path)
    assert found.advance() and found.progress == (8, 8) and found.problems == []
    order = np.argsort(found.columns.row)
    columns = {name: getattr(found.columns, name)[order] for name in rows_lib.Columns.__dataclass_fields__}
    assert columns["newest_step"].tolist() == [7, -1] * 4 and columns["oldest_step"].tolist() == [5, -1] * 4
    for name in ("row", "query_id", "reward", "reward_parts", "response_length", "finished"):
        np.testing.assert_array_equal(columns[name], rows[name])
    for name in ("policy_logprob", "ref_logprob"):
        np.testing.assert_allclose(columns[f"{name}_sum"], [sum(row) for row in rows[f"{name}s"].tolist()])
    bytes_a_row = sum(column.itemsize * column[0].size for column in columns.values())
    assert bytes_a_row == 45 + 4 * len(SHAPE.reward_parts)  # what the docstring says


def test_only_what_is_new_is_read_and_the_newest_first(tmp_path, monkeypatch):
    monkeypatch.setattr(rows_lib, "_BLOCK_BYTES", 8 * SHAPE.row_bytes)
    logs = [writer(tmp_path, name) for name in ("w0", "w1")]
    for log in logs:
        for begin in range(0, 20, 4):
            log.append(make_rows(begin, 4))
    read, asked = LogReader.read, []
    monkeypatch.setattr(LogReader, "read", lambda self, *span, **how: (asked.append(span), read(self, *span, **how))[1])
    found = table(tmp_path)
    assert found.advance()
    spans = [(16, 20), (8, 16), (0, 8)]
    assert asked == [(name, *span) for span in spans for name in ("w0", "w1")]
    logs[1].append(make_rows(20, 4))
    asked.clear()
    assert found.advance() and asked == [("w1", 20, 24)]
    assert identities(found) == named("w0", range(20)) | named("w1", range(24))


def test_a_reader_without_time_goes_on_later(tmp_path, monkeypatch):
    monkeypatch.setattr(rows_lib, "_BLOCK_BYTES", 1)
    log = writer(tmp_path)
    for begin in range(0, 40, 4):
        log.append(make_rows(begin, 4))
    found, calls, counts = table(tmp_path), 0, []
    while not found.advance(seconds=-1.0):
        calls += 1
        counts.append(found.progress[0])
    assert calls == 9 and counts == sorted(counts) and found.progress == (40, 40)
    assert identities(found) == named("w0", range(40))


def test_damaged_and_expired_rows_are_left_out_and_named(tmp_path):
    damage(tmp_path, 1)
    other = writer(tmp_path, "w1")
    for begin in range(0, 28, 4):
        other.append(make_rows(begin, 4))
    remove_segments(tmp_path, {"w1": [0]})
    found = table(tmp_path)
    assert found.advance() and found.progress == (44, 44)
    assert identities(found) == named("w0", range(4), range(8, 16)) | named("w1", range(12, 28))
    told = " ".join(found.problems)
    assert "12 rows were removed by retention" in told and "4 rows are damaged" in told and "w0: rows 4 to 7" in told
    assert found.advance() and " ".join(found.problems) == told  # told once


def test_rows_that_storage_does_not_give_yet_come_later(tmp_path):
    log = writer(tmp_path, segment_appends=1)
    for begin in (0, 4):
        log.append(make_rows(begin, 4))
    found = RowTable(LogReader(tmp_path, SHAPE, patience_seconds=60))
    away = tmp_path / "away"
    (tmp_path / "w0" / "000000" / "d").rename(away)
    assert found.advance() and identities(found) == named("w0", range(4, 8)) and found.progress == (4, 8)
    assert "rows 0 to 3 cannot be read yet" in found.problems[0]
    away.rename(tmp_path / "w0" / "000000" / "d")
    assert found.advance() and found.progress == (8, 8) and found.problems == []


def test_a_table_that_is_full_keeps_the_newest(tmp_path, monkeypatch):
    monkeypatch.setattr(rows_lib, "_BLOCK_BYTES", 1)
    log = writer(tmp_path)
    for begin in range(0, 40, 4):
        rows = make_rows(begin, 4)
        rows["policy_step"] = np.full((4, 6), begin, np.int32)
        log.append(rows)
    found = table(tmp_path, most_rows=16)
    before = found.columns
    while not found.advance():
        pass
    assert identities(found) == named("w0", range(32, 40)) and found.progress == (40, 40) and len(before) == 0
    assert any("32 older rows are left out: the table holds 16" in told for told in found.problems)
    log.append(make_rows(40, 4))
    assert found.advance() and identities(found) == named("w0", range(32, 44))


def test_prompts_are_those_of_the_newest_rows(tmp_path):
    log = writer(tmp_path)
    for begin in range(0, 16, 4):
        rows = make_rows(begin, 4)
        rows["query_id"] = np.array([3, 9, 3, 2**63], np.uint64)
        rows["policy_step"] = np.full((4, 6), 20 - begin, np.int32)
        log.append(rows)
    found = table(tmp_path)
    found.advance()
    at = {query: int(found.columns.row[index]) for query, index in rows_lib.prompt_rows(found.columns).items()}
    assert at.keys() == {3, 9, 2**63} and at[3] in (0, 2) and at[9] == 1 and at[2**63] == 3
    assert rows_lib.prompt_rows(found.columns.first(0)) == {}


@pytest.mark.parametrize("missing", [("w0", 99), ("w0", -1), ("w9", 0)])
def test_rows_that_cannot_be_read_are_named_and_the_others_come(tmp_path, missing):
    damage(tmp_path, 2)
    reader = LogReader(tmp_path, SHAPE, patience_seconds=0)
    reader.heads()
    ids = [("w0", 13), ("w0", 9), missing, ("w0", 1)]
    rows, there, lost = rows_lib.read_some(reader, ids)
    assert rows["row"].tolist() == [13, 1] and there == [0, 3]
    assert lost.keys() == {("w0", 9), missing} and "rows 8 to 11" in lost["w0", 9]


def test_of_very_many_writers_those_without_news_are_asked_less_often(tmp_path, monkeypatch):
    monkeypatch.setattr(rows_lib, "_MOST_ASKED", 1)
    logs = [writer(tmp_path, name) for name in ("w0", "w1")]
    for log in logs:
        log.append(make_rows(0, 4))
    found = table(tmp_path)
    assert found.advance() and found.progress == (8, 8)
    logs[1].append(make_rows(4, 4))
    deadline = time.monotonic() + 20
    while found.progress != (12, 12) and time.monotonic() < deadline:
        found.advance()
    assert identities(found) == named("w0", range(4)) | named("w1", range(8))
