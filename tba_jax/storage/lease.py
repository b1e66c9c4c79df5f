"""The epoch lease: exactly one trainer in a workdir.

`epoch-000001.lease` is created exclusively by the trainer that takes epoch 1; a trainer whose epoch is no longer the highest must
stop. The kernel tells whether a holder on this machine lives, and a holder on another machine shows it by its heartbeat. Clocks
differ: a heartbeat of the last hour has half of `ttl_seconds` to be renewed, however old it looks.
"""

import logging
import os
import re
import socket
import threading
import time
from pathlib import Path
from typing import Any

from tba_jax.run import processes
from tba_jax.storage import layout, places

log = logging.getLogger(__name__)

_LEASE_NAME = re.compile(r"epoch-(\d{6})\.lease")
# The clock of a working host is never further behind than this.
_LARGEST_CLOCK_DIFFERENCE = 3600.0


class LeaseHeld(RuntimeError):
    """Another trainer holds the workdir."""


class StaleEpoch(RuntimeError):
    """A later trainer has taken over."""


class EpochLease:
    """A held lease; a thread renews its heartbeat until `release` or `close`."""

    def __init__(self, folder: Path, epoch: int, holder: dict[str, Any], ttl_seconds: float):
        """Use `acquire`."""
        self.epoch = epoch
        self._folder = folder
        self._holder = holder
        self._ttl_seconds = ttl_seconds
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="epoch-lease", daemon=True)
        self._thread.start()

    @staticmethod
    def refuse_if_held(folder: Path, *, ttl_seconds: float = 30.0) -> None:
        """Waits and raises LeaseHeld as `acquire` would, without taking anything."""
        if current := _highest_epoch(folder) if folder.is_dir() else 0:
            _wait_or_refuse(folder, current, ttl_seconds)

    @classmethod
    def acquire(cls, folder: Path, *, ttl_seconds: float = 30.0) -> "EpochLease":
        """Takes the next epoch. Raises LeaseHeld where the holder is alive on this host, or renews its heartbeat on another.

        Args: folder: `RunDir.journal`. ttl_seconds: a holder on another host counts as gone once its heartbeat is older than this
          and has not been renewed for half that time; the call waits for so long.
        """
        places.make_folder(folder)
        while True:
            current = _highest_epoch(folder)
            if current:
                _wait_or_refuse(folder, current, ttl_seconds)
            holder = {**_this_process(), "epoch": current + 1, "heartbeat": time.time(), "released": False}
            # Created with its content or not at all: a file without it, as a full disk leaves, would be waited for.
            # If another trainer took this epoch in the meantime, its lease is looked at.
            if layout.create_json(_path(folder, current + 1), holder):
                return cls(folder, current + 1, holder, ttl_seconds)

    def check(self) -> None:
        """Raises StaleEpoch if a later trainer has taken over."""
        highest = _highest_epoch(self._folder)
        if highest > self.epoch:
            raise StaleEpoch(
                f"this trainer holds epoch {self.epoch} of {self._folder.parent}, but epoch {highest} has been taken: "
                "another trainer took over while this one could not renew its lease; it must stop"
            )
        if not self._is_ours():
            raise processes.RunIsAway(f"{self._folder.parent} is not there, or holds another run: the lease in it is of others")

    def close(self) -> None:
        """Ends the thread. The next trainer finds the lease as after a kill, unless it was released."""
        self._stop.set()
        self._thread.join()

    def release(self) -> None:
        """Ends the lease so that the next trainer need not wait. Writes nothing where another run is in the place of this one."""
        self.close()
        if self._is_ours():
            layout.write_json(_path(self._folder, self.epoch), {**self._holder, "heartbeat": time.time(), "released": True})

    def _is_ours(self) -> bool:
        """Whether the file of the epoch is what this process wrote: another run may have come in the place of this one."""
        path = _path(self._folder, self.epoch)
        there = _read_holder(path) if path.exists() else {}
        return all(there.get(name) == self._holder[name] for name in ("host", "boot_id", "pid", "pid_start"))

    def _renew(self) -> None:
        while not self._stop.wait(self._ttl_seconds / 3):
            try:
                if self._is_ours():
                    layout.write_json(_path(self._folder, self.epoch), {**self._holder, "heartbeat": time.time()})
            except OSError:
                # The next beat tries again; a lease lost meanwhile shows in `check`.
                continue


def _path(folder: Path, epoch: int) -> Path:
    return folder / f"epoch-{epoch:06d}.lease"


def _highest_epoch(folder: Path) -> int:
    matches = (_LEASE_NAME.fullmatch(name) for name in os.listdir(folder))
    return max((int(match[1]) for match in matches if match), default=0)


def _read_holder(path: Path) -> dict[str, Any]:
    try:
        return layout.read_json(path)
    except ValueError:
        # The file was damaged since: its time stands for the heartbeat.
        return {"host": "unknown", "pid": "unknown", "heartbeat": path.stat().st_mtime}


def _wait_or_refuse(folder: Path, epoch: int, ttl_seconds: float) -> None:
    """Returns once nobody holds the epoch. Raises LeaseHeld if its holder is alive."""
    path = _path(folder, epoch)
    first = _read_holder(path)
    # The waiting is measured by our own clock too: the other host's may be hours off. Renewals come every third of ttl_seconds.
    begin = time.monotonic()
    here, told = _this_process(), False
    while True:
        holder = _read_holder(path)
        who = f"process {holder.get('pid')} on host {holder.get('host')} (epoch {epoch})"
        if holder.get("released"):
            return
        if all(holder.get(name) == here[name] for name in ("host", "boot_id", "pid_namespace")):
            if _is_alive(holder["pid"], holder["pid_start"]):
                raise LeaseHeld(f"workdir {folder.parent} is held by {who}, which is running; stop it first")
            return
        if first["host"] == "unknown":
            first = holder
        if holder["heartbeat"] != first["heartbeat"]:
            raise LeaseHeld(f"workdir {folder.parent} is held by {who}, which renews its lease; stop it first")
        age, waited = time.time() - holder["heartbeat"], time.monotonic() - begin
        patience = ttl_seconds / 2 if age < _LARGEST_CLOCK_DIFFERENCE else 0.0
        wait = max(patience - waited, min(ttl_seconds - age, ttl_seconds - waited))
        if wait <= 0:
            return
        if not told:
            log.info("workdir %s is held by %s; unless renewed, its lease runs out in %.0f s", folder.parent, who, wait)
            told = True
        time.sleep(min(wait, ttl_seconds / 30))


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
