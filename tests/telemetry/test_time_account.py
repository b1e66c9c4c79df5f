"""Shares of a role's time."""

import time

import pytest

from tba_jax.telemetry.record import TimeAccount


def test_shares_of_time_are_those_of_the_clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    account = TimeAccount()

    def work(name: str, seconds: float) -> None:
        with account.measure(name):
            now[0] += seconds

    work("wait", 1.0)
    work("update", 2.0)
    now[0] += 0.5
    work("wait", 0.5)
    assert account.shares() == pytest.approx({"time_wait": 1.5 / 4, "time_update": 0.5, "time_other": 0.125})
    with pytest.raises(KeyError), account.measure("draw"):
        now[0] += 4.0
        raise KeyError
    assert account.shares()["time_draw"] == pytest.approx(0.5)
    account.restart()
    work("wait", 3.0)
    assert account.shares() == pytest.approx({"time_wait": 1.0, "time_other": 0.0})
