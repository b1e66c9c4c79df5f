"""The time in which devices wait for the host."""

import time

import pytest

from tba_jax.roles.trainer.account import TrainerAccount


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


class Update:
    """An update that ends at a moment of the clock."""

    def __init__(self, clock, *, end):
        self._clock, self._end = clock, end

    def is_done(self):
        return self._clock[0] >= self._end


def test_devices_wait_from_the_end_of_an_update_to_the_next_dispatch_but_not_for_rows_or_snapshots(clock):
    account = TrainerAccount()
    account.is_dispatched(Update(clock, end=103.0).is_done)
    clock[0] = 103.0  # the host waited for it
    account.is_done_now()
    with account.measure("publish"):
        clock[0] += 3
    with account.measure("draw"):
        clock[0] += 0.5
    with account.measure("wait_rows"):
        clock[0] += 2
    account.is_dispatched(Update(clock, end=109.5).is_done)
    clock[0] += 1.5
    assert account.shares()["devices_wait_for_host"] == pytest.approx(0.5 / 10)


def test_an_update_that_ended_beside_host_work_counts_as_done_when_it_was_last_seen_under_way(clock):
    account = TrainerAccount()
    account.is_dispatched(Update(clock, end=102.5).is_done)
    with account.measure("integrate"):
        clock[0] += 2
    with account.measure("draw"):
        clock[0] += 1  # ends here, in the middle
    with account.measure("journal"):
        clock[0] += 1
    account.look()
    account.is_done_now()
    account.is_dispatched(Update(clock, end=110.0).is_done)
    clock[0] += 6
    assert account.shares()["devices_wait_for_host"] == pytest.approx(2 / 10)


def test_an_update_that_ended_where_nothing_is_measured_counts_likewise(clock):
    account = TrainerAccount()
    account.is_dispatched(Update(clock, end=101.0).is_done)
    clock[0] += 3
    account.look()
    clock[0] += 1
    account.is_done_now()
    account.is_dispatched(Update(clock, end=110.0).is_done)
    clock[0] += 4
    assert account.shares()["devices_wait_for_host"] == pytest.approx(4 / 8)


def test_a_compilation_is_left_out_wherever_the_update_ended(clock):
    account = TrainerAccount()
    account.is_dispatched(Update(clock, end=100.5).is_done)
    with account.measure("compile"):
        clock[0] += 6
    clock[0] += 1
    account.is_dispatched(Update(clock, end=110.0).is_done)
    with account.measure("compile"):  # all of it beside the update
        clock[0] += 2
    clock[0] = 110.0
    account.is_done_now()
    shares = account.shares()
    assert shares["devices_wait_for_host"] == pytest.approx(1 / 10) and shares["time_compile"] == pytest.approx(8 / 10)


def test_an_account_that_is_restarted_counts_from_then_on(clock):
    account = TrainerAccount()
    account.is_dispatched(Update(clock, end=101.0).is_done)
    clock[0] += 1
    account.is_done_now()
    with account.measure("checkpoint"):
        clock[0] += 5
    account.restart()
    clock[0] += 1
    account.is_dispatched(Update(clock, end=120.0).is_done)
    clock[0] += 3
    assert account.shares()["devices_wait_for_host"] == pytest.approx(1 / 4)
