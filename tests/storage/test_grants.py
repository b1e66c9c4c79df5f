"""Grants, which are counted over all trainers of a run."""

import pytest

from tba_jax.storage import grants, layout


def test_a_damaged_file_is_named(tmp_path):
    run = layout.RunDir(tmp_path)
    layout.write_json(run.grant, [])
    with pytest.raises(ValueError, match=r"grant\.json holds no number"):
        grants.number(run)


@pytest.mark.parametrize("content", [b"", b'{"number": 1'], ids=["empty", "cut"])
def test_a_torn_file_is_written_anew_and_still_lets_searchers_go_on(tmp_path, content):
    """Whoever waits has seen a number that is not the next one."""
    run = layout.RunDir(tmp_path)
    assert grants.number(run) == 0
    for step, number in ((0, 1), (0, 2), (7, 3)):
        grants.give(run, step=step)
        assert grants.number(run) == number and layout.read_json(run.grant)["step"] == step
    run.grant.write_bytes(content)
    seen = grants.number(run)
    grants.give(run, step=0)
    assert grants.number(run) not in (seen, 1)
