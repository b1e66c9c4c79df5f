"""The timeline of a role: which spans are there, in which lanes, and in how many bytes."""

import threading
import time

import pytest

# GONE ['timeline']
from tba_jax.run.cost import Cost
from tba_jax.run.timeline import Timeline

from tba_jax.telemetry.record import Record
from tba_jax.telemetry.time_account import TimeAccount


def made(folder, *, megabytes: float = 1.0) -> Timeline:
    return Timeline(folder, megabytes=megabytes, cost=Cost())


def spans(folder) -> list[tuple[str, str, float, float]]:
    """(lane, name, begin in unix seconds, seconds) of all spans in the file."""
    return [
        (line["lane"], name, line["at"] + begin, seconds)
        for line in timeline.each_line(folder)
        for name, begin, seconds in line["spans"]
    ]


def test_measured_time_is_on_the_timeline_at_the_hour_of_the_clock(tmp_path):
    record = Record(tmp_path / "trainer", timeline_megabytes=1.0)
    account, before = TimeAccount(record), time.time()
    with account.measure("update"):
        time.sleep(0.02)
    with pytest.raises(KeyError), account.measure("draw"):
        time.sleep(0.01)
        raise KeyError
    record.close("finished")
    (lane, first, begin, seconds), (_, second, later, _) = spans(tmp_path / "trainer")
    assert (lane, first, second) == ("main", "update", "draw")
    assert before - 0.01 < begin < before + 0.1 and 0.02 <= seconds < 0.2
    assert begin + seconds <= later + 0.001


def test_each_thread_has_a_lane(tmp_path):
    line = made(tmp_path)

    def work() -> None:
        with line.measure("publish"):
            time.sleep(0.01)

    thread = threading.Thread(target=work, name="publisher")
    thread.start()
    thread.join()
    line.note("checkpoint", 1.0, 2.0, lane="checkpoints")
    work()
    line.flush()
    assert [(lane, name) for lane, name, *_ in spans(tmp_path)] == [
        ("publisher", "publish"),
        ("checkpoints", "checkpoint"),
        ("main", "publish"),
    ]


def test_short_spans_are_joined_to_their_neighbour_or_left_out(tmp_path):
    line = made(tmp_path)
    line.note("draw", 1.0, 1.001)  # joined to the next
    line.note("draw", 1.0015, 1.003)
    line.note("journal", 1.003, 1.004)  # left out
    line.note("update", 1.004, 1.1)
    line.note("update", 1.2, 1.3)  # begins long after the last has ended
    line.note("draw", 1.3, 1.3005)  # left out, at the end
    line.flush()
    found = [(name, round(seconds, 4)) for _, name, _, seconds in spans(tmp_path)]
    assert found == [("draw", 0.003), ("update", 0.096), ("update", 0.1)]


def test_the_timeline_stays_within_its_megabytes_and_keeps_the_newest(tmp_path):
    line = made(tmp_path, megabytes=0.01)
    for second in range(2000):
        line.note("update", second, second + 0.5)
        if second % 10 == 0:
            line.flush()
    line.flush()
    size = sum(file.stat().st_size for file in tmp_path.iterdir())
    assert 0.004 * 2**20 < size < 0.011 * 2**20
    begins = [begin for _, _, begin, _ in spans(tmp_path)]
    assert begins == sorted(begins) and round(begins[-1] - begins[-2]) == 1
    assert round(begins[-1] + time.monotonic() - time.time()) == 1999


def test_zero_megabytes_switch_the_timeline_off(tmp_path):
    record = Record(tmp_path / "trainer", timeline_megabytes=0.0)
    record.timeline.note("update", 1.0, 2.0)
    record.close("finished")
    assert not list((tmp_path / "trainer").glob("timeline*"))


def test_a_torn_line_is_left_out_and_the_next_life_begins_a_line_of_its_own(tmp_path):
    for cut in (1, 20):
        line = made(tmp_path)
        line.note("update", 1.0, 2.0)
        line.flush()
        file = tmp_path / timeline.FILE
        file.write_bytes(file.read_bytes()[:-cut])
    again = made(tmp_path)
    again.note("draw", 3.0, 4.0)
    again.flush()
    assert [name for _, name, *_ in spans(tmp_path)] == ["update", "draw"]  # only the end of its line was lost of the first


def test_storage_that_refuses_or_is_away_stops_nobody(tmp_path):
    line = made(tmp_path / "gone")
    line.note("update", 1.0, 2.0)
    line.flush()
    assert not (tmp_path / "gone").exists() and not spans(tmp_path / "gone")
    (tmp_path / timeline.FILE).mkdir()  # open fails
    line = made(tmp_path)
    line.note("update", 1.0, 2.0)
    line.flush()


def test_storage_that_hangs_costs_bounded_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(timeline, "_MOST_WAITING", 100)
    line = made(tmp_path)
    for second in range(1000):
        line.note(f"batch {second}", second, second + 0.5)
    line.flush()
    found = [name for _, name, *_ in spans(tmp_path)]
    assert len(found) <= 100 and found[-1] == "batch 999"


def test_a_record_writes_by_itself_within_a_second_or_two(tmp_path):
    record = Record(tmp_path / "trainer", timeline_megabytes=1.0)
    record.timeline.note("update", 1.0, 2.0)
    end = time.monotonic() + 10
    while not spans(tmp_path / "trainer") and time.monotonic() < end:
        time.sleep(0.05)
    assert [name for _, name, *_ in spans(tmp_path / "trainer")] == ["update"]
    record.close("finished")
