"""The epoch lease: one trainer at a time, takeovers, and what a stale one is told."""

import concurrent.futures
import contextlib
import os
import resource
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tba_jax.run import processes
from tba_jax.storage import fenced, places
from tba_jax.storage.fenced import StaleEpoch
from tba_jax.storage.lease import EpochLease, LeaseHeld
from tba_jax.storage.places import Place


@pytest.fixture
def acquire() -> Iterator[Callable[..., EpochLease]]:
    with contextlib.ExitStack() as stack:
        yield lambda *args, **options: stack.enter_context(contextlib.closing(EpochLease.acquire(*args, **options)))


def edit(place: Place, **changes) -> None:
    """The next version of the lease, by its holder."""
    found = fenced.read(place)
    assert fenced.replace(place, found, found.value | changes, epoch=found.epoch) is not None


def held(place: Place, **changes) -> None:
    """The lease of epoch 1 of another holder."""
    EpochLease.acquire(place).release()
    edit(place, **{"released": False} | changes)


def test_a_run_is_held_until_its_trainer_is_killed(tmp_path, acquire):
    lease = tmp_path / "lease"
    holder = subprocess.Popen(["sleep", "60"])
    started = Path(f"/proc/{holder.pid}/stat").read_text().rpartition(")")[2].split()[19]
    held(lease, pid=holder.pid, pid_start=started)
    try:
        with pytest.raises(LeaseHeld, match=rf"{tmp_path} is held .*process {holder.pid} on host .*epoch 1"):
            EpochLease.acquire(lease)
    finally:
        holder.kill()
    # Not waited for yet: a zombie holds nothing.
    os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)
    assert acquire(lease).epoch == 2
    holder.wait()
    with pytest.raises(LeaseHeld, match=str(os.getpid())):
        EpochLease.acquire(lease)


def test_a_released_lease_is_free_at_once_and_a_stale_one_is_told(tmp_path):
    first = EpochLease.acquire(tmp_path / "lease")
    first.check()
    first.release()
    second = EpochLease.acquire(tmp_path / "lease")
    assert (first.epoch, second.epoch) == (1, 2)
    second.check()
    with pytest.raises(StaleEpoch, match=r"holds epoch 1 .*epoch 2 has been taken"):
        first.check()
    second.release()


# Of the holder of epoch 1: what else it says, and whether it is known to be dead.
HOLDERS = {
    "a process id that was used again": ({"pid_start": "1"}, True),
    "another host, whatever its clock": ({"host": "other", "heartbeat": 0.0}, False),
    "before a restart of the host": ({"boot_id": "other"}, False),
    "another container": ({"pid_namespace": "other"}, False),
}


@pytest.mark.parametrize("name", HOLDERS)
def test_a_holder_that_may_live_elsewhere_has_its_time_to_live_on_our_clock(root, acquire, name):
    changes, dead = HOLDERS[name]
    if root.__class__ is not places.Bucket:
        root.mkdir()
    held(root / "lease", **changes)
    begin = time.monotonic()
    assert acquire(root / "lease", ttl_seconds=60 if dead else 0.4).epoch == 2
    assert (0.0 if dead else 0.39) < time.monotonic() - begin < 20


@pytest.mark.parametrize("take", [EpochLease.acquire, EpochLease.refuse_if_held])
def test_a_living_holder_elsewhere_is_not_disturbed_however_old_its_clock(tmp_path, take):
    """Its renewals count, and no time that it tells."""
    held(tmp_path / "lease", host="other", heartbeat=time.time() - 7200)
    renewal = threading.Timer(0.3, lambda: edit(tmp_path / "lease", host="other"))
    renewal.start()
    with pytest.raises(LeaseHeld, match=r"on host other \(epoch 1\), which renews its lease; stop it first"):
        take(tmp_path / "lease", ttl_seconds=3)
    renewal.join()


def test_the_lease_is_renewed(tmp_path):
    place = tmp_path / "lease"
    lease = EpochLease.acquire(place, ttl_seconds=0.1)
    first, deadline = fenced.read(place), time.monotonic() + 5
    while (later := fenced.read(place)).number <= (1, 12):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert later.value == first.value and later.value["pid"] == os.getpid() and not later.value["released"]
    lease.release()
    assert fenced.read(place).value["released"]
    assert len(list(place.iterdir())) <= 4  # while versions come and go, a listing may show more


def test_a_lease_that_a_full_disk_refused_is_not_there_and_a_damaged_one_is_waited_for(tmp_path, acquire):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        with pytest.raises(OSError, match="large"):
            EpochLease.acquire(tmp_path / "lease")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list((tmp_path / "lease").iterdir())
    held(tmp_path / "lease")
    for file in (tmp_path / "lease").iterdir():
        file.write_text("")
    begin = time.monotonic()
    assert acquire(tmp_path / "lease", ttl_seconds=0.3).epoch == 2 and time.monotonic() - begin > 0.29


def test_a_lease_that_was_lost_goes_on_above_the_epochs_of_the_journal(tmp_path, acquire):
    assert acquire(tmp_path / "lease", after=7).epoch == 8


def test_the_lease_tells_its_successor_of_the_journal(tmp_path, acquire):
    first = EpochLease.acquire(tmp_path / "lease")
    assert first.journal == {}
    first.journals(3, workdir=tmp_path)
    first.reached(5)
    first.release()
    second = acquire(tmp_path / "lease")
    assert second.journal == {"epoch": 1, "step": 5, "workdir": str(tmp_path), "host": second.journal["host"]}


def test_many_contenders_get_one_lease(tmp_path):
    start = threading.Barrier(4)

    def contend(_) -> EpochLease | None:
        start.wait()
        with contextlib.suppress(LeaseHeld):
            return EpochLease.acquire(tmp_path / "lease")
        return None

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        (lease,) = [lease for lease in pool.map(contend, range(4)) if lease is not None]
    assert lease.epoch == 1
    lease.release()


def test_a_lease_is_neither_renewed_held_nor_released_in_the_folder_of_another_run(tmp_path):
    own, away, other = tmp_path / "run", tmp_path / "away", tmp_path / "other"
    for folder in (own, other):
        folder.mkdir()
    lease, others = (EpochLease.acquire(folder / "lease", ttl_seconds=0.15) for folder in (own, other))
    others.release()
    theirs = fenced.read(other / "lease")
    own.rename(away)
    other.rename(own)
    time.sleep(0.2)
    with pytest.raises(processes.RunIsAway, match="holds another run"):
        lease.check()
    own.rename(other)
    away.rename(own)
    lease.check()
    own.rename(away)
    other.rename(own)
    lease.release()
    assert fenced.read(own / "lease") == theirs
