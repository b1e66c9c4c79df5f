"""Writers of the log: round trips, refusals, claims, crashes, a full disk."""

import numpy as np
import pytest

from tba_jax.replay.log import LogWriter
from tba_jax.replay.reader import LogReader
from tba_jax.replay.segment import Segment
from tests.run.test_processes import files_of_at_most
from tests.support.tiny_log import SHAPE, assert_rows, make_rows, writer


def test_a_writer_id_is_used_once_and_well_formed(tmp_path):
    writer(tmp_path)
    with pytest.raises(ValueError, match="never reused"):
        writer(tmp_path)
    for name in ("", "-a", "A", "a/b", "a" * 101, "a.b", "writers"):
        with pytest.raises(ValueError, match="must match"):
            writer(tmp_path, name)
    assert [p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*")] == ["writers", "writers/w0.json"]
    writer(tmp_path, "writers-2")


def test_wrong_rows_are_refused_and_the_log_goes_on(tmp_path):
    log = writer(tmp_path)
    good = make_rows(0, 4)
    for bad, words in [
        (make_rows(0, 3), "rows_per_append"),
        (make_rows(4, 4), "continues at 0"),
        (good | {"reward": good["reward"].astype(np.float64)}, "reward is float64"),
        (good | {"key": good["key"][:, :1]}, "column key"),
        ({name: column for name, column in good.items() if name != "top_k"}, "top_k"),
    ]:
        with pytest.raises(ValueError, match=words):
            log.append(bad)
    log.append(good)
    assert_rows(LogReader(tmp_path, SHAPE).read("w0", 0, 4), good)


def test_what_a_crash_leaves_lying_around_is_ignored(tmp_path):
    log = writer(tmp_path)
    for append in range(4):
        log.append(make_rows(4 * append, 4))
    (tmp_path / "w0" / "000000" / "d" / "garbage").write_bytes(b"\x00" * 100)
    (tmp_path / "w0" / "000000" / "manifest.ocdbt.__lock").write_bytes(b"")
    (tmp_path / "w0" / "junk").write_text("x")
    (tmp_path / "w0" / "000777.tmp").mkdir()
    reader = LogReader(tmp_path, SHAPE)
    assert reader.heads() == {"w0": 16} and reader.problems == {}
    assert_rows(reader.read("w0", 0, 16), make_rows(0, 16))


def test_a_folder_that_is_claimed_later_is_followed_then(tmp_path):
    log = LogWriter(tmp_path, "late", SHAPE, rows_per_append=4, segment_appends=3, info={"n": 7}, claim=False)
    for append in range(4):
        log.append(make_rows(4 * append, 4))
    reader = LogReader(tmp_path, SHAPE)
    assert reader.heads() == {} and reader.problems == {}
    with pytest.raises(ValueError, match="never reused"):
        writer(tmp_path, "late")
    log.claim()
    assert reader.heads() == {"late": 16} and reader.problems == {} and reader.info("late") == {"n": 7}
    assert_rows(reader.read("late", 0, 16), make_rows(0, 16))
    with pytest.raises(ValueError, match="never reused"):
        log.claim()


def test_a_full_disk_refuses_appends_and_keeps_committed_ones(tmp_path):
    log = writer(tmp_path)
    log.append(make_rows(0, 4))
    for _ in range(2):
        with files_of_at_most(64), pytest.raises(OSError, match=r"append of rows 4 to 7 .* too large"):
            log.append(make_rows(4, 4))
    for _ in range(3):
        log.append(make_rows(log.next_row, 4))
    reader = LogReader(tmp_path, SHAPE)
    assert reader.heads() == {"w0": 16}
    assert_rows(reader.read("w0", 0, 16), make_rows(0, 16))


def test_an_append_that_landed_unnoticed_is_acknowledged_once(tmp_path, monkeypatch):
    log = writer(tmp_path)
    log.append(make_rows(0, 4))
    commit = Segment.append

    def commit_then_fail(*arguments):
        commit(*arguments)
        raise ValueError("UNAVAILABLE: the reply was lost")

    with monkeypatch.context() as patch:
        patch.setattr(Segment, "append", commit_then_fail)
        with pytest.raises(OSError, match="may be appended again"):
            log.append(make_rows(4, 4))
    assert log.next_row == 4
    with pytest.raises(OSError, match="committed after all"):
        log.append(make_rows(4, 4) | {"reward": np.full(4, 99, np.float32)})
    log.append(make_rows(4, 4))
    log.append(make_rows(8, 4))
    assert_rows(LogReader(tmp_path, SHAPE).read("w0", 0, 12), make_rows(0, 12))
