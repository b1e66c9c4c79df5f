"""How far the first-order surrogate of a moving-average reference is from that average, by staleness of the rows.

One interleaved TBA′ run on the demo's task, lag 0, with every snapshot kept: rows of every policy step are in its log, and the
average can be computed again from the snapshots, for any α.
"""

import contextlib
import functools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import warm_start
from tba_jax import sharding, trajectory
from tba_jax.commands.audit import open_run
from tba_jax.experiment import jobs
from tba_jax.learner import state, update
from tba_jax.learner.moving_reference import moved
from tba_jax.learner.settings import make_learner_config, make_moving_reference
from tba_jax.models.parameters import Params
from tba_jax.run import snapshots as snapshots_lib
from tba_jax.run.checkpoints import Checkpoints

STEPS = 200
STALENESS = (1, 2, 5, 10, 20, 50)
DECAYS = (0.95, 0.9)


def settings_of(workdir: Path, *, steps: int) -> jobs.Invocation:
    """Of a run with the first of DECAYS."""
    from configs import demo_tba_prime

    c = demo_tba_prime.get_config()
    c.learner.steps = steps
    c.learner.schedule = "constant"  # with a rate that falls, steps of the run would not be alike
    c.learner.reference.kind = "ema"
    c.learner.reference.ema_decay = DECAYS[0]
    c.schedule.mode = "interleaved"
    c.publish.keep = 0
    c.evaluation.every_steps = steps
    return warm_start.settings(workdir, c)


def train(workdir: Path, *, steps: int) -> jobs.Invocation:
    """Makes the run."""
    settings = settings_of(workdir, steps=steps)
    with contextlib.redirect_stdout(sys.stderr):
        if jobs.everything(settings)():
            raise RuntimeError(f"the run in {workdir} was stopped")
    return settings


class Snapshots:
    """The policies of a run, and the moving averages of them."""

    def __init__(self, settings: jobs.Invocation):
        self._policies, self._policy = settings.run.policies, settings.experiment.policy
        self._mesh = sharding.make_mesh((1, 1, 1), setting="learner.mesh", devices=jax.devices()[:1])
        self.config = make_learner_config(settings.config.learner, settings.experiment.contract, self._policy, self._mesh)
        self._score = sharding.on_mesh(self._mesh, jax.jit(self._score_with))

    def _score_with(self, params: Params, batch: state.Batch) -> jax.Array:
        return update.score(self._policy.for_training(params, {}), batch, config=self.config)[0]

    def policy(self, step: int) -> Params:
        shardings = self._policy.trained_shardings(self._mesh)
        return snapshots_lib.load_step(self._policies, step, self._policy.trained_specs, shardings)

    def averages(self, steps: Sequence[int], *, decay: float) -> dict[int, Params]:
        """step n -> ref_n, where ref_0 = θ_0 and ref_n = α ref_{n−1} + (1 − α) θ_n."""
        move = jax.jit(functools.partial(moved, decay=decay))
        average, found = self.policy(0), {}
        for step in range(1, max(steps) + 1):
            average = move(average, self.policy(step))
            if step in steps:
                found[step] = average
        return found

    def logprobs(self, params: Params, batch: state.Batch) -> jax.Array:
        """float32[B, R], nats, 0 where masked."""
        return self._score(params, batch)

    def checkpointed_average(self, settings: jobs.Invocation, step: int) -> Params:
        """The reference that the run itself held after so many steps."""
        held = make_moving_reference(settings.config.learner, self.config, self._mesh)
        assert held is not None
        checkpoints = Checkpoints(settings.run.checkpoints, keep=1, read_only=True)
        trees, _ = checkpoints.restore(step, {"reference": held.shapes})
        checkpoints.close()
        return trees["reference"]


