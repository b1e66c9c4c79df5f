"""What a role says of itself, as the supervisor reads it."""

import time

from tba_jax.run import status


def test_what_is_said_is_read(tmp_path):
    told = status.Status(tmp_path)
    assert status.read(tmp_path) == status.Told() == status.read(tmp_path / "nobody")
    told.waits("rows", seconds=42.0)
    told.trouble("no row has a reward")
    read = status.read(tmp_path)
    assert (read.waits, read.trouble) == ("rows", "no row has a reward") and 41 <= read.seconds <= 44
    told.waits("", seconds=0.0)
    told.trouble("")
    assert status.read(tmp_path) == status.Told()


def test_a_sentence_that_changes_all_the_time_is_written_now_and_then(tmp_path):
    now = time.time()
    told = status.Status(tmp_path, clock=lambda: now)
    told.waits("rows, 1 s", seconds=1.0)
    told.waits("rows, 2 s", seconds=2.0)
    assert status.read(tmp_path).waits == "rows, 1 s"
    now += 2.5
    told.waits("rows, 5 s", seconds=5.0)
    assert status.read(tmp_path).waits == "rows, 5 s"


def test_storage_that_refuses_stops_nobody(tmp_path):
    told = status.Status(tmp_path / "gone")
    told.waits("rows", seconds=1.0)
    assert not (tmp_path / "gone").exists()
    (tmp_path / "status.json").write_text('{"waits": "ro')
    assert status.read(tmp_path) == status.Told()
