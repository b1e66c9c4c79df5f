"""Reading logs beside foreign content, by clocks that are hours off, and after retention."""

import json
import os
import time
import zlib

import pytest

from tba_jax.replay import log as log_lib
from tba_jax.replay import reader as reader_lib
from tba_jax.replay.log import minute_of, remove
from tba_jax.replay.reader import LogCorruption, LogReader, RowsGone
from tba_jax.run import processes, restart
from tba_jax.trajectory import RowShape
from tests.support.tiny_log import SHAPE, assert_rows, make_rows, objects, writer


def test_foreign_content_and_other_schemas_are_named(tmp_path):
    writer(tmp_path, "good").append(make_rows(0, 4))
    (objects(tmp_path, "good")[0].parent / "notes.txt").write_text("hello")
    longer = RowShape(prompt_length=4, response_length=9, reward_parts=("a", "b"))
    parts = RowShape(prompt_length=4, response_length=6, reward_parts=("a", "c"))
    writer(tmp_path, "longer", longer).append(make_rows(0, 4, longer))
    writer(tmp_path, "parts", parts).append(make_rows(0, 4, parts))
    reader = LogReader(tmp_path, SHAPE)
    assert reader.heads() == {"good": 4, "longer": 4, "parts": 4} and [*reader.problems] == ["notes.txt"]
    assert_rows(reader.read("good", 0, 4), make_rows(0, 4))
    for name, words in (("longer", r"policy_step is int32\[9\], expected int32\[6\]"), ("parts", r"\['a', 'c'\]")):
        with pytest.raises(LogCorruption, match=words):
            reader.read(name, 0, 4)
    with pytest.raises(ValueError, match="rows 0 to 3 are committed"):
        reader.read("good", 2, 5)
    with pytest.raises(ValueError, match="its log is not there"):
        reader.read("nobody", 0, 1)


def test_columns_that_another_tool_compressed_are_damage(tmp_path):
    writer(tmp_path).append(make_rows(0, 4))
    (path,) = objects(tmp_path)
    size = 4 + int.from_bytes((content := path.read_bytes())[:4], "little")
    header = json.loads(content[4:size])
    (number,) = (n for n, (name, _, _) in enumerate(header["columns"]) if name == "tokens")
    begin = size + sum(header["bytes"][:number])
    content = content[:begin] + b"not" + content[begin + 3 : -4]
    path.write_bytes(content + zlib.crc32(content).to_bytes(4, "little"))
    with pytest.raises(LogCorruption, match="cannot be decompressed"):
        LogReader(tmp_path, SHAPE).read("w0", 0, 4)


@pytest.mark.parametrize("hours", [-30, -3, 3, 30])
def test_rows_of_a_clock_that_is_hours_off_are_followed(tmp_path, monkeypatch, hours):
    """Found by the sweep, then by each look; also where the reader's own clock is off."""
    right, off, reader = writer(tmp_path, "right"), writer(tmp_path, "off"), LogReader(tmp_path, SHAPE)
    right.append(make_rows(0, 4))
    assert reader.look() == {"right"}
    monkeypatch.setattr(log_lib, "minute_of", lambda seconds: minute_of(seconds + 3600 * hours))
    off.append(make_rows(0, 4))
    reader.look()
    reader.look(sweep=True)
    told = [*reader.problems.values()]
    for head in (8, 12):
        monkeypatch.setattr(log_lib, "minute_of", lambda seconds, head=head: minute_of(seconds + 3600 * hours + 15 * head))
        off.append(make_rows(head - 4, 4))
        assert reader.look() == {"off"} and reader.head("off") == head
    assert [*reader.problems.values()] == told, "each sentence is said once"
    assert any("clock of writer off is behind" in each for each in told) == (hours < 0)
    assert_rows(reader.read("off", 0, 12), make_rows(0, 12))