def rows_by_step(workdir: Path) -> dict[int, trajectory.Rows]:
    """policy step -> the rows that it sampled."""
    run = open_run(workdir)
    rows = trajectory.concatenate([run.reader.read(writer, 0, head) for writer, head in run.reader.heads().items()])
    policy_step = rows["policy_step"][:, 0]
    return {int(step): {name: column[policy_step == step] for name, column in rows.items()} for step in np.unique(policy_step)}


def log_ratios(
    snapshots: Snapshots, rows: dict[int, trajectory.Rows], averages: dict[int, Params], *, staleness: int, decay: float
) -> np.ndarray:
    """k = Σ_t log π_n − log π_ref, nats per response, of rows that policy n − Δ sampled.

    Args: averages: n -> π_ref; staleness: Δ; decay: α.

    Returns:
      float64[2, rows], by the average and by the surrogate.
    """
    found = []
    for step, average in averages.items():
        batch = jax.tree.map(jnp.asarray, state.batch_from_rows(rows[step - staleness]))
        mask = trajectory.response_mask(np.asarray(batch.response_length), batch.R)
        policy_logprobs = snapshots.logprobs(snapshots.policy(step), batch)
        stands_for = update.surrogate_ref_logprobs(policy_logprobs, batch, step=jnp.int32(step), decay=decay)
        references = snapshots.logprobs(average, batch), stands_for
        found.append([np.where(mask, policy_logprobs - ref, 0.0).sum(1, dtype=np.float64) for ref in references])
    return np.concatenate(found, axis=1)


def rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(x**2)))


def compare(root: Path, *, steps: int = STEPS) -> None:
    """Makes the run root/surrogate and prints the table."""
    warm_start.ensure(root)
    workdir = warm_start.begin(root, "surrogate")
    measure(train(workdir, steps=steps), steps=steps)


def measure(settings: jobs.Invocation, *, steps: int) -> None:
    """Prints a table over rows at 11 steps of a run's second half.

    The surrogate is α/(Δ (1 − α)) times log π_n − log π_{n−Δ}. The last column is the factor that comes nearest to k by least
    squares, with means over a query's rows taken off, which no objective sees.
    """
    snapshots, rows = Snapshots(settings), rows_by_step(settings.run.root)
    at = sorted({int(step) for step in np.linspace(steps // 2, steps, 11)})
    samples = settings.config.searchers.samples_per_query
    columns = "mean k, average", "surrogate", "RMS of k", "RMS error", "correlation", "factor", "best factor"
    warm_start.table("α", "staleness", *columns)
    for decay in DECAYS:
        averages = snapshots.averages(at, decay=decay)
        if decay == DECAYS[0]:
            check(averages[steps], snapshots.checkpointed_average(settings, steps))
        for staleness in (staleness for staleness in STALENESS if staleness <= at[0]):
            k = log_ratios(snapshots, rows, averages, staleness=staleness, decay=decay)
            true, stands_for = k
            factor = decay / (1 - decay) / staleness
            of_query = k.reshape(2, -1, samples)
            centred_true, centred = (of_query - of_query.mean(-1, keepdims=True)).reshape(2, -1)
            figures = rms(true), rms(stands_for - true), np.corrcoef(true, stands_for)[0, 1]
            factors = factor, factor * np.dot(centred_true, centred) / np.dot(centred, centred)
            cells = [f"{mean:.3f}" for mean in k.mean(1)] + [f"{x:.2f}" for x in (*figures, *factors)]
            warm_start.row(f"{decay}", f"{staleness}", *cells)


def check(average: Params, held: Params) -> None:
    """Raises where the average of the snapshots is not that of the run."""
    differences: Any = jax.tree.map(lambda a, b: float(jnp.max(jnp.abs(a - b))), average, held)
    largest = max(jax.tree.leaves(differences))
    print(f"largest difference between the average of the snapshots and the run's own: {largest:.1e}", file=sys.stderr)
    if largest > 1e-6:
        raise ValueError(f"the average of the snapshots differs from the reference of the run by {largest}")
