"""The alarm: sampler's and learner's log-probs of the same tokens by the same weights must agree.

Trajectory balance would train on without notice if a mask, a position or a precision differed between the two.
"""

import logging

import jax
import numpy as np

from tba_jax import sharding, trajectory
from tba_jax.learner import update
from tba_jax.learner.state import Batch, batch_from_rows
from tba_jax.models import kv_cache, parameters
from tba_jax.replay.index import ReplayIndex
from tba_jax.run import snapshots
from tba_jax.run.places import Place

log = logging.getLogger(__name__)

# Policy steps, the newest first, that are looked at for rows whose weights were not swapped midway.
_STEPS_TRIED = 16
_ROWS_LOOKED_AT = 1024  # of each
# Nats per token that sampler and learner may differ by, by compute dtype.
_LIMITS = {"float32": 1e-3, "bfloat16": 0.1}


class LogprobGap:
    """Compares stored log-probs with those of the learner, on the newest snapshot that produced rows as a whole."""

    def __init__(
        self, config: update.LearnerConfig, mesh: jax.sharding.Mesh, policies: Place, *, sampler_weights: str, limit: float
    ):
        """Args: policies: snapshots; sampler_weights: "full" | "int8", as searchers round them; limit: nats, 0 = by dtype."""
        self._config, self._mesh, self._policies, self._sampler_weights = config, mesh, policies, sampler_weights
        self._limit = limit or _LIMITS[config.policy.model.compute_dtype]
        self._score = sharding.on_mesh(mesh, jax.jit(self._score_snapshot))

    def _score_snapshot(self, snapshot: parameters.Params, frozen: parameters.Params, batch: Batch) -> jax.Array:
        """float32[B, R]: log-probs by a snapshot; rounded as searchers round it, if they do."""
        policy = self._config.policy
        if self._sampler_weights == "full":
            model = policy.for_training(snapshot, frozen)
        else:
            rounded = kv_cache.define(policy.model, self._sampler_weights, unstacked=False)
            model = parameters.module(rounded.graphdef, policy.for_sampling(snapshot, frozen, self._sampler_weights))
        return update.score(model, batch, config=self._config)[0]

    def _rows_of(
        self, step: int, index: ReplayIndex, usable: np.ndarray
    ) -> tuple[int, parameters.Params, trajectory.Rows] | None:
        """The published parameters of a step and a micro-batch of rows that they produced from the first token to the last.

        None where the snapshot is gone, or weights were swapped in all rows: those attend to keys and values of other weights,
        which scoring does not make.
        """
        slots = usable[index.row_step[usable] == step][:_ROWS_LOOKED_AT]
        rows = index.gather(slots)
        mask = trajectory.response_mask(rows["response_length"], rows["policy_step"].shape[1])
        whole = (np.where(mask, rows["policy_step"], step) == step).all(axis=1)
        if not whole.any():
            return None
        policy = self._config.policy
        specs, shardings = policy.trained_specs, policy.trained_shardings(self._mesh)
        try:
            snapshot = snapshots.load_step(self._policies, step, specs, shardings, dtype=policy.snapshot_dtype)
        except FileNotFoundError:
            return None
        return step, snapshot, index.gather(np.resize(slots[whole], self._config.micro_batch_rows))

    def measure(self, index: ReplayIndex, usable: np.ndarray, frozen: parameters.Params) -> dict[str, float]:
        """Largest and mean gap in nats per token, and whether it is an alarm; {} where there is nothing to compare.

        Args:
          usable: int64[n], slots of resident rows that name snapshots of this run.
        """
        steps = np.unique(index.row_step[usable])[::-1].tolist()
        found = next(filter(None, (self._rows_of(step, index, usable) for step in steps[:_STEPS_TRIED])), None)
        if found is None:
            if steps:
                log.warning("no resident row was made by one snapshot alone that is still there: log-probs are not compared")
            return {}
        step, snapshot, rows = found
        mask = trajectory.response_mask(rows["response_length"], rows["policy_step"].shape[1])
        logprobs = np.asarray(self._score(snapshot, frozen, sharding.put_rows(self._mesh, batch_from_rows(rows))))
        gap = np.abs(logprobs - rows["policy_logprobs"])[mask]
        if not gap.size:
            return {}
        worst = float(gap.max())
        alarm = not worst <= self._limit  # NaN is an alarm
        if alarm:
            log.error(
                "ALARM: sampler and learner disagree by %.2g nats on a token of policy step %d (limit %.2g, "
                "learner.logprob_gap_limit): a mask, a position or a precision differs",
                worst,
                step,
                self._limit,
            )
        return {"logprob_gap_max": worst, "logprob_gap_mean": float(gap.mean()), "logprob_gap_alarm": float(alarm)}
