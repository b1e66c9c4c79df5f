"""Segments that retention removes, and what readers make of it."""

import pytest

from tba_jax.replay.reader import LogReader
from tba_jax.replay.segment import RowsExpired, expired_segments, mend_expired, remove_segments
from tba_jax.storage import layout
from tests.support.tiny_log import SHAPE, assert_rows, make_rows, writer


def test_removed_segments_are_told_from_damage(tmp_path):
    log = writer(tmp_path)
    for append in range(13):
        log.append(make_rows(4 * append, 4))
    remove_segments(tmp_path, {"w0": [0, 2]})
    reader = LogReader(tmp_path, SHAPE)
    with pytest.raises(RowsExpired, match="writer w0: rows 4 to 11 were removed by retention") as told:
        reader.read_ids([("w0", 13), ("w0", 5)])
    assert (told.value.writer, told.value.start, told.value.stop) == ("w0", 4, 12)
    assert reader.heads() == {"w0": 52} and reader.kept("w0") == [range(12, 24), range(36, 52)]
    assert_rows(reader.read("w0", 36, 52), make_rows(36, 16))
    # Killed between the announcement and the removal: what is there still is not read, and the next call completes it.
    layout.write_json(tmp_path / "expired.json", {"expired": {"w0": [0, 1, 2]}, "removing": {"w0": [1]}})
    with pytest.raises(RowsExpired, match="rows 12 to 35"):
        LogReader(tmp_path, SHAPE).read("w0", 12, 24)
    remove_segments(tmp_path, {})
    assert sorted(p.name for p in (tmp_path / "w0").iterdir()) == ["000003", "000004"]
    names = layout.read_json(tmp_path / "expired.json")
    assert names == {"expired": {"w0": [0, 1, 2]}, "removing": {}}

    (tmp_path / "expired.json").write_text('{"expired": {"w0": [')
    with pytest.raises(ValueError, match=r"expired\.json is not valid JSON.*the run's trainer writes it again"):
        expired_segments(tmp_path)
    mend_expired(tmp_path)
    assert layout.read_json(tmp_path / "expired.json") == names
