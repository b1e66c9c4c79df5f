"""Signal and noise of an objective's gradient over groups of rows, each of one query, from sums alone.

No gradient of a group is kept: memory holds the sum of all gradients, and the gradient of one group.
"""

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp

from tba_jax.learner import update
from tba_jax.learner.update import Batch, LearnerConfig, Schedules
from tba_jax.models.parameters import Params
from tba_jax.objectives.objective import PolicyOutputs


@flax.struct.dataclass
class Sums:
    """Over n groups with gradients g: total: Σ g, float32, like what is trained of the policy; squares: Σ ‖g‖², float32[];
    fourths: Σ ‖g‖⁴, float32[]."""

    total: Params
    squares: jax.Array
    fourths: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Noise:
    """groups: n; signal: ‖E g‖², without bias, so that it may be below 0; variance: E ‖g − E g‖², and stderr: its standard
    error. Units are those of the squared gradient."""

    groups: int
    signal: float
    variance: float
    stderr: float

    @property
    def ratio(self) -> float:
        """The signal-to-noise ratio of one group: signal / variance, NaN where all gradients are 0."""
        return self.signal / self.variance if self.variance else float("nan")


def no_sums(trained: Params) -> Sums:
    """The sums over no groups. Args: trained: arrays or shapes."""
    return Sums(total=jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), trained), squares=jnp.zeros(()), fourths=jnp.zeros(()))


def add(sums: Sums, gradient: Params) -> Sums:
    """The sums with the gradient of one more group."""
    square = jax.tree.reduce(jnp.add, jax.tree.map(lambda g: jnp.sum(jnp.square(g.astype(jnp.float32))), gradient))
    total = jax.tree.map(jnp.add, sums.total, gradient)
    return Sums(total=total, squares=sums.squares + square, fourths=sums.fourths + square**2)


def noise(sums: Sums, groups: int) -> Noise:
    """The statistics of n ≥ 2 groups.

    ‖E g‖² = ( ‖Σ g‖² − Σ ‖g‖² ) / ( n (n − 1) ), the mean product of the gradients of two groups, and E ‖g − E g‖² = E ‖g‖² − ‖E g‖².
    """
    assert groups >= 2, groups
    norm = float(jax.tree.reduce(jnp.add, jax.tree.map(lambda g: jnp.sum(jnp.square(g)), sums.total)))
    mean_square = float(sums.squares) / groups
    signal = (norm - float(sums.squares)) / (groups * (groups - 1))
    spread = max(0.0, float(sums.fourths) / groups - mean_square**2)
    return Noise(groups=groups, signal=signal, variance=mean_square - signal, stderr=(spread / (groups - 1)) ** 0.5)


def group_gradient(
    trained: Params, frozen: Params, group: Batch, *, step: int, schedules: Schedules, config: LearnerConfig
) -> Params:
    """The gradient of the objective on one group by what is trained of the policy, in units of the reward (Objective.reward_unit).

    Args: trained, frozen: see Policy.for_training; group: config.settings.completions rows of one query; step: updates done
    before; config: of an objective that reads no log Z, no values and no state values.
    """
    inputs = update.objective_inputs(group, step=step, schedules=schedules, config=config)
    objective = config.objective

    def loss(trained: Params) -> jax.Array:
        logprobs, _ = update.score(config.policy.for_training(trained, frozen), group, config=config)
        logprobs = inputs.masked(logprobs)
        return objective.loss(PolicyOutputs(logprobs=logprobs, log_z=jnp.zeros_like(inputs.reward)), inputs)

    unit = 1.0 if objective.reward_unit is None else objective.reward_unit(inputs)
    return jax.tree.map(lambda g: unit * g, jax.grad(loss)(trained))
