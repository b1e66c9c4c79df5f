"""The alarm: the log-probs that sampler and learner give the same tokens under the same weights must agree.

Without it, trajectory balance would train on unnoticed if a mask, a position or a precision differed between the two.
"""

import concurrent.futures
import contextlib
import functools
import itertools
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from tba_jax import sharding, trajectory
from tba_jax.learner import update
from tba_jax.models import kv_cache, parameters
from tba_jax.models.parameters import Params
from tba_jax.programs import Program
from tba_jax.replay.index import ReplayIndex
from tba_jax.roles.plan import Plan
from tba_jax.storage.places import Place
from tba_jax.storage.published import Published
from tba_jax.storage.snapshots import Damaged

log = logging.getLogger(__name__)

# Policy steps that are tried, the newest first, until one has a row whose weights were not swapped midway.
_STEPS_TRIED = 16
_STEPS_LOADED = 2  # of those with rows, until a snapshot is there
_ROWS_OF_A_STEP = 1024  # that are looked at
# Nats per token that sampler and learner may differ by, by compute dtype.
_LIMITS = {"float32": 1e-3, "bfloat16": 0.1}


def limit(config: Any) -> float:
    """Nats per token that sampler and learner may differ by. Searchers may compute in model.compute_dtype even where this device
    cannot."""
    given: float = config.learner.logprob_gap_limit
    return given or _LIMITS[config.model.compute_dtype]


def score_snapshot(
    snapshot: Params, frozen: Params, batch: update.Batch, *, config: update.LearnerConfig, sampler_weights: str
) -> jax.Array:
    """float32[B, R], nats: log-probs under the weights of a snapshot, which are rounded as searchers round them."""
    policy = config.policy
    if sampler_weights == "full":
        model = policy.for_training(snapshot, frozen)
    else:
        rounded = kv_cache.define(policy.model, sampler_weights, unstacked=False)
        model = parameters.module(rounded.graphdef, policy.for_sampling(snapshot, frozen, sampler_weights))
    return update.score(model, batch, config=config)[0]


class SnapshotScores:
    """The learner's log-probs of rows under the weights of a published snapshot. Every process of a trainer has these scores."""

    def __init__(self, config: update.LearnerConfig, mesh: jax.sharding.Mesh, policies: Place, *, sampler_weights: str):
        """Args: policies: the folder of snapshots. sampler_weights: searchers.weights."""
        self._config, self._mesh, self._snapshots = config, mesh, Published(policies)
        score = functools.partial(score_snapshot, config=config, sampler_weights=sampler_weights)
        self._score = sharding.on_mesh(mesh, jax.jit(score, out_shardings=sharding.replicated(mesh)))
        self._on_devices = config.policy.trained_shardings(mesh)
        self._in_host_memory = jax.tree.map(lambda x: x.with_memory_kind(sharding.PINNED_HOST), self._on_devices)
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="logprob-gap")
        self._loading: concurrent.futures.Future[tuple[int, Params] | None] | None = None

    def programs(self, frozen: Params, batch: update.Batch) -> dict[str, Program]:
        """Name -> the program of `score`. Args: shapes of the frozen weights, and of a batch of any size."""
        snapshot = self._config.policy.snapshot_shapes(self._mesh)
        rows = self._config.limits.full_rows
        micro = jax.tree.map(lambda x: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype, sharding=x.sharding), batch)
        return {"log-prob gap": Program(function=self._score, arguments=(snapshot, frozen, micro))}

    def load(self, steps: Sequence[int]) -> None:
        """Loads the snapshot of the first of these steps that is still there and whole, in a thread."""
        self._loading = self._thread.submit(self._load, steps)

    def _load(self, steps: Sequence[int]) -> tuple[int, Params] | None:
        """The step and its weights, in host memory: the devices' is the update's meanwhile."""
        policy = self._config.policy
        arrays = policy.trained_specs, self._in_host_memory
        for step in steps:
            with contextlib.suppress(FileNotFoundError, Damaged):
                return step, self._snapshots.load(step, *arrays, dtype=policy.snapshot_dtype)
        return None

    @property
    def is_loading(self) -> bool:
        """Whether a snapshot was asked for that is not loaded yet."""
        return self._loading is not None and not self._loading.done()

    def loaded_step(self) -> int | None:
        """Waits for the snapshot, and returns its step; None where no step had a whole one. Raises: as snapshots.load."""
        assert self._loading is not None, "nothing was loaded"
        found = self._loading.result()
        return None if found is None else found[0]

    def score(self, frozen: Params, rows: trajectory.Rows) -> np.ndarray:
        """float32[B, R], nats: log-probs under the snapshot that is loaded, which is let go of."""
        assert self._loading is not None, "nothing was loaded"
        found, self._loading = self._loading.result(), None
        assert found is not None, "no step had a snapshot"
        snapshot = jax.device_put(found[1], self._on_devices)
        return np.asarray(self._score(snapshot, frozen, sharding.put_rows(self._mesh, update.batch_from_rows(rows))))

    def drop(self) -> None:
        """Lets go of the snapshot that is loaded."""
        self._loading = None

    def close(self) -> None:
        """Ends the thread; a snapshot that is being loaded is dropped."""
        self._thread.shutdown()


