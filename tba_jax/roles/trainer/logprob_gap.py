"""The alarm: the log-probs that sampler and learner give the same tokens under the same weights must agree.

Without it, trajectory balance would train on unnoticed if a mask, a position or a precision differed between the two.
"""

import concurrent.futures
import dataclasses
import itertools
import logging
from collections.abc import Mapping

import jax
import numpy as np

from tba_jax import sharding, trajectory
from tba_jax.learner import update
from tba_jax.learner.state import Batch, batch_from_rows
from tba_jax.models import kv_cache, parameters
from tba_jax.programs import Program
from tba_jax.replay.index import ReplayIndex
from tba_jax.run import snapshots
from tba_jax.run.places import Place

log = logging.getLogger(__name__)

# Policy steps that are tried, the newest first, until one has a row whose weights were not swapped midway.
_STEPS_TRIED = 16
_STEPS_LOADED = 2  # of those with rows, until a snapshot is there
_ROWS_OF_A_STEP = 1024  # that are looked at
# Nats per token that sampler and learner may differ by, by compute dtype.
_LIMITS = {"float32": 1e-3, "bfloat16": 0.1}


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Compared:
    """A snapshot of a step, in host memory, and a micro-batch of rows that it alone produced."""

    step: int
    snapshot: parameters.Params
    rows: trajectory.Rows


class LogprobGap:
    """Compares stored log-probs with the learner's, on rows that the newest possible snapshot alone produced."""

    def __init__(
        self,
        config: update.LearnerConfig,
        mesh: jax.sharding.Mesh,
        policies: Place,
        *,
        sampler_weights: str,
        compute_dtype: str,
        limit: float,
    ):
        """
        Args:
          policies: the folder of snapshots. sampler_weights: searchers.weights.
          compute_dtype: model.compute_dtype, in which searchers may compute even where this device cannot.
          limit: nats per token, 0 = by compute_dtype.
        """
        self._config, self._mesh, self._policies, self._sampler_weights = config, mesh, policies, sampler_weights
        self._limit = limit or _LIMITS[compute_dtype]
        self._score = sharding.on_mesh(mesh, jax.jit(self._score_snapshot))
        self._on_devices = config.policy.trained_shardings(mesh)
        self._in_host_memory = jax.tree.map(lambda x: x.with_memory_kind(sharding.PINNED_HOST), self._on_devices)
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="logprob-gap")
        self._loading: concurrent.futures.Future[_Compared | None] | None = None

    def _score_snapshot(self, snapshot: parameters.Params, frozen: parameters.Params, batch: Batch) -> jax.Array:
        """float32[B, R]: log-probs under the weights of a snapshot, which are rounded as searchers round them."""
        policy = self._config.policy
        if self._sampler_weights == "full":
            model = policy.for_training(snapshot, frozen)
        else:
            rounded = kv_cache.define(policy.model, self._sampler_weights, unstacked=False)
            model = parameters.module(rounded.graphdef, policy.for_sampling(snapshot, frozen, self._sampler_weights))
        return update.score(model, batch, config=self._config)[0]

    def programs(self, frozen: parameters.Params, batch: Batch) -> dict[str, Program]:
        """Name -> the program of `take`. Args: shapes of the frozen weights, and of a batch of any size."""
        snapshot = self._config.policy.snapshot_shapes(self._mesh)
        rows = self._config.limits.full_rows
        micro = jax.tree.map(lambda x: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype, sharding=x.sharding), batch)
        return {"log-prob gap": Program(function=self._score, arguments=(snapshot, frozen, micro))}

    def begin(self, index: ReplayIndex, usable: np.ndarray) -> None:
        """Picks rows to compare, and loads their snapshot in a thread. Does nothing while the last comparison is under way.

        Args:
          usable: int64[n], slots of resident rows that name snapshots of this run.
        """
        if self._loading is not None:
            return
        steps = np.unique(index.row_step[usable])[::-1].tolist()
        # The index changes while the thread loads, so the rows of every step that may be tried are copied now.
        having = ((step, rows) for step in steps[:_STEPS_TRIED] if (rows := self._rows_of(step, index, usable)) is not None)
        found = dict(itertools.islice(having, _STEPS_LOADED))
        if steps:
            self._loading = self._thread.submit(self._load, found)

    def _rows_of(self, step: int, index: ReplayIndex, usable: np.ndarray) -> trajectory.Rows | None:
        """A micro-batch of rows that the snapshot of a step produced from the first token to the last.

        None where weights were swapped midway in all rows. Tokens after a swap attended to keys and values of the weights before
        it, which scoring does not reproduce.
        """
        slots = usable[index.row_step[usable] == step][:_ROWS_OF_A_STEP]
        rows = index.gather(slots)
        mask = trajectory.response_mask(rows["response_length"], rows["policy_step"].shape[1])
        whole = (np.where(mask, rows["policy_step"], step) == step).all(axis=1)
        return index.gather(np.resize(slots[whole], self._config.limits.full_rows)) if whole.any() else None

    def _load(self, found: Mapping[int, trajectory.Rows]) -> _Compared | None:
        """The first of the steps whose snapshot is still there, in host memory: the devices' is the update's meanwhile."""
        policy = self._config.policy
        for step, rows in found.items():
            try:
                snapshot = snapshots.load_step(
                    self._policies, step, policy.trained_specs, self._in_host_memory, dtype=policy.snapshot_dtype
                )
            except FileNotFoundError:
                continue
            return _Compared(step=step, snapshot=snapshot, rows=rows)
        return None

    def take(self, frozen: parameters.Params, *, wait: bool) -> dict[str, float] | None:
        """The largest and the mean gap in nats per token, and whether it is an alarm; {} where there is nothing to compare.

        None where no snapshot is loaded. Args: wait: for the snapshot that is being loaded, if there is one.

        Raises: what loading the snapshot raised, but for FileNotFoundError.
        """
        if self._loading is None or not (wait or self._loading.done()):
            return None
        loading, self._loading = self._loading, None
        if (compared := loading.result()) is not None:
            return self._gap(compared, frozen)
        log.warning("no resident row was made by one snapshot alone that is still there: log-probs are not compared")
        return {}

    def _gap(self, compared: _Compared, frozen: parameters.Params) -> dict[str, float]:
        step, rows = compared.step, compared.rows
        snapshot = jax.device_put(compared.snapshot, self._on_devices)
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

    def close(self) -> None:
        """Ends the thread; a comparison that is under way is dropped."""
        self._thread.shutdown()
