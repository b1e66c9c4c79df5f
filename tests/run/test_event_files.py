"""TensorBoard events whose oldest files give way."""

import itertools
import time

import numpy as np
import pytest

from tba_jax.telemetry import metrics
from tba_jax.telemetry.metrics import MetricWriter


def size(folder) -> int:
    return sum(path.stat().st_size for path in folder.glob("events.out.tfevents.*"))


def steps_that_tensorboard_shows(folder) -> list[int]:
    accumulation = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="tensorboard is not installed"
    )
    found = accumulation.EventAccumulator(str(folder), size_guidance={accumulation.SCALARS: 0})
    found.Reload()
    assert {"loss", "staleness"} <= {*found.Tags()["scalars"], *found.Tags()["histograms"]}
    return [event.step for event in found.Scalars("loss")]


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes points to 0.1 MB of events, each flushed at once."""
    monkeypatch.setattr(metrics, "FLUSH_SECONDS", 0.0)

    def write_points(steps, megabytes=0.1):
        writer = MetricWriter(tmp_path, event_megabytes=megabytes)
        for step in steps:
            writer.write(
                step, {"loss": step / 2, **dict.fromkeys(map("figure{}".format, range(20)), 1.0)}, {"staleness": np.ones(3)}
            )
            yield step
        writer.close()

    return write_points


def test_events_are_bounded_at_any_time_and_tensorboard_reads_their_files_as_one_run(tmp_path, write):
    largest = max(size(tmp_path) for _ in write(range(1000)))
    files = sorted(tmp_path.glob("events.out.tfevents.*"))
    assert size(tmp_path) > 0.08e6 and largest < 0.11e6 and len(files) > 5
    shown = steps_that_tensorboard_shows(tmp_path)
    assert shown == list(range(1000 - len(shown), 1000)) and 40 < len(shown) < 900
    # The lines keep every point.
    assert [line["step"] for line in metrics.read_lines(tmp_path)] == list(range(1000))


def test_a_writer_that_starts_again_keeps_what_there_is_room_for(tmp_path, write):
    """Lives shorter than the clock of file names, too."""
    for first in range(0, 60, 5):
        assert len(list(write(range(first, first + 5)))) == 5
    assert steps_that_tensorboard_shows(tmp_path) == list(range(60))
    assert list(write([60], megabytes=0.02)) == [60]
    shown = steps_that_tensorboard_shows(tmp_path)
    assert size(tmp_path) < 0.025e6 and shown == list(range(61 - len(shown), 61)) and len(shown) > 5


def test_a_wall_clock_that_steps_back_does_not_make_the_newest_file_the_oldest(tmp_path, write, monkeypatch):
    points = write(range(1000))
    for _ in itertools.islice(points, 500):
        pass
    before, clock = {*tmp_path.glob("events.out.tfevents.*")}, time.time
    monkeypatch.setattr(time, "time", lambda: clock() - 3600)
    for _ in itertools.islice(points, 20):
        pass
    newest = {*tmp_path.glob("events.out.tfevents.*")} - before
    assert all(path.stat().st_size for path in newest) and size(tmp_path) < 0.11e6
    assert len([*points]) == 480


def test_many_starts_leave_few_files_and_every_point(tmp_path, write):
    for step in range(200):
        assert list(write([step], megabytes=4.0)) == [step]
    assert len(list(tmp_path.glob("events.out.tfevents.*"))) == 1
    assert steps_that_tensorboard_shows(tmp_path) == list(range(200))
    for step in range(200, 260):
        assert list(write([step])) == [step]
    assert len(list(tmp_path.glob("events.out.tfevents.*"))) <= 9 and size(tmp_path) < 0.11e6
    shown = steps_that_tensorboard_shows(tmp_path)
    assert shown == list(range(260 - len(shown), 260)) and len(shown) > 40


@pytest.mark.parametrize("tail", ["torn", "zeros"])
def test_what_a_kill_tore_is_left_out_by_the_next_start(tmp_path, write, tail):
    assert list(write(range(5))) == list(range(5))
    (file,) = tmp_path.glob("events.out.tfevents.*")
    whole = file.read_bytes()
    file.write_bytes(whole + whole[:37] if tail == "torn" else whole + bytes(64))
    assert list(write([5])) == [5]
    assert steps_that_tensorboard_shows(tmp_path) == list(range(6))


def test_files_that_somebody_removes_are_begun_anew(tmp_path, write):
    points = write(range(10))
    for step in points:
        if step == 4:
            for file in tmp_path.glob("events.out.tfevents.*"):
                file.unlink()
    assert steps_that_tensorboard_shows(tmp_path) == [6, 7, 8, 9]
    assert [line["step"] for line in metrics.read_lines(tmp_path)] == list(range(10))


def test_a_writer_goes_on_in_a_folder_that_is_moved(tmp_path, monkeypatch):
    monkeypatch.setattr(metrics, "FLUSH_SECONDS", 0.0)
    folder = tmp_path / "metrics" / "trainer"
    folder.parent.mkdir()
    writer = MetricWriter(folder, event_megabytes=1.0)
    (tmp_path / "metrics").rename(tmp_path / "away")
    writer.write(1, {"loss": 1.0}, {"staleness": np.ones(3)})
    writer.close()
    assert not (tmp_path / "metrics").exists()
    assert steps_that_tensorboard_shows(tmp_path / "away" / "trainer") == [1]