class LogprobGap:
    """Compares stored log-probs with the learner's, on rows that the newest possible snapshot alone produced."""

    def __init__(self, scores: SnapshotScores, config: update.LearnerConfig, plan: Plan, *, limit: float):
        """Args: scores: of this process; plan: of all that score together. limit: nats per token, see `limit`."""
        self._scores, self._config, self._plan, self._limit = scores, config, plan, limit
        # Step -> rows that the snapshot of that step alone produced, while it is being loaded.
        self._compared: dict[int, trajectory.Rows] | None = None

    def pick(self, index: ReplayIndex, usable: np.ndarray) -> dict[str, Any]:
        """What `begin` compares: step, as text -> rows that its snapshot alone produced. {} while a comparison is under way.

        Args: usable: int64[n], slots of resident rows that name snapshots of this run.
        """
        if self._compared is not None:
            return {}
        steps = np.unique(index.row_step[usable])[::-1].tolist()
        # The index changes while the thread loads, so the rows of every step that may be tried are copied now.
        having = ((step, rows) for step in steps[:_STEPS_TRIED] if (rows := self._rows_of(step, index, usable)) is not None)
        return {str(step): rows for step, rows in itertools.islice(having, _STEPS_LOADED)} | ({"none": True} if steps else {})

    def begin(self, picked: Mapping[str, Any]) -> None:
        """Loads the snapshot of what was picked in a thread, unless that is {}."""
        if picked:
            self._compared = {int(step): rows for step, rows in picked.items() if step != "none"}
            self._scores.load(list(self._compared))

    @property
    def is_loaded(self) -> bool:
        """Whether a comparison is under way whose snapshot is loaded."""
        return self._compared is not None and not self._scores.is_loading

    def _rows_of(self, step: int, index: ReplayIndex, usable: np.ndarray) -> trajectory.Rows | None:
        """A micro-batch of rows that the snapshot of a step produced from the first token to the last, None where there is none:
        tokens after a swap attended to keys and values of the weights before it, which scoring does not reproduce."""
        slots = usable[index.row_step[usable] == step][:_ROWS_OF_A_STEP]
        rows = index.gather(slots)
        mask = trajectory.trained(rows)
        # A server's rows that were drawn at other temperatures have no log-probs of the policy.
        whole = (np.where(mask, rows["policy_step"], step) == step).all(axis=1) & rows["policy_logprobs"].any(axis=1)
        return index.gather(np.resize(slots[whole], self._config.limits.full_rows)) if whole.any() else None

    def take(self, frozen: Params) -> dict[str, float] | None:
        """Waits for the snapshot. The largest and the mean gap in nats per token, and whether it is an alarm; {} where there is
        nothing to compare; None where no comparison is under way. Raises what loading raised."""
        if self._compared is None:
            return None
        compared, self._compared = self._compared, None
        step = self._scores.loaded_step()
        everywhere = set(self._plan.gather(step))
        if step is None or everywhere != {step}:  # a snapshot may be pruned before all have read it
            log.warning("no resident row was made by one snapshot alone that is still there: log-probs are not compared")
            self._scores.drop()
            return {}
        return self._gap(compared[step], self._scores.score(frozen, compared[step]))

    def _gap(self, rows: trajectory.Rows, logprobs: np.ndarray) -> dict[str, float]:
        """Args: logprobs: float32[B, R], nats, of the learner."""
        mask = trajectory.trained(rows)
        gap = np.abs(logprobs - rows["policy_logprobs"])[mask]
        if not gap.size:
            return {}
        worst = float(gap.max())
        alarm = not worst <= self._limit  # NaN is an alarm
        return {"logprob_gap_max": worst, "logprob_gap_mean": float(gap.mean()), "logprob_gap_alarm": float(alarm)}
