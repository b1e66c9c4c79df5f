"""What an objective is: a loss, and what it needs of a run, declared beside it."""

import dataclasses
from collections.abc import Callable

import jax

from tba_jax.objectives.inputs import ObjectiveInputs, PolicyOutputs

# Pure: float32[] of one batch of whole groups. It is a mean over groups, so that means over micro-batches of whole groups agree.
Loss = Callable[[PolicyOutputs, ObjectiveInputs], jax.Array]

# The coefficients that trajectory balance reads besides β.
TEMPERATURES = ("ref_temperature", "reward_temperature")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Objective:
    """An objective, and what config_checks, the trainer's settings and the learner ask of it.

    loss: see Loss; min_completions: the fewest K that it can compare; behavior_logprobs: whether it weighs by
    π_θ/π_behaviour; positive_beta: whether β = 0 leaves it without an optimum or a gradient, elsewhere that leaves the KL term
    out; full_support: whether its optimum is only reached from rows of a sampler that can draw every response;
    log_z_head, value_head: whether PolicyOutputs has log_z and values that are learned with the policy; state_values: whether
    it needs the values of states that rows carry; moving_reference: whether a reference that moves makes sense, which is where
    it reads ref_logprobs; settings: names of the settings learner.* that it reads (fields of ObjectiveSettings, and the
    schedules' `beta`, `ref_temperature`, `reward_temperature`).
    """

    loss: Loss
    min_completions: int = 2
    behavior_logprobs: bool = False
    positive_beta: bool = False
    full_support: bool = False
    log_z_head: bool = False
    value_head: bool = False
    state_values: bool = False
    moving_reference: bool = True
    settings: tuple[str, ...] = ()
