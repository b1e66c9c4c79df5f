"""How much a trainer computes: tokens a second, and the share of what its devices could compute at most."""

import dataclasses
import logging
import time
from typing import Any

import jax
import numpy as np

from tba_jax.models import flops
from tba_jax.models.config import DecoderConfig
from tba_jax.packing.row_layout import Plan
from tba_jax.run.device_peaks import PEAKS

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Work:
    """Of updates. tokens: of prompts and responses, a prompt once for the rows that share it; computed: with padding. flops: of
    the former, forward and backward, without what is computed again to save memory."""

    tokens: int = 0
    computed: int = 0
    flops: int = 0

    def __add__(self, other: "Work") -> "Work":
        return Work(self.tokens + other.tokens, self.computed + other.computed, self.flops + other.flops)

    def __sub__(self, other: "Work") -> "Work":
        return Work(self.tokens - other.tokens, self.computed - other.computed, self.flops - other.flops)


def of_plan(plan: Plan, model: DecoderConfig, *, responses: int, passes: int) -> Work:
    """The work of one update. Args: responses: tokens of its responses; passes: see flops.passes."""
    pieces = [
        (piece.first, piece.first + piece.size) for part in plan.parts for way in part for laid in way for piece in laid.pieces
    ]
    begins, ends = np.array(pieces, np.int64).reshape(-1, 2).T
    dense = 2 * (flops.layer_weights(model) * plan.useful_tokens + flops.head_weights(model) * responses)
    attended = flops.attention_of(model, ends) - flops.attention_of(model, begins)
    return Work(plan.useful_tokens, plan.computed_tokens, passes * (dense + attended))


class WorkRates:
    """The rates between two points of a trainer's metrics, by the clock: time in which it waits, compiles or publishes counts."""

    def __init__(self, mesh: jax.sharding.Mesh):
        kind = mesh.devices.flat[0].device_kind
        peaks = PEAKS.get(kind)
        self._peak = mesh.devices.size * peaks.flops if peaks else 0.0
        if not peaks and mesh.devices.flat[0].platform != "cpu":
            log.info("the peak of %s is not known (tba_jax/run/device_peaks.py): the metrics have no mfu", kind)
        self._before: tuple[float, Work] | None = None
        self._now: tuple[float, Work] | None = None

    def take(self, work: Work) -> None:
        """Called when an update is done. The first one begins the first span: it waited for rows and for a compiler.

        Args: work: of all updates of this process so far.
        """
        self._now = time.monotonic(), work
        self._before = self._before or self._now

    def scalars(self) -> dict[str, Any]:
        """Of the span since the last call: tokens_per_second, computed_tokens_per_second, and mfu where the peak is known."""
        if self._now is None or self._before is None or self._now == self._before:
            return {}
        (begin, before), (end, after) = self._before, self._now
        self._before = self._now
        seconds, done = max(end - begin, 1e-9), after - before
        rates = {"tokens_per_second": done.tokens / seconds, "computed_tokens_per_second": done.computed / seconds}
        return rates | ({"mfu": done.flops / seconds / self._peak} if self._peak else {})
