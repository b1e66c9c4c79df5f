"""How much roles compute, and the shares of what their devices could compute and read at most; requests to object stores."""

import dataclasses
import logging
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import tensorstore as ts

from tba_jax.models import hardware
from tba_jax.models.config import DecoderConfig
from tba_jax.packing.row_layout import Plan
from tba_jax.storage.places import Bucket, Place
from tba_jax.telemetry.metrics import Peaks, peaks_of

log = logging.getLogger(__name__)

# What tensorstore calls the counters of requests that an object store charges for.
_COUNTED = tuple(f"/tensorstore/kvstore/{driver}/{kind}" for driver in ("s3", "gcs") for kind in ("read", "write", "list"))


@dataclasses.dataclass(frozen=True)
class Work:
    """What updates, or a sampler, have computed.

    tokens: prompts and responses of updates, a prompt once for the rows that share it; drawn tokens of a sampler. computed: these
    with padding, or with idle slots. flops: of `tokens`, without recomputation; a sampler's with the prompts and the scoring by
    the reference. bytes: that decode steps must read, see decoding/requests.py.
    """

    tokens: int = 0
    computed: int = 0
    flops: int = 0
    bytes: int = 0

    def __add__(self, other: "Work") -> "Work":
        return Work(*(a + b for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)))

    def __sub__(self, other: "Work") -> "Work":
        return Work(*(a - b for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)))

    def shares(self, seconds: float, peaks: Peaks) -> dict[str, float]:
        """mfu and bandwidth_share of devices that took so long, where their peak is known and there was such work."""
        found = {"mfu": (self.flops, peaks.flops), "bandwidth_share": (self.bytes, peaks.bandwidth)}
        return {name: done / seconds / peak for name, (done, peak) in found.items() if done and peak}


def of_plan(plan: Plan, model: DecoderConfig, *, responses: int, passes: int) -> Work:
    """The work of one update. Args: responses: tokens of its responses; passes: see hardware.passes."""
    pieces = [
        (piece.first, piece.first + piece.size) for part in plan.parts for way in part for laid in way for piece in laid.pieces
    ]
    begins, ends = np.array(pieces, np.int64).reshape(-1, 2).T
    dense = 2 * (hardware.layer_weights(model) * plan.useful_tokens + hardware.head_weights(model) * responses)
    attended = hardware.attention_flops(model, ends) - hardware.attention_flops(model, begins)
    return Work(plan.useful_tokens, plan.computed_tokens, passes * (dense + attended))


def policy_peaks(mesh: jax.sharding.Mesh, config: Any) -> Peaks:
    """The peaks of the devices of a role's policy."""
    return peaks_of(mesh.devices.ravel().tolist(), flops=config.metrics.peak_flops, bandwidth=config.metrics.peak_bandwidth)


class WorkRates:
    """The rates between two points of a trainer's metrics, by the clock: time in which it waits, compiles or publishes counts."""

    def __init__(self, peaks: Peaks):
        """Args: peaks: of all devices of the trainer."""
        self._peaks = peaks
        self._before: tuple[float, Work] | None = None
        self._now: tuple[float, Work] | None = None

    def take(self, work: Work) -> None:
        """Called when an update is done. The first one begins the first span: it waited for rows and for a compiler.

        Args: work: of all updates of this process so far.
        """
        self._now = time.monotonic(), work
        self._before = self._before or self._now

    def scalars(self) -> dict[str, Any]:
        """tokens_per_second, computed_tokens_per_second, and mfu where the peak is known, of the span since the last call."""
        if self._now is None or self._before is None or self._now == self._before:
            return {}
        (begin, before), (end, after) = self._before, self._now
        self._before = self._now
        seconds, done = max(end - begin, 1e-9), after - before
        rates = {"tokens_per_second": done.tokens / seconds, "computed_tokens_per_second": done.computed / seconds}
        return rates | done.shares(seconds, self._peaks)


def sent() -> int:
    """Requests of this process so far, as tensorstore counts them; a listing counts as one, whatever its length."""
    found = ts.experimental_collect_matching_metrics("/tensorstore/kvstore/")
    return sum(int(each["values"][0]["value"]) for each in found if each["name"] in _COUNTED)


class RequestRate:
    """The rate of requests between two calls of `scalars`."""

    def __init__(self, used: Sequence[Place]):
        """Args: used: places of the role; where none of them is in an object store, there is no rate."""
        self._counts = any(isinstance(each, Bucket) for each in used)
        self._at, self._sent = time.monotonic(), sent() if self._counts else 0

    def scalars(self) -> dict[str, float]:
        """storage_requests_per_minute since the last call; {} where there is no rate."""
        if not self._counts:
            return {}
        now, count = time.monotonic(), sent()
        rate = 60 * (count - self._sent) / max(now - self._at, 1e-9)
        self._at, self._sent = now, count
        return {"storage_requests_per_minute": rate}


class ShapesLog:
    """Logs each shape of packed rows that a program is called with for the first time: every one of them is compiled."""

    def __init__(self, program: str):
        self._program = program
        self._seen: set[int] = set()

    def knows(self, plan: Plan) -> bool:
        """Whether there was a call with rows of this shape."""
        return plan.sequences in self._seen

    def note(self, plan: Plan) -> bool:
        """A call with the rows of a plan. Returns whether their shape is new."""
        if self.knows(plan):
            return False
        self._seen.add(plan.sequences)
        told = "%s: compiled for %d sequences (%d of at most 8 shapes; %.0f %% of the tokens are of rows)"
        log.info(told, self._program, plan.sequences, len(self._seen), 100 * plan.useful)
        return True
