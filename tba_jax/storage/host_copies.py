"""Copies of a bucket's snapshots on a disk of the host: its searchers and evaluators download each snapshot once, and map it.

The copies lie in `<temporary folder>/tba_jax-<user>/<digest of the place>/`, each under the name of its snapshot, which no other
snapshot ever has. One reader at a time downloads: it holds the lock of `.turn`, which the kernel takes from a process that dies,
writes a draft and renames it. The others wait while the draft grows. A reader keeps a shared lock of `.readers`: who has none
beside it reads from the bucket, and who leaves last removes the copies. On Linux a process that has mapped a file keeps its pages
when the file is removed, so a copy may go at any time: a reader that loses one reads from the bucket.
"""

import concurrent.futures
import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import stat
import tempfile
import time
import weakref
from collections.abc import Callable, Container
from pathlib import Path
from typing import TypeVar

from tba_jax.storage import file_systems, places, snapshots
from tba_jax.storage.places import Bucket, Place

log = logging.getLogger(__name__)

# A reader whose turn is not coming, while nothing is downloaded for so many seconds, reads from the bucket.
PATIENCE_SECONDS, POLL_SECONDS = 30.0, 0.1
# As many copies lie on the disk at most; those that were opened last stay.
COPIES = 3
_REQUESTS_IN_FLIGHT = 32

T = TypeVar("T")


class HostCopies:
    """The copies of one run's snapshots, for one reader. Where there can be none, a sentence says so, and it reads the bucket."""

    def __init__(self, policies: Bucket, *, kept: Callable[[], Container[str]]):
        """Args: kept: the names of the snapshots that the pointer names; copies of others go."""
        self._policies, self._kept, self._told = policies, kept, False
        self._folder: Path | None = None
        try:
            user = _private(Path(tempfile.gettempdir()) / f"tba_jax-{os.getuid()}")
            folder = user / hashlib.blake2b(str(policies).encode(), digest_size=8).hexdigest()
            for other in set(user.iterdir()) - {folder}:
                _clear(other)  # what a run left whose readers were killed
            folder.mkdir(exist_ok=True)
            self._readers = os.open(folder / ".readers", os.O_RDWR | os.O_CREAT, 0o600)
            weakref.finalize(self, _leave, folder, self._readers)
            _locked(self._readers, fcntl.LOCK_SH)
            self._folder = folder
        except OSError as error:
            self._tell(error)

    def read(self, load: Callable[[Callable[[Place], Place]], T]) -> T:
        """Returns `load(nearby)`; `nearby` gives for the folder of a snapshot in the bucket the place at which to open it.

        Where a copy is damaged, it is removed, and `load` is called again with the bucket. Raises as `load`.
        """
        used: list[Path] = []

        def nearby(folder: Place) -> Place:
            copy = self._copy(folder) if isinstance(folder, Bucket) else None
            used.extend([copy] if copy else [])
            return copy or folder

        try:
            return load(nearby)
        except snapshots.Damaged as error:
            if not used:
                raise
            log.warning("a copy on this host is damaged: %s. It is removed, and the snapshot is read from the bucket", error)
        for copy in used:
            places.remove_tree(copy)
        return load(lambda folder: folder)

    def _copy(self, folder: Bucket) -> Path | None:
        """The copy of a snapshot, made where it is missing; None: it is to be read from the bucket."""
        if self._folder is None or not _locked(self._readers, fcntl.LOCK_SH):
            return None
        copy = self._folder / folder.name
        try:
            with open(self._folder / ".turn", "a") as turn:
                self._wait(turn.fileno(), copy)
                if not copy.is_dir():
                    if self._is_alone():
                        return None
                    self._download(folder, copy, turn.fileno())
            os.utime(copy)
        except FileNotFoundError:  # the snapshot, or the folder of copies, was removed meanwhile
            return None
        except OSError as error:
            self._tell(error)
            return None
        return copy

    def _wait(self, turn: int, copy: Path) -> None:
        """Returns once the copy is there, or this reader has the turn. Raises TimeoutError."""
        seen, since = 0, time.monotonic()
        while not copy.is_dir() and not _locked(turn, fcntl.LOCK_EX):
            if seen != (now := os.fstat(turn).st_mtime_ns):
                seen, since = now, time.monotonic()
            elif time.monotonic() - since > PATIENCE_SECONDS:
                raise TimeoutError(f"another process has downloaded nothing to {copy.parent} for {PATIENCE_SECONDS:.0f} seconds")
            time.sleep(POLL_SECONDS)

    def _is_alone(self) -> bool:
        """Whether the host has no other reader of this run. Only the reader that has the turn may ask."""
        alone = _locked(self._readers, fcntl.LOCK_EX)
        _locked(self._readers, fcntl.LOCK_SH)  # a refused exclusive lock has cost the shared one
        return alone

    def _download(self, folder: Bucket, copy: Path, turn: int) -> None:
        """Raises OSError: there is no room, or the bucket refuses; FileNotFoundError: the snapshot was removed."""
        kept, there = self._kept(), [each for each in copy.parent.iterdir() if each.is_dir()]
        opened = sorted((each for each in there if each.name in kept), key=lambda each: each.stat().st_mtime)
        for each in {*there} - {*opened[1 - COPIES :]}:  # also drafts of readers that were killed
            places.remove_tree(each)
        names, draft = places.files_in(folder), copy.parent / f".{copy.name}"
        if not all(part.strip(".") for name in names for part in name.split("/")):
            raise OSError(f"{folder} holds objects whose names lead out of it")
        if (room := file_systems.free(copy.parent)) is not None and room < len(names) * snapshots.CHUNK_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(copy.parent))

        def fetch(name: str) -> None:
            content = places.read_bytes(folder / name)
            (draft / name).parent.mkdir(parents=True, exist_ok=True)
            (draft / name).write_bytes(content)
            os.utime(turn)

        try:
            with concurrent.futures.ThreadPoolExecutor(_REQUESTS_IN_FLIGHT) as pool:
                for _ in pool.map(fetch, names):  # the first error cancels the requests that wait
                    pass
            draft.rename(copy)
        finally:
            places.remove_tree(draft)

    def _tell(self, error: OSError) -> None:
        if not self._told:
            log.warning(
                "%s: this process reads snapshots from %s itself; TMPDIR names another folder for the copies that a host shares",
                error,
                self._policies,
            )
        self._told = True


def _private(folder: Path) -> Path:
    """The folder, made where it is missing. Raises OSError: it is not this user's alone, or cannot be made."""
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{folder} must be a folder of mode 700 that belongs to user {os.getuid()}")
    return folder


def _locked(descriptor: int, kind: int) -> bool:
    """Whether the lock could be had at once. It ends with the process, or when the file is closed."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _clear(folder: Path) -> None:
    """Removes the copies in a folder that has no reader."""
    with open(folder / ".readers", "a") as readers:
        if _locked(readers.fileno(), fcntl.LOCK_EX):
            for each in folder.iterdir():
                if each.is_dir():
                    places.remove_tree(each)


def _leave(folder: Path, readers: int) -> None:
    os.close(readers)
    with contextlib.suppress(FileNotFoundError):  # somebody has emptied the temporary folder
        _clear(folder)
