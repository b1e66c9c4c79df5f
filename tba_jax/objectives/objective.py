"""The declaration of an objective: its loss and its requirements on a run."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from tba_jax.objectives.inputs import ObjectiveInputs, PolicyOutputs

# A pure function to float32[]: a mean over the groups of a batch, so micro-batches of whole groups can be averaged.
Loss = Callable[[PolicyOutputs, ObjectiveInputs], jax.Array]
# By the coefficients of a step, float32[]: times this factor, the gradient of a loss is −mean A ∇ log π_θ in which a reward of r
# counts as r. So the norm of a gradient, learner.clip_norm and the alarm about it mean the same for every objective and every β.
RewardUnit = Callable[[ObjectiveInputs], jax.Array]

# The coefficients that trajectory balance reads besides β.
TEMPERATURES = ("ref_temperature", "reward_temperature")


def residual_in_nats(inputs: ObjectiveInputs) -> jax.Array:
    """βτ/2, of losses (log Z + log π_θ − (… + r/β)/τ)²."""
    return inputs.beta * inputs.reward_temperature / 2


def residual_in_rewards(inputs: ObjectiveInputs) -> jax.Array:
    """1/(2β), of losses (β log π_θ/π − A)²."""
    return 1 / (2 * inputs.beta)


def advantage_in_rewards(inputs: ObjectiveInputs) -> jax.Array:
    """1, of policy-gradient losses −A log π_θ. Where A is divided by a deviation, rewards count in deviations."""
    return jnp.ones(())


def advantage_over_temperature(inputs: ObjectiveInputs) -> jax.Array:
    """τ, of policy-gradient losses whose rewards are r/τ."""
    return inputs.reward_temperature


def preference(inputs: ObjectiveInputs) -> jax.Array:
    """1/β, of losses −log σ(β Δ): the reward is the preference, 1 for the better response and 0 for the other."""
    return 1 / inputs.beta


@dataclasses.dataclass(frozen=True, kw_only=True)
class Objective:
    """An objective and its requirements, which config checks and the learner read.

    loss: see Loss; reward_unit: see RewardUnit, None if nobody knows it, and then gradients cannot be clipped; min_completions:
    the smallest K; behavior_logprobs: whether it reads the log-probs of π_behaviour; positive_beta: whether it has no optimum
    or no gradient at β = 0 (for other objectives β = 0 drops the KL term); full_support: whether its optimum requires a sampler
    that can draw every response; as_drawn: whether rows must be what π_behaviour draws by itself: none truncated, none with a
    forced end, none chosen by its reward, none repeated; log_z_head, value_head: whether PolicyOutputs must have a learned
    log_z or values; state_values: whether rows must carry Monte-Carlo state values; reads_reference: whether it reads
    ref_logprobs, as a KL term that β = 0 leaves out also counts; k3: whether at β > 0 it has the k3 estimate of KL(π_θ‖π_ref),
    which needs a π_ref that is a distribution; settings: names of the settings learner.* that it reads (fields of
    ObjectiveSettings, the learning rates of its heads, and the schedules `beta`, `ref_temperature`, `reward_temperature`): a new
    run is refused that sets others.
    """

    loss: Loss
    reward_unit: RewardUnit | None = None
    min_completions: int = 2
    behavior_logprobs: bool = False
    positive_beta: bool = False
    full_support: bool = False
    as_drawn: bool = False
    log_z_head: bool = False
    value_head: bool = False
    state_values: bool = False
    reads_reference: bool = True
    k3: bool = False
    settings: tuple[str, ...] = ()
