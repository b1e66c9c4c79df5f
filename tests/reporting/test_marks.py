"""Events of all roles as marks with a step and a time."""

import json

import numpy as np

from tba_jax.reporting import marks
from tba_jax.reporting.marks import Mark


def events(folder, *found):
    folder.mkdir()
    (folder / "events.jsonl").write_text("".join(json.dumps(each) + "\n" for each in found) + '{"time": 3, "ev')


def test_events_of_all_roles_come_in_the_order_of_time(tmp_path):
    events(
        tmp_path / "trainer", {"time": 5.0, "event": "publish", "step": 2}, {"time": 1.0, "event": "start", "step": 0, "pid": 7}
    )
    events(tmp_path / "searcher-0", {"time": 6.0, "event": "swap", "step": 2}, {"time": "x", "event": "swap"}, {"event": "end"})
    found = marks.read({role: tmp_path / role for role in ("trainer", "searcher-0", "absent")})
    assert [(mark.role, mark.kind) for mark in found.marks] == [
        ("trainer", "start"),
        ("trainer", "publish"),
        ("searcher-0", "swap"),
    ]
    assert found.counts == {"publish": 1, "swap": 1, "start": 1} and found.starts_of("trainer") == [1.0]


def test_very_many_marks_are_thinned_evenly(tmp_path):
    many = [{"time": float(i), "event": "publish", "step": i} for i in range(10_000)]
    events(tmp_path / "trainer", *many, {"time": 5.5, "event": "resume", "step": 5})
    found = marks.read({"trainer": tmp_path / "trainer"})
    published = [mark.step for mark in found.marks if mark.kind == "publish"]
    assert len(published) == marks.MOST_OF_A_KIND and published[0] == 0 and published[-1] == 9_999
    assert max(np.diff(published)) <= 35 and found.counts == {"publish": 10_000, "resume": 1}


def test_a_mark_gets_the_time_or_step_that_it_lacks_from_the_trainer():
    given = [
        Mark(time=np.nan, step=15, role="trainer", kind="checkpoint"),
        Mark(time=119.0, step=4, role="searcher-0", kind="swap"),
        Mark(time=105.0, step=-1, role="searcher-0", kind="start"),
    ]
    found = marks.placed(given, np.array([0.0, 10.0, 20.0]), np.array([100.0, 110.0, 130.0]))
    assert [(mark.kind, mark.time, mark.step) for mark in found] == [
        ("start", 105, 5),
        ("swap", 119, 14),
        ("checkpoint", 120, 15),
    ]
    assert [mark.kind for mark in marks.placed(given, np.zeros(0), np.zeros(0))] == ["swap", "start"]
