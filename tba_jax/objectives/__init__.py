"""The objectives by name. Each is a pure function (PolicyOutputs, ObjectiveInputs) -> float32[] loss of one batch."""

from collections.abc import Callable

import jax

from tba_jax.objectives.inputs import ObjectiveInputs, PolicyOutputs
from tba_jax.objectives.tba_prime import tba_prime
from tba_jax.objectives.trajectory_balance import learned_log_z, trajectory_balance

Objective = Callable[[PolicyOutputs, ObjectiveInputs], jax.Array]

OBJECTIVES: dict[str, Objective] = {
    "trajectory_balance": trajectory_balance,
    "learned_log_z": learned_log_z,
    "tba_prime": tba_prime,
}
