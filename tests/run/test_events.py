"""The events of a role."""

# GONE ['events']
from tba_jax.run.cost import Cost

from tba_jax.telemetry.record import Record


def test_events_are_read_in_their_order_with_all_their_fields(tmp_path):
    now = 1000.0
    told = events.Events(tmp_path, cost=Cost(), clock=lambda: now)
    told.tell("start", step=0, pid=7)
    now = 1001.25
    told.tell("publish", step=4)
    assert events.read(tmp_path) == [
        {"time": 1000.0, "event": "start", "step": 0, "pid": 7},
        {"time": 1001.25, "event": "publish", "step": 4},
    ]
    assert events.read(tmp_path / "nobody") == []


def test_a_torn_event_is_left_out(tmp_path):
    events.Events(tmp_path, cost=Cost()).tell("start", step=0)
    file = tmp_path / events.FILE
    file.write_bytes(file.read_bytes() + b'{"time": 1, "event": "publ')
    events.Events(tmp_path, cost=Cost()).tell("start", step=2)
    assert [event["step"] for event in events.read(tmp_path)] == [0, 2]


def test_storage_that_refuses_stops_nobody(tmp_path):
    events.Events(tmp_path / "gone", cost=Cost()).tell("start", step=0)
    assert not (tmp_path / "gone").exists()
    events.Events(None, cost=Cost()).tell("start", step=0)


def test_the_end_is_told_once(tmp_path):
    record = Record(tmp_path / "trainer")
    record.step = 3
    record.close("stopped")
    record.close("finished")
    (end,) = events.read(tmp_path / "trainer")
    assert (end["event"], end["step"], end["reason"]) == ("end", 3, "stopped")
