"""How much roles compute, and the shares of what their devices could compute and read at most."""

import dataclasses
import logging
import time
from typing import Any

import jax
import numpy as np

from tba_jax.models import hardware
from tba_jax.models.config import DecoderConfig
from tba_jax.packing import Plan
from tba_jax.telemetry.metrics import Peaks, peaks_of

log = logging.getLogger(__name__)


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
