"""What a config says of the learner's parts: optimisers, schedules, the learner's static settings, the reference."""

import dataclasses
from typing import Any

import jax

from tba_jax.learner import optimizer, state, update
from tba_jax.learner.reference import MovingReference
from tba_jax.models.policy import Policy
from tba_jax.objectives import OBJECTIVES
from tba_jax.objectives.inputs import ObjectiveSettings
from tba_jax.run import contract as contract_lib

# Values of learner.reference.kind with a reference that the trainer holds, and checkpoints.
HELD_REFERENCES = ("reset", "ema")


def make_optimizers(config: Any) -> state.Optimizers:
    c = config.learner

    def adamw(peak: float, weight_decay: float) -> Any:
        schedule = optimizer.SCHEDULES[c.schedule](
            peak=peak, steps=c.steps, warmup_steps=c.warmup_steps, decay_steps=c.decay_steps
        )
        return optimizer.adamw(
            schedule,
            beta1=c.adam_beta1,
            beta2=c.adam_beta2,
            epsilon=c.adam_epsilon,
            weight_decay=weight_decay,
            clip_norm=c.clip_norm,
        )

    objective = OBJECTIVES[c.objective]
    optimizers = {"policy": adamw(c.learning_rate, c.weight_decay)}
    if objective.log_z_head:
        optimizers["log_z_head"] = adamw(c.log_z_learning_rate, 0.0)
    if objective.value_head:
        optimizers["value_head"] = adamw(c.value_learning_rate, 0.0)
    return optimizers


def make_schedules(config: Any) -> update.Schedules:
    c = config.learner
    return update.Schedules(
        beta=optimizer.linear_then_constant(start=c.beta_start, end=c.beta_end, steps=c.beta_steps),
        ref_temperature=optimizer.linear_then_constant(
            start=c.ref_temperature_start, end=c.ref_temperature_end, steps=c.ref_temperature_steps
        ),
        reward_temperature=optimizer.linear_then_constant(
            start=c.reward_temperature_start, end=c.reward_temperature_end, steps=c.reward_temperature_steps
        ),
    )


def make_learner_config(config: Any, contract: contract_lib.Contract, policy: Policy, *, devices: int) -> update.LearnerConfig:
    c = config.learner
    return update.LearnerConfig(
        policy=policy,
        objective=OBJECTIVES[c.objective],
        settings=ObjectiveSettings(**{field.name: c[field.name] for field in dataclasses.fields(ObjectiveSettings)}),
        micro_batch_rows=c.micro_batch_rows or c.queries * c.completions,
        logit_bytes=(c.logit_megabytes << 20) * devices,
        space=contract.response_space(),
        remat=c.remat,
        surrogate_decay=c.reference.ema_decay if c.reference.kind == "surrogate" else 0.0,
    )


def make_moving_reference(config: Any, learner_config: update.LearnerConfig, mesh: jax.sharding.Mesh) -> MovingReference | None:
    """The reference that moves with the policy; None if the reference does not move, or is not stored."""
    r = config.learner.reference
    moves = {"reset": (r.reset_steps, 0.0), "ema": (1, r.ema_decay)}
    if r.kind not in moves:
        return None
    every_steps, decay = moves[r.kind]
    return MovingReference(learner_config, mesh, every_steps=every_steps, decay=decay, offload=r.offload)
