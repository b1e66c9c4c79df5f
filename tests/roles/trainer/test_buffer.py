"""The replay buffer of a trainer."""

import pytest

from tba_jax.replay.reader import LogReader
from tests.support import frozen_runs

pytestmark = pytest.mark.usefixtures("one_device")


def test_one_reader_serves_resume_steps_and_expiry(tmp_path, frozen, monkeypatch):
    s = frozen(tmp_path / "run", replay__retention="checkpoints")
    frozen_runs.train(s, until=6, abandon=True)  # a checkpoint of step 5 to restore, a step to do again
    made, init = [], LogReader.__init__

    def counted(reader: LogReader, *arguments, **settings) -> None:
        made.append(reader)
        init(reader, *arguments, **settings)

    monkeypatch.setattr(LogReader, "__init__", counted)
    assert int(frozen_runs.train(s, until=12, abandon=False).step) == 12
    assert len(made) == 1
