"""Lines of JSON that are whole, torn, or nonsense; and grants, which are counted over all trainers of a run."""

import pytest

from tba_jax.storage import layout


@pytest.mark.parametrize("line", ["", "{", "[1]", "null", "[" * 100_000, "1" * 5000, '{"step": ' + "1" * 5000 + "}", "\ufffd"])
def test_a_line_that_is_no_object_leaves_the_others(tmp_path, line):
    (tmp_path / "x.jsonl").write_text(f'{{"step": 1}}\n{line}\n{{"step": 2}}\n')
    assert [each["step"] for each in layout.each(tmp_path / "x.jsonl")] == [1, 2]


@pytest.mark.parametrize("content", [b"", b'{"number": 1'], ids=["empty", "cut"])
def test_a_torn_grant_is_written_anew_and_still_lets_searchers_go_on(tmp_path, content):
    run = layout.RunDir(tmp_path)
    for step, number in ((0, 1), (0, 2), (7, 3)):
        layout.give_grant(run, step=step)
        assert layout.grants_given(run) == number and layout.read_json(run.grant)["step"] == step
    run.grant.write_bytes(content)
    seen = layout.grants_given(run)
    layout.give_grant(run, step=0)
    assert layout.grants_given(run) not in (seen, 1)
