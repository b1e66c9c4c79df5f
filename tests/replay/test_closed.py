"""Closed writers: what they cost a checkpoint, and that who comes again goes on where it was."""

import json

import pytest

from tba_jax.replay.closed import CLOSED_AT_ONCE, ClosedWriters


def test_a_checkpoint_grows_by_a_name_for_thousands_of_closed_writers(tmp_path):
    closed = ClosedWriters()
    for number in range(3 * CLOSED_AT_ONCE + 7):
        closed.close(f"w{number}", number + 1, base=0, counts={"seen": number + 1})
    for writer, rows in (("w5", 6), (f"w{3 * CLOSED_AT_ONCE}", 3 * CLOSED_AT_ONCE + 1)):  # one of a file, and one that is not
        assert closed.reopen(writer) == rows
    closed.seal(tmp_path / "closed")
    state = json.dumps(closed.state())
    assert len(state) < 600 and len([*(tmp_path / "closed").iterdir()]) == 3
    closed.seal(tmp_path / "closed")
    assert json.dumps(closed.state()) == state
    again = ClosedWriters.restore(json.loads(state), tmp_path / "closed", is_open={"w5": 9})
    assert again.heads == closed.heads and len(again.heads) == 3 * CLOSED_AT_ONCE + 5 and again.counts == closed.counts
    again.close("w5", 9, base=6, counts={"seen": 3})
    assert again.heads["w5"] == 9 and again.counts["rows"] == closed.counts["rows"] + 3
    assert again.counts["writers"] == closed.counts["writers"]
    file = next((tmp_path / "closed").iterdir())
    file.write_bytes(file.read_bytes().replace(b"1", b"2", 1))
    with pytest.raises(ValueError, match="is damaged: restore it"):
        ClosedWriters.restore(json.loads(state), tmp_path / "closed", is_open={})
