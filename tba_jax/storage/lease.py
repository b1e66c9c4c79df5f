"""The lease: one trainer at a time for the place where a run's roles meet, under epochs that only grow.

It is a fenced value in the shared place, so a copied workdir meets the same lease. Its holder writes the next version now and
then. Another trainer takes it over where no version has come for the time to live on that trainer's own clock; the kernel tells
at once whether a holder on this machine lives.
"""

import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tba_jax.run import processes
from tba_jax.storage import fenced
from tba_jax.storage.fenced import StaleEpoch, Version
from tba_jax.storage.places import Place

log = logging.getLogger(__name__)


class LeaseHeld(RuntimeError):
    """Another trainer holds the lease."""


class EpochLease:
    """A held lease; a thread renews it until `release` or `close`.

    Attributes: epoch. journal: {"epoch", "step", "workdir", "host"}, of the newest journal of the run: the epoch of its last
    file, a step that it holds, and where it is; {} before the first.
    """

    def __init__(self, place: Place, version: Version, ttl_seconds: float):
        """Use `acquire`."""
        self.epoch, self.journal = version.epoch, dict(version.value["journal"])
        self._place, self._facts = place, version.value
        self._ttl_seconds, self._confirmed = ttl_seconds, time.monotonic()
        self._lock = threading.Lock()  # one version follows the other
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="epoch-lease", daemon=True)
        self._thread.start()

    @staticmethod
    def refuse_if_held(place: Place, *, ttl_seconds: float = 30.0) -> None:
        """Waits and raises LeaseHeld as `acquire` would, without taking anything."""
        _wait_or_refuse(place, ttl_seconds)

    @classmethod
    def acquire(cls, place: Place, *, after: int = 0, ttl_seconds: float = 30.0) -> "EpochLease":
        """Takes the next epoch. Raises LeaseHeld where the holder is alive on this host, or renews the lease elsewhere.

        Args: place: `RunDir.lease`. after: an epoch that was taken, should the lease be lost. ttl_seconds: a holder elsewhere
          counts as gone where it has not renewed the lease for so long; the call waits for it.
        """
        while True:
            before = _wait_or_refuse(place, ttl_seconds)
            facts = {"id": uuid.uuid4().hex, **_this_process(), "released": False, "journal": _facts(before).get("journal", {})}
            made = fenced.replace(place, before, facts, epoch=max(before.epoch, after) + 1)
            if made is not None:  # else another trainer took this epoch in the meantime, and its lease is looked at
                return cls(place, made, ttl_seconds)

    def check(self, *, anew: bool = False) -> None:
        """Raises StaleEpoch if a later trainer has taken over. Looks at storage only where the last renewal is a while ago: what
        a trainer shows is fenced by itself. Args: anew: looks in any case: while a host is suspended, its clock stands still."""
        if anew or self._stop.is_set() or time.monotonic() - self._confirmed > self._ttl_seconds / 2:
            self._look()

    def journals(self, step: int, *, workdir: Path) -> None:
        """The journal in `workdir` has a file of this epoch, and goes on after `step`. Returns once the lease tells so."""
        self.journal = {"epoch": self.epoch, "step": step, "workdir": str(workdir), "host": self._facts["host"]}
        self._write()

    def reached(self, step: int) -> None:
        """The journal holds this step; the next version tells so."""
        self.journal = {**self.journal, "step": step}

    def close(self) -> None:
        """Ends the thread. The next trainer finds the lease as after a kill, unless it was released."""
        self._stop.set()
        self._thread.join()

    def release(self) -> None:
        """Ends the lease so that the next trainer need not wait. Writes nothing where another trainer or run is in its place."""
        self.close()
        try:
            self._write(released=True)
        except (StaleEpoch, processes.RunIsAway):
            return

    def _look(self) -> Version:
        """The lease, which is this one's. Raises StaleEpoch, or RunIsAway where it is of another run."""
        found = fenced.read(self._place)
        fenced.refuse_stale(self._place, found, self.epoch)
        if _facts(found).get("id") != self._facts["id"]:
            self._confirmed = 0.0
            raise processes.RunIsAway(f"{self._place.parent} is not there, or holds another run: the lease in it is of others")
        self._confirmed = time.monotonic()
        return found

    def _write(self, *, released: bool = False) -> None:
        with self._lock:
            facts = self._facts | {"released": released, "journal": self.journal}
            if fenced.replace(self._place, self._look(), facts, epoch=self.epoch) is None:
                self._look()

    def _renew(self) -> None:
        while not self._stop.wait(self._ttl_seconds / 3):
            try:
                self._write()
            except (OSError, StaleEpoch):
                # The next beat tries again; a lease that was lost meanwhile shows in `check`.
                self._confirmed = 0.0


def _facts(version: Version) -> Mapping[str, Any]:
    """What the holder says; {} where nobody has held the lease, or it is damaged."""
    return version.value if isinstance(version.value, dict) else {}


def _wait_or_refuse(place: Place, ttl_seconds: float) -> Version:
    """The lease, once nobody holds it. Raises LeaseHeld if its holder is alive."""
    first = found = fenced.read(place)
    begin, here, told = time.monotonic(), _this_process(), False
    while found.epoch and not _facts(found).get("released"):
        holder = _facts(found)
        who = f"process {holder.get('pid')} on host {holder.get('host')}" if holder else "a process that the damaged lease lacks"
        who += f" (epoch {found.epoch})"
        if all(holder.get(name) == here[name] for name in ("host", "boot_id", "pid_namespace")):
            if _is_alive(holder["pid"], holder["pid_start"]):
                raise LeaseHeld(f"workdir {place.parent} is held by {who}, which is running; stop it first")
            break
        if found.number != first.number:
            raise LeaseHeld(f"workdir {place.parent} is held by {who}, which renews its lease; stop it first")
        if (wait := begin + ttl_seconds - time.monotonic()) <= 0:
            break
        if not told:
            log.info("workdir %s is held by %s; unless renewed, its lease runs out in %.0f s", place.parent, who, wait)
            told = True
        time.sleep(min(wait, ttl_seconds / 30))
        found = fenced.read(place, found)
    return found


def _this_process() -> dict[str, Any]:
    return {
        "host": socket.gethostname(),
        "boot_id": _read_proc("/proc/sys/kernel/random/boot_id"),
        "pid_namespace": _pid_namespace(),
        "pid": os.getpid(),
        "pid_start": _pid_start(os.getpid()),
    }


def _read_proc(path: str) -> str:
    """Content of a file of /proc; empty where there is none (macOS)."""
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _pid_start(pid: int) -> str:
    """When a process started, in clock ticks since boot; "dead" for a zombie, empty where it is gone or unknown."""
    # The process name in parentheses may hold spaces: count fields from behind it.
    fields = _read_proc(f"/proc/{pid}/stat").rpartition(")")[2].split()
    if not fields:
        return ""
    return "dead" if fields[0] in "ZX" else fields[19]


def _is_alive(pid: int, pid_start: str) -> bool:
    if pid_start:
        return _pid_start(pid) == pid_start
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
