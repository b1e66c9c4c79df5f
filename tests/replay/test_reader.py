"""Reading logs: while they are written, damaged, on storage that lags, and beside foreign content."""

import json
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from tba_jax.replay.reader import LogCorruption, LogReader
from tba_jax.trajectory import RowShape
from tests.support.tiny_log import SHAPE, assert_rows, make_rows, writer


def test_a_live_reader_never_sees_a_torn_row(tmp_path):
    def append(name):
        log = writer(tmp_path, name, segment_appends=7)
        for _ in range(40):
            log.append(make_rows(log.next_row, 4))

    threads = [threading.Thread(target=append, args=(name,)) for name in ("a", "b")]
    reader, seen = LogReader(tmp_path, SHAPE), {}
    for thread in threads:
        thread.start()
    polls = 0
    while seen != {"a": 160, "b": 160} and polls < 10_000:
        for name, head in reader.heads().items():
            previous = seen.get(name, 0)
            assert head >= previous and head % 4 == 0
            if head > previous:
                assert_rows(reader.read(name, previous, head), make_rows(previous, head - previous))
            seen[name] = head
        polls += 1
        time.sleep(0.001)
    for thread in threads:
        thread.join()
    assert seen == {"a": 160, "b": 160}
    assert reader.problems == {}


def test_a_flipped_byte_is_named_with_its_writer_and_rows(tmp_path):
    shape = RowShape(prompt_length=4, response_length=64, reward_parts=())
    log, rng = writer(tmp_path, shape=shape, segment_appends=8), np.random.default_rng(0)
    expected, files = make_rows(0, 16, shape), []
    for name in ("ref_logprobs", "policy_logprobs"):
        expected[name] = rng.normal(size=(16, 64)).astype(np.float32)
    for append in range(4):
        before = set((tmp_path / "w0").rglob("d/*"))
        log.append({name: column[4 * append : 4 * append + 4] for name, column in expected.items()})
        files.append(max(set((tmp_path / "w0").rglob("d/*")) - before, key=lambda path: path.stat().st_size))

    def damage_everywhere(path: Path) -> tuple[list[LogCorruption], int]:
        """Flips a bit here and there, one at a time; returns the damaged reads and the number of damaged heads."""
        found, heads, content = [], 0, path.read_bytes()
        for position in range(0, len(content), len(content) // 60):
            path.write_bytes(content[:position] + bytes([content[position] ^ 16]) + content[position + 1 :])
            reader = LogReader(tmp_path, shape, patience_seconds=0)
            if reader.heads() != {"w0": 16}:
                assert "head of writer w0 cannot be read" in reader.problems["w0"]
                heads += 1
                continue
            try:
                assert_rows(reader.read("w0", 0, 16), expected)
            except LogCorruption as corruption:
                found.append(corruption)
        path.write_bytes(content)
        return found, heads

    # The file of append 1 holds its large values, and index nodes that later appends have replaced.
    found, heads = damage_everywhere(files[1])
    assert len(found) > 20 and heads == 0
    for corruption in found:
        assert (corruption.writer, corruption.start, corruption.stop) == ("w0", 4, 8)
        assert "w0: rows 4 to 7" in str(corruption)
    # That of the last append holds the index nodes of all.
    found, heads = damage_everywhere(files[3])
    assert len(found) > 20 and heads > 5

    # A data file that was cut off at any length: its append is named, the others are read.
    content = files[1].read_bytes()
    for length in range(0, len(content) * 9 // 10, len(content) // 6):
        files[1].write_bytes(content[:length])
        reader = LogReader(tmp_path, shape, patience_seconds=0)
        assert reader.heads() == {"w0": 16}
        with pytest.raises(LogCorruption, match="rows 4 to 7"):
            reader.read("w0", 0, 16)
        assert_rows(reader.read("w0", 8, 16), {name: column[8:] for name, column in expected.items()})
    # So is a segment whose list of contents was cut off: its rows are not seen, and the writer is named.
    manifest = tmp_path / "w0" / "000000" / "manifest.ocdbt"
    whole = manifest.read_bytes()
    for length in range(1, len(whole), len(whole) // 4):
        manifest.write_bytes(whole[:length])
        reader = LogReader(tmp_path, shape, patience_seconds=0)
        assert reader.heads() == {"w0": 0} and "head of writer w0 cannot be read" in reader.problems["w0"]
    manifest.write_bytes(whole)


def test_lagging_storage_is_waited_for(tmp_path):
    shape = RowShape(prompt_length=4, response_length=64, reward_parts=())
    log, rows = writer(tmp_path, shape=shape), make_rows(0, 4, shape)
    rows["ref_logprobs"] = np.random.default_rng(0).normal(size=(4, 64)).astype(np.float32)
    data, away = tmp_path / "w0" / "000000" / "d", tmp_path / ".away"
    log.append(rows)
    before = set(data.iterdir())
    # A second append takes over the index nodes, so that the first one's file holds nothing but values.
    log.append(make_rows(4, 4, shape))
    reader = LogReader(tmp_path, shape, patience_seconds=20)
    assert reader.heads() == {"w0": 8}
    lagging = max(before, key=lambda path: path.stat().st_size)
    lagging.rename(away)
    timer = threading.Timer(0.1, lambda: away.rename(lagging))
    timer.start()
    assert_rows(reader.read("w0", 0, 4), rows)
    assert lagging.exists()
    timer.join()


def test_a_writer_of_a_damaged_head_stays_where_it_was(tmp_path):
    log, reader = writer(tmp_path), LogReader(tmp_path, SHAPE)
    log.append(make_rows(0, 4))
    assert reader.heads() == {"w0": 4}
    log.append(make_rows(4, 4))
    manifest = tmp_path / "w0" / "000000" / "manifest.ocdbt"
    content = manifest.read_bytes()
    manifest.write_bytes(content[:40] + bytes([content[40] ^ 1]) + content[41:])
    assert reader.heads() == {"w0": 4}
    assert "w0" in reader.problems["w0"] and "row 4" in reader.problems["w0"]
    manifest.write_bytes(content)
    assert reader.heads() == {"w0": 8}
    assert reader.problems == {}


def test_foreign_content_and_other_schemas_are_problems(tmp_path):
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "foreign").mkdir()
    (tmp_path / ".w9.tmp").mkdir()
    good = writer(tmp_path, "good")
    good.append(make_rows(0, 4))
    register = tmp_path / "writers"
    (register / "notes.txt").write_text("hello")
    (register / ".w9.json.tmp").write_text("")
    (register / "list.json").write_text("[]")
    (register / "bare.json").write_text(json.dumps({"schema": {"layout": "packed-columns-1", "rows_per_append": 4}}))
    described = json.loads((register / "good.json").read_text())
    (register / "old.json").write_text(json.dumps({"schema": described["schema"] | {"layout": "named-columns-0"}}))
    (register / "older.json").write_text(json.dumps({"schema": {k: v for k, v in described["schema"].items() if k != "layout"}}))
    writer(tmp_path, "longer", RowShape(prompt_length=4, response_length=9, reward_parts=("a", "b")))
    writer(tmp_path, "parts", RowShape(prompt_length=4, response_length=6, reward_parts=("a", "c")))
    reader = LogReader(tmp_path, SHAPE)
    foreign = {"notes.txt", "foreign", "list", "bare", "old", "older", "longer", "parts"}
    for _ in range(2):  # what is told does not depend on when one looks
        assert reader.heads() == {"good": 4}
        assert set(reader.problems) == foreign
        assert "no writer is registered under this name" in reader.problems["foreign"]
        assert "layout 'named-columns-0', this version reads 'packed-columns-1'" in reader.problems["old"]
        assert "'layout'" in reader.problems["older"] and "segment_appends" in reader.problems["bare"]
        assert "policy_step" in reader.problems["longer"] and "prompt_length" not in reader.problems["longer"]
        assert "['a', 'c']" in reader.problems["parts"]
    with pytest.raises(ValueError, match="policy_step"):
        reader.read("longer", 0, 4)
