"""Lines of JSON that are whole, torn, or nonsense."""

import pytest

from tba_jax.storage import layout


@pytest.mark.parametrize("line", ["", "{", "[1]", "null", "[" * 100_000, "1" * 5000, '{"step": ' + "1" * 5000 + "}", "\ufffd"])
def test_a_line_that_is_no_object_leaves_the_others(tmp_path, line):
    (tmp_path / "x.jsonl").write_text(f'{{"step": 1}}\n{line}\n{{"step": 2}}\n')
    assert [each["step"] for each in layout.each(tmp_path / "x.jsonl")] == [1, 2]
