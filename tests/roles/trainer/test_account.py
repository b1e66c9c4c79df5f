"""The time in which devices wait for the host."""

import time

import pytest

from tba_jax.roles.trainer.trainer import TrainerAccount

# What the host does, (what, seconds or when the update ends), and the seconds in which the devices waited of all of them.
# "done": the host waited for the update; "looks": it looks whether that is done; another word: time that is measured as such.
STORIES = {
    "from the end of an update to the next dispatch, but not for rows or snapshots": (
        [("update", 3), ("idle", 3), ("done", 0), ("publish", 3), ("draw", 0.5), ("wait_rows", 2), ("update", 9), ("idle", 1.5)],
        (0.5, 10),
    ),
    "from when the update was last seen under way, where it ended beside host work": (
        [("update", 2.5), ("integrate", 2), ("draw", 1), ("journal", 1), ("looks", 0), ("done", 0), ("update", 9), ("idle", 6)],
        (2, 10),
    ),
    "without compiling, wherever the update ended": (
        [("update", 0.5), ("compile", 6), ("idle", 1), ("update", 3), ("compile", 2), ("idle", 1), ("done", 0)],
        (1, 10),
    ),
    "from a restart on": (
        [("update", 1), ("idle", 1), ("done", 0), ("checkpoint", 5), ("restart", 0), ("idle", 1), ("update", 9), ("idle", 3)],
        (1, 4),
    ),
}


@pytest.mark.parametrize("name", STORIES)
def test_devices_wait(monkeypatch, name):
    story, (waited, total) = STORIES[name]
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    account = TrainerAccount()
    for what, seconds in story:
        match what:
            case "update":
                account.is_dispatched(lambda end=now[0] + seconds: now[0] >= end)
            case "idle":
                now[0] += seconds
            case "done":
                account.is_done_now()
            case "looks":
                account.look()
            case "restart":
                account.restart()
            case _:
                with account.measure(what):
                    now[0] += seconds
    assert account.shares()["devices_wait_for_host"] == pytest.approx(waited / total)
