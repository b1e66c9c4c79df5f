"""Reading logs beside foreign content."""

import json

import pytest

from tba_jax.replay.reader import LogReader
from tba_jax.trajectory import RowShape
from tests.support.tiny_log import SHAPE, make_rows, writer


def test_foreign_content_and_other_schemas_are_problems(tmp_path):
    (tmp_path / "foreign").mkdir()
    writer(tmp_path, "good").append(make_rows(0, 4))
    register = tmp_path / "writers"
    (register / "notes.txt").write_text("hello")
    (register / ".w9.json.tmp").write_text("")
    (register / "list.json").write_text("[]")
    (register / "bare.json").write_text(json.dumps({"schema": {"layout": "packed-columns-1", "rows_per_append": 4}}))
    described = json.loads((register / "good.json").read_text())
    (register / "old.json").write_text(json.dumps({"schema": described["schema"] | {"layout": "named-columns-0"}}))
    writer(tmp_path, "longer", RowShape(prompt_length=4, response_length=9, reward_parts=("a", "b")))
    writer(tmp_path, "parts", RowShape(prompt_length=4, response_length=6, reward_parts=("a", "c")))
    reader = LogReader(tmp_path, SHAPE)
    for _ in range(2):  # what is told does not depend on when one looks
        assert reader.heads() == {"good": 4}
        assert set(reader.problems) == {"notes.txt", "list", "bare", "old", "longer", "parts"}
        assert "layout 'named-columns-0', this version reads 'packed-columns-1'" in reader.problems["old"]
        assert "segment_appends" in reader.problems["bare"] and "['a', 'c']" in reader.problems["parts"]
        assert "policy_step" in reader.problems["longer"] and "prompt_length" not in reader.problems["longer"]
    with pytest.raises(ValueError, match="policy_step"):
        reader.read("longer", 0, 4)
