"""The time in which devices wait for the host."""

import time

import pytest

from tba_jax.roles.trainer.account import TrainerAccount


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_devices_wait_from_a_result_to_the_next_dispatch_but_not_for_rows_or_snapshots(clock):
    account = TrainerAccount()
    account.is_dispatched()
    clock[0] += 4
    account.result_is_ready(clock[0] - 1)  # the devices were done before the host asked
    with account.measure("publish"):
        clock[0] += 3
    with account.measure("draw"):
        clock[0] += 0.5
    with account.measure("wait_rows"):
        clock[0] += 2
    account.is_dispatched()
    clock[0] += 0.5
    assert account.shares()["devices_wait_for_host"] == pytest.approx(1.5 / 10)


def test_an_account_that_is_restarted_counts_from_then_on(clock):
    account = TrainerAccount()
    account.is_dispatched()
    account.result_is_ready(clock[0])
    with account.measure("checkpoint"):
        clock[0] += 5
    account.restart()
    clock[0] += 1
    account.is_dispatched()
    clock[0] += 3
    assert account.shares()["devices_wait_for_host"] == pytest.approx(1 / 4)
