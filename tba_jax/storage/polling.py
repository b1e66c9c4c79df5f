"""How often a role asks shared storage for news, and how many requests it sends: an object store charges for each."""

import math
import os
import time
from collections.abc import Sequence
from pathlib import Path

import tensorstore as ts

from tba_jax.storage import places
from tba_jax.storage.places import Bucket, Place

# A writer without news for QUIET_SECONDS (most have ended) is asked every QUIET_POLL_SECONDS at first, then ever less often.
QUIET_SECONDS = 60.0
QUIET_POLL_SECONDS = 5.0
LONGEST_POLL_SECONDS = 1800.0
# A folder that changed so recently may change again without another time of change; and now and then one is listed anyway.
_SETTLED_SECONDS = 5.0
_RELIST_SECONDS = 60.0
_LIST_SECONDS = 10.0  # of an object store
BURST_SECONDS = 10.0
# Keys in one reply of an object store.
_PAGE = 1000
# What tensorstore calls the counters of requests that an object store charges for.
_COUNTED = tuple(f"/tensorstore/kvstore/{driver}/{kind}" for driver in ("s3", "gcs") for kind in ("read", "write", "list"))


def pause_seconds(quiet: float) -> float:
    """Until a writer is asked again that has had no news for `quiet` seconds: a twelfth of that, 0 after news of late."""
    return 0.0 if quiet < QUIET_SECONDS else min(max(quiet / 12, QUIET_POLL_SECONDS), LONGEST_POLL_SECONDS)


class Allowance:
    """Requests to object stores that look for news: so many a minute, of which a burst may take those of BURST_SECONDS."""

    def __init__(self, per_minute: float):
        self._per_minute, self._left, self._at = per_minute, per_minute * BURST_SECONDS / 60, time.monotonic()

    def left(self) -> int:
        """How many may be sent now."""
        now = time.monotonic()
        saved = self._left + (now - self._at) * self._per_minute / 60
        self._left, self._at = min(saved, self._per_minute * BURST_SECONDS / 60), now
        return max(int(self._left), 0)

    def spend(self, count: int) -> None:
        self._left -= count


class WatchedFolder:
    """A folder whose names are asked for again and again. pages: requests of an object store that a listing takes."""

    def __init__(self, folder: Place, allowance: Allowance):
        self._folder, self._allowance = folder, allowance
        self._stamp: tuple[int, int] | None = None
        self._changed = self._listed = -math.inf
        self.pages = 1

    def names(self, *, always: bool) -> list[str] | None:
        """The names in the folder; None where they are those of the last call, as far as a cheap look tells.

        A local folder is listed when its time of change is another. One of an object store is listed every ten seconds, and as
        much less often as its names take more replies.
        """
        now = time.monotonic()
        if isinstance(self._folder, Path):
            stamp = _time_of_change(self._folder)
            if stamp != self._stamp:
                self._stamp, self._changed = stamp, now
            settled = now - self._changed > _SETTLED_SECONDS and now - self._listed < _RELIST_SECONDS
            if settled and not always:
                return None
            self._listed = now
            return places.names_in(self._folder)
        early = now - self._listed < self.pages * _LIST_SECONDS
        if not always and (early or not self._allowance.left()):
            return None
        names = places.names_in(self._folder)
        self._listed, self.pages = now, 1 + len(names) // _PAGE
        self._allowance.spend(self.pages)
        return names

    def list_again(self) -> None:
        """The next call of `names` lists the folder."""
        self._changed, self._listed = time.monotonic(), -math.inf


def _time_of_change(folder: Path) -> tuple[int, int] | None:
    """When a local folder changed, and its inode; None where it cannot be opened. Opening makes NFS ask its server."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return None
    try:
        found = os.fstat(descriptor)
    finally:
        os.close(descriptor)
    return found.st_mtime_ns, found.st_ino


def sent() -> int:
    """Requests of this process so far, as tensorstore counts them; a listing counts as one, whatever its length."""
    found = ts.experimental_collect_matching_metrics("/tensorstore/kvstore/")
    return sum(int(each["values"][0]["value"]) for each in found if each["name"] in _COUNTED)


class RequestRate:
    """The rate of requests between two calls of `scalars`."""

    def __init__(self, places: Sequence[Place]):
        """Args: places: of the role; where none of them is in an object store, there is no rate."""
        self._counts = any(isinstance(each, Bucket) for each in places)
        self._at, self._sent = time.monotonic(), sent() if self._counts else 0

    def scalars(self) -> dict[str, float]:
        """For the metrics: storage_requests_per_minute since the last call; {} where there is no rate."""
        if not self._counts:
            return {}
        now, count = time.monotonic(), sent()
        rate = 60 * (count - self._sent) / max(now - self._at, 1e-9)
        self._at, self._sent = now, count
        return {"storage_requests_per_minute": rate}
