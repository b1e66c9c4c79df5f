"""The objectives by name. Each is a pure function (policy_logprobs, ObjectiveInputs) -> (loss, measurements)."""

from collections.abc import Callable

import jax

from tba_jax.objectives.inputs import Measurements, ObjectiveInputs
from tba_jax.objectives.trajectory_balance import trajectory_balance

Objective = Callable[[jax.Array, ObjectiveInputs], tuple[jax.Array, Measurements]]

OBJECTIVES: dict[str, Objective] = {
    "trajectory_balance": trajectory_balance,
}
