"""Rows of a searcher's batches as tables show them: what was asked, answered and rewarded."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tba_jax.tasks.interface import EncodedQuery
from tba_jax.telemetry.metrics import MetricWriter


@dataclasses.dataclass(frozen=True)
class Samples:
    """The rows of one batch. texts: B responses, to B queries; columns: of the rows, with their rewards."""

    texts: Sequence[str] = ()
    queries: Sequence[EncodedQuery] = ()
    columns: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)

    def table(self, most: int) -> list[dict[str, Any]]:
        """So many rows of the batch at most, of queries as different as may be."""
        count = min(most, len(self.texts))
        return [self._row(i * len(self.texts) // count) for i in range(count)]

    def _row(self, i: int) -> dict[str, Any]:
        columns, query, reward = self.columns, self.queries[i].query, float(self.columns["reward"][i])
        return {
            "query": query.prompt,
            "response": self.texts[i],
            "answer": query.answer,
            "reward": None if math.isnan(reward) else reward,
            "finished": bool(columns["finished"][i]),
            "tokens": int(columns["response_length"][i]),
            "policy_logprob_sum": float(columns["policy_logprobs"][i].sum()),
            "ref_logprob_sum": float(columns["ref_logprobs"][i].sum()),
            "policy_step": int(columns["policy_step"][i].max()),
        }


class SampleTables:
    """Shows rows of the first batch, and then of every so many, in the trackers of a searcher."""

    def __init__(self, writer: MetricWriter, config: Any):
        c = config.metrics
        self._writer, self._most, self._every = writer, c.samples if writer.shows_tables else 0, c.samples_every_batches
        self._batches = 0

    def note(self, samples: Samples, *, policy_step: int) -> None:
        """Called once for each batch. Args: policy_step: of the weights in use when it was decoded."""
        if self._most and self._batches % self._every == 0:
            self._writer.table("samples", policy_step, samples.table(self._most))
        self._batches += 1
