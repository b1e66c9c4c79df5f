"""Signal and noise of an objective's gradient over groups of rows, each of one query, from sums: no gradient is kept."""

import dataclasses
from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from tba_jax.learner import update
from tba_jax.learner.update import Batch, LearnerConfig
from tba_jax.models.parameters import Params
from tba_jax.objectives.objective import ObjectiveInputs, PolicyOutputs


@flax.struct.dataclass
class Sums:
    """Over groups with gradients g: total: Σ g, float32, like what is trained of the policy; squares: Σ ‖g‖², float32[];
    fourths: Σ ‖g‖⁴, float32[]."""

    total: Params
    squares: jax.Array
    fourths: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Noise:
    """groups: n; signal: an estimate of ‖E g‖² without bias, which may be below 0; variance: of E ‖g − E g‖², and stderr: its
    standard error. Units are those of the squared gradient."""

    groups: int
    signal: float
    variance: float
    stderr: float

    @property
    def ratio(self) -> float:
        """signal / variance: the signal-to-noise ratio of one group, NaN where no gradient differs from another."""
        return self.signal / self.variance if self.variance else float("nan")


def groups_of(query: np.ndarray, K: int, *, most: int, seed: int) -> np.ndarray:
    """int64[n, K], n ≤ most: random disjoint groups of K rows of one query, as numbers of rows. Args: query: [rows]."""
    rng = np.random.default_rng([seed, K])
    order = rng.permutation(len(query))
    order = order[np.argsort(query[order], kind="stable")]
    _, starts, rows = np.unique(query[order], return_index=True, return_counts=True)
    begins = np.concatenate([start + K * np.arange(n // K) for start, n in zip(starts, rows, strict=True)])
    return order[rng.permutation(begins)[:most, None] + np.arange(K)]


def no_sums(trained: Params) -> Sums:
    """The sums over no groups. Args: trained: what is trained of the policy."""
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), trained)
    return Sums(total=zeros, squares=jnp.zeros(()), fourths=jnp.zeros(()))


def _square(tree: Params) -> jax.Array:
    """‖tree‖²: float32[]."""
    return jax.tree.reduce(jnp.add, jax.tree.map(lambda x: jnp.sum(jnp.square(x)), tree))


def add_group(
    sums: Sums,
    trained: Params,
    frozen: Params,
    group: Batch,
    *,
    inputs_of: Callable[[Batch], ObjectiveInputs],
    config: LearnerConfig,
) -> Sums:
    """The sums with one more group. Its g is the gradient of the objective by `trained`, in units of the reward (RewardUnit).

    Args: trained, frozen: see Policy.for_training; group: config.settings.completions rows of one query; inputs_of: see
    update.objective_inputs; config: of an objective that reads no log Z, no values and no state values.
    """
    inputs, objective = inputs_of(group), config.objective

    def loss(trained: Params) -> jax.Array:
        logprobs, _ = update.score(config.policy.for_training(trained, frozen), group, config=config)
        return objective.loss(PolicyOutputs(logprobs=inputs.masked(logprobs), log_z=jnp.zeros_like(inputs.reward)), inputs)

    unit = 1.0 if objective.reward_unit is None else objective.reward_unit(inputs)
    gradient = jax.tree.map(lambda g: unit * g.astype(jnp.float32), jax.grad(loss)(trained))
    total, square = jax.tree.map(jnp.add, sums.total, gradient), _square(gradient)
    return Sums(total=total, squares=sums.squares + square, fourths=sums.fourths + square**2)


def noise(sums: Sums, groups: int) -> Noise:
    """The statistics of n ≥ 2 groups.

    ‖E g‖² = ( ‖Σ g‖² − Σ ‖g‖² ) / ( n (n − 1) ), the mean product of two groups' gradients; E ‖g − E g‖² = E ‖g‖² − ‖E g‖².
    """
    assert groups >= 2, groups
    squares, mean_fourth = float(sums.squares), float(sums.fourths) / groups
    signal = (float(_square(sums.total)) - squares) / (groups * (groups - 1))
    mean_square = squares / groups
    stderr = (max(0.0, mean_fourth - mean_square**2) / (groups - 1)) ** 0.5  # of E ‖g‖², beside which ‖E g‖² varies little
    return Noise(groups=groups, signal=signal, variance=mean_square - signal, stderr=stderr)
