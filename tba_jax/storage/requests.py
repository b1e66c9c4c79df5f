"""How many requests a process sends to object stores, which charge for each."""

import time
from collections.abc import Sequence

import tensorstore as ts

from tba_jax.storage.places import Bucket, Place

_COUNTED = tuple(f"/tensorstore/kvstore/{driver}/{kind}" for driver in ("s3", "gcs") for kind in ("read", "write", "list"))


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
