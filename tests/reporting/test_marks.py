"""Events of all roles as marks with a step and a time."""

import numpy as np

from tba_jax.reporting import marks
from tba_jax.reporting.marks import Mark
from tba_jax.telemetry.status import Status


def test_the_newest_starts_and_the_ends_are_what_roles_say(tmp_path):
    folders = {role: tmp_path / role for role in ("trainer", "searcher-0", "absent")}
    for role, phase, started in (("trainer", "finished", 5.0), ("searcher-0", "", 3.0)):
        folders[role].mkdir()
        Status(folders[role], process={"started": started, "host": "here"}).close(phase)
    found = marks.read(folders)
    assert [start["role"] for start in found.starts] == ["searcher-0", "trainer"] and found.starts_of("trainer") == [5.0]
    assert not marks.has_ended(folders)
    Status(folders["searcher-0"]).close("stopped")
    assert marks.has_ended(folders)


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
