"""What a config says of the trainer's parts: index, optimisers, schedules, the learner's static settings, the reference."""

import dataclasses
from typing import Any

import jax

from tba_jax import optimizer as optimizer_lib
from tba_jax import run_config
from tba_jax.learner import state as state_lib
from tba_jax.learner import update as update_lib
from tba_jax.learner.reference import MovingReference
from tba_jax.models import scoring
from tba_jax.models.policy import Policy
from tba_jax.objectives import OBJECTIVES
from tba_jax.objectives.inputs import ObjectiveSettings
from tba_jax.replay.index import ReplayIndex


def make_index(config: Any, contract: run_config.Contract) -> ReplayIndex:
    """The empty index of a run."""
    return ReplayIndex(
        shape=contract.row_shape(),
        capacity=config.replay.capacity,
        capacity_per_query=config.replay.capacity_per_query,
        merge_duplicates=config.replay.merge_duplicates,
        merge_edit_distance=config.replay.merge_edit_distance,
        merge_cosine_distance=config.replay.merge_cosine_distance,
        drop=config.replay.drop,
        vocab_size=contract.model["vocab"],
    )


def make_optimizers(config: Any) -> state_lib.Optimizers:
    c = config.learner

    def adamw(peak: float, weight_decay: float) -> Any:
        schedule = optimizer_lib.SCHEDULES[c.schedule](
            peak=peak, steps=c.steps, warmup_steps=c.warmup_steps, decay_steps=c.decay_steps
        )
        return optimizer_lib.adamw(
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
        optimizers["log_z"] = adamw(c.log_z_learning_rate, 0.0)
    if objective.value_head:
        optimizers["value_head"] = adamw(c.value_learning_rate, 0.0)
    return optimizers


def make_schedules(config: Any) -> update_lib.Schedules:
    c = config.learner
    return update_lib.Schedules(
        beta=optimizer_lib.linear_then_constant(start=c.beta_start, end=c.beta_end, steps=c.beta_steps),
        ref_temperature=optimizer_lib.linear_then_constant(
            start=c.ref_temperature_start, end=c.ref_temperature_end, steps=c.ref_temperature_steps
        ),
        reward_temperature=optimizer_lib.linear_then_constant(
            start=c.reward_temperature_start, end=c.reward_temperature_end, steps=c.reward_temperature_steps
        ),
    )


def make_learner_config(config: Any, contract: run_config.Contract, policy: Policy, *, devices: int) -> update_lib.LearnerConfig:
    c = config.learner
    return update_lib.LearnerConfig(
        policy=policy,
        objective=OBJECTIVES[c.objective],
        settings=ObjectiveSettings(**{field.name: c[field.name] for field in dataclasses.fields(ObjectiveSettings)}),
        micro_batch_rows=c.micro_batch_rows or c.queries * c.completions,
        logit_bytes=(c.logit_megabytes << 20) * devices,
        space=scoring.ResponseSpace.of(contract),
        remat=c.remat,
        surrogate_decay=c.reference.ema_decay if c.reference.kind == "surrogate" else 0.0,
    )


def make_moving_reference(
    config: Any, learner_config: update_lib.LearnerConfig, mesh: jax.sharding.Mesh
) -> MovingReference | None:
    """None where the reference stays, or is not held."""
    r = config.learner.reference
    moves = {"reset": (r.reset_steps, 0.0), "ema": (1, r.ema_decay)}
    if r.kind not in moves:
        return None
    every_steps, decay = moves[r.kind]
    return MovingReference(learner_config, mesh, every_steps=every_steps, decay=decay, offload=r.offload)