def test_a_look_costs_what_is_new_and_a_sweep_lists_what_has_changed(tmp_path, monkeypatch):
    log, listed = writer(tmp_path), []
    for _ in range(40):
        log.append(make_rows(log.next_row, 4))
    for number, path in enumerate(objects(tmp_path)):
        minute = tmp_path / minute_of(time.time() - 3600 - 60 * number)
        minute.mkdir()
        path.rename(minute / path.name)
        os.utime(minute, (1e9, 1e9))
    names_in = reader_lib.places.names_in
    monkeypatch.setattr(
        reader_lib.places, "names_in", lambda folder, **more: (listed.append(folder), names_in(folder, **more))[1]
    )
    reader = LogReader(tmp_path, SHAPE)
    assert reader.heads() == {"w0": 160} and len(listed) > 40
    listed.clear()
    log.append(make_rows(160, 4))
    assert reader.look() == {"w0"} and len(listed) <= 6
    listed.clear()
    assert reader.heads() == {"w0": 164} and len(listed) <= 6


def test_rows_that_retention_has_removed_are_told_from_damage(tmp_path):
    log = writer(tmp_path)
    for append in range(13):
        log.append(make_rows(4 * append, 4))
    follows = LogReader(tmp_path, SHAPE, patience_seconds=0)
    follows.look()
    appends = follows.appends("w0")
    remove(tmp_path, [*appends[:3], *appends[6:9]])
    remove(tmp_path, appends[:1])  # what is gone costs nothing
    fresh = LogReader(tmp_path, SHAPE, patience_seconds=0)
    for reader in (fresh, follows):
        assert reader.heads() == {"w0": 52} and reader.kept("w0") == [range(12, 24), range(36, 52)]
        with pytest.raises(RowsGone, match="rows 25 to 35 are not in the log: retention") as told:
            reader.read_ids([("w0", 13), ("w0", 25)])
        assert (told.value.writer, told.value.start, told.value.stop) == ("w0", 25, 36)
        assert_rows(reader.read("w0", 36, 52), make_rows(36, 16))


def test_a_removal_that_storage_refuses_is_a_failure_of_storage(tmp_path, monkeypatch):
    writer(tmp_path).append(make_rows(0, 4))
    (reader := LogReader(tmp_path, SHAPE)).look()

    class Refusing:
        def write(self, *_):
            return self

        def result(self):
            raise ValueError("UNAVAILABLE: try again later")

    monkeypatch.setattr(log_lib.places, "open_store", lambda _: Refusing())
    with pytest.raises(OSError, match="UNAVAILABLE") as told:
        remove(tmp_path, reader.appends("w0"))
    assert processes.exit_code(told.value) == restart.STORAGE_FAILED


def test_a_late_writer_whose_appends_retention_has_removed_is_followed_no_more(tmp_path, monkeypatch):
    writer(tmp_path, "right").append(make_rows(0, 4))
    reader = LogReader(tmp_path, SHAPE)
    reader.look()
    monkeypatch.setattr(log_lib, "minute_of", lambda seconds: minute_of(seconds - 7200))
    writer(tmp_path, "late").append(make_rows(0, 4))
    assert reader.look(sweep=True) == {"late"}
    remove(tmp_path, reader.appends("late"))
    reader.look(sweep=True)
    assert reader.look() == set() and reader.head("late") == 0


def test_a_minute_that_could_not_be_listed_is_listed_again(tmp_path, monkeypatch):
    writer(tmp_path).append(make_rows(0, 4))
    (path,) = objects(tmp_path)
    (old := tmp_path / "20260101T0000").mkdir()
    path.rename(old / path.name)
    os.utime(old, (1e9, 1e9))
    reader, names_in = LogReader(tmp_path, SHAPE), reader_lib.places.names_in

    def refuses(folder, **more):
        if folder == old:
            raise OSError("Input/output error")
        return names_in(folder, **more)

    with monkeypatch.context() as patch:
        patch.setattr(reader_lib.places, "names_in", refuses)
        assert reader.heads() == {} and "cannot be listed" in reader.problems[str(tmp_path)]
    assert reader.heads() == {"w0": 4} and not reader.problems


def test_given_rows_stay_hidden_while_nobody_knows_whether_they_are_registered(tmp_path, monkeypatch):
    writer(tmp_path, "given-1").append(make_rows(0, 4))
    reader, exists = LogReader(tmp_path, SHAPE), reader_lib.places.exists

    def refuses(file):
        raise OSError("Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(reader_lib.places, "exists", refuses)
        assert reader.heads() == {} and not reader.look()
    assert exists is reader_lib.places.exists and reader.look() == {"given-1"} and not reader.problems
