"""The epoch lease: one trainer at a time, takeovers, and what a stale one is told."""

import concurrent.futures
import contextlib
import json
import os
import resource
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tba_jax.run import processes
from tba_jax.storage import layout
from tba_jax.storage.lease import EpochLease, LeaseHeld, StaleEpoch


@pytest.fixture
def acquire() -> Iterator[Callable[..., EpochLease]]:
    with contextlib.ExitStack() as stack:
        yield lambda *args, **options: stack.enter_context(contextlib.closing(EpochLease.acquire(*args, **options)))


def lease_path(folder: Path, epoch: int = 1) -> Path:
    return folder / f"epoch-{epoch:06d}.lease"


def edit(path: Path, **changes):
    layout.write_json(path, layout.read_json(path) | changes)


def held(folder: Path, *, since: float = 0.0, **changes) -> Path:
    """The lease of epoch 1 of another holder, whose heartbeat was so many seconds ago."""
    EpochLease.acquire(folder).release()
    edit(lease_path(folder), **{"released": False, "heartbeat": time.time() - since} | changes)
    return lease_path(folder)


def test_a_run_is_held_until_its_trainer_is_killed(tmp_path, acquire):
    holder = subprocess.Popen(["sleep", "60"])
    started = Path(f"/proc/{holder.pid}/stat").read_text().rpartition(")")[2].split()[19]
    held(tmp_path, pid=holder.pid, pid_start=started)
    try:
        with pytest.raises(LeaseHeld, match=rf"{tmp_path.parent} is held .*process {holder.pid} on host .*epoch 1"):
            EpochLease.acquire(tmp_path)
    finally:
        holder.kill()
    # Not waited for yet: a zombie holds nothing.
    os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)
    assert acquire(tmp_path).epoch == 2
    holder.wait()
    with pytest.raises(LeaseHeld, match=str(os.getpid())):
        EpochLease.acquire(tmp_path)


def test_a_released_lease_is_free_at_once_and_a_stale_one_is_told(tmp_path):
    first = EpochLease.acquire(tmp_path)
    first.check()
    first.release()
    second = EpochLease.acquire(tmp_path)
    assert (first.epoch, second.epoch) == (1, 2)
    second.check()
    with pytest.raises(StaleEpoch, match=r"holds epoch 1 .*epoch 2 has been taken"):
        first.check()
    second.release()


# Of the holder of epoch 1: seconds since its heartbeat, and what else it says; the time to live; seconds that it is waited for.
HOLDERS = {
    "a process id that was used again": (0, {"pid_start": "1"}, 60, (0, 20)),
    "an old heartbeat of another host": (3601, {"host": "other"}, 60, (0, 20)),
    "before a restart of the host": (0.05, {"boot_id": "other"}, 0.2, (0.1, 20)),
    "another container": (0.05, {"pid_namespace": "other"}, 0.2, (0.1, 20)),
    "a slow clock has half the time to live": (1800, {"host": "other"}, 0.8, (0.3, 0.78)),
    "a fast clock": (-7200, {"host": "other"}, 0.2, (0.1, 20)),
    "nobody has written it": (0, None, 0.2, (0.1, 20)),
}


@pytest.mark.parametrize("name", HOLDERS)
def test_a_holder_that_may_live_elsewhere_is_waited_for(tmp_path, acquire, name):
    since, changes, ttl_seconds, (least, most) = HOLDERS[name]
    if changes is None:
        lease_path(tmp_path).write_text("")
    else:
        held(tmp_path, since=since, **changes)
    begin = time.monotonic()
    assert acquire(tmp_path, ttl_seconds=ttl_seconds).epoch == 2
    assert least < time.monotonic() - begin < most


@pytest.mark.parametrize(("take", "since"), [(EpochLease.acquire, 1800), (EpochLease.refuse_if_held, 0)])
def test_a_holder_elsewhere_that_renews_is_not_disturbed(tmp_path, take, since):
    path = held(tmp_path, since=since, host="other")
    renewal = threading.Timer(0.3, lambda: edit(path, heartbeat=time.time() - since))
    renewal.start()
    with pytest.raises(LeaseHeld, match=r"on host other \(epoch 1\), which renews its lease; stop it first"):
        take(tmp_path, ttl_seconds=3)
    renewal.join()


def test_the_heartbeat_is_renewed(tmp_path):
    lease = EpochLease.acquire(tmp_path, ttl_seconds=0.1)
    first, deadline = layout.read_json(lease_path(tmp_path)), time.monotonic() + 5
    while (later := layout.read_json(lease_path(tmp_path)))["heartbeat"] <= first["heartbeat"]:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert later["pid"] == os.getpid() and not later["released"]
    lease.release()
    assert layout.read_json(lease_path(tmp_path))["released"]


def test_a_lease_that_a_full_disk_refused_or_that_was_damaged_is_not_waited_for(tmp_path, acquire):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        with pytest.raises(OSError, match="large"):
            EpochLease.acquire(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(tmp_path.iterdir())
    lease_path(tmp_path).write_text(json.dumps({"released": True}))
    assert acquire(tmp_path).epoch == 2


def test_many_contenders_get_one_lease(tmp_path):
    start = threading.Barrier(4)

    def contend(_) -> EpochLease | None:
        start.wait()
        with contextlib.suppress(LeaseHeld):
            return EpochLease.acquire(tmp_path)
        return None

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        (lease,) = [lease for lease in pool.map(contend, range(4)) if lease is not None]
    assert lease.epoch == 1
    lease.release()


def test_a_lease_is_neither_renewed_held_nor_released_in_the_folder_of_another_run(tmp_path):
    own, away, other = tmp_path / "run", tmp_path / "away", tmp_path / "other"
    for folder in (own, other):
        folder.mkdir()
    lease, others = (EpochLease.acquire(folder / "journal", ttl_seconds=0.15) for folder in (own, other))
    others.release()
    edit(lease_path(other / "journal"), pid=1)
    theirs = lease_path(other / "journal").read_bytes()
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
    assert lease_path(own / "journal").read_bytes() == theirs
