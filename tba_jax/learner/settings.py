"""What the section `learner` of a config says of the learner's parts: optimisers, schedules, static settings, the reference.

`make_schedule` and `make_adamw` also take the section `training` of supervised training, whose settings have the same names.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tba_jax import sharding
from tba_jax.learner import optimizer, update
from tba_jax.learner.update import MovingReference
from tba_jax.models import hardware, scoring
from tba_jax.models.policy import Policy
from tba_jax.objectives import OBJECTIVES
from tba_jax.objectives.objective import ObjectiveSettings
from tba_jax.packing import Limits
from tba_jax.storage import contract as contract_lib

# Values of learner.reference.kind with a reference that the trainer holds, and checkpoints.
HELD_REFERENCES = ("reset", "ema")


def policy_rates(c: Any) -> np.ndarray:
    """float32[learner.steps]: the policy's learning rate by the number of updates done before. Args: c: the section learner."""
    schedule = make_schedule(c, peak=c.learning_rate, steps=c.schedule_steps or c.steps)
    return np.asarray(jax.vmap(lambda count: jnp.asarray(schedule(count), jnp.float32))(jnp.arange(c.steps)))


def make_schedule(c: Any, *, peak: float, steps: int) -> optimizer.Schedule:
    """The schedule of a learning rate that ends at `steps`."""
    parts = dict(warmup_steps=c.warmup_steps, decay_steps=c.decay_steps, decay=c.decay)
    return optimizer.SCHEDULES[c.schedule](peak=peak, steps=steps, **parts)


def make_adamw(c: Any, schedule: optimizer.Schedule, *, weight_decay: float) -> optax.GradientTransformation:
    betas = dict(beta1=c.adam_beta1, beta2=c.adam_beta2)
    return optimizer.adamw(schedule, **betas, epsilon=c.adam_epsilon, weight_decay=weight_decay, clip_norm=c.clip_norm)


def make_optimizers(c: Any) -> optimizer.Optimizers:
    objective = OBJECTIVES[c.objective]
    rates = {"policy": c.learning_rate}
    if objective.log_z_head:
        rates["log_z_head"] = c.log_z_learning_rate
    if objective.value_head:
        rates["value_head"] = c.value_learning_rate
    steps = c.schedule_steps or c.steps
    return {
        part: make_adamw(c, make_schedule(c, peak=peak, steps=steps), weight_decay=c.weight_decay if part == "policy" else 0.0)
        for part, peak in rates.items()
    }


def make_schedules(c: Any) -> update.Schedules:
    def schedule(name: str) -> optimizer.Schedule:
        return optimizer.linear_then_constant(**{part: c[f"{name}_{part}"] for part in ("start", "end", "steps")})

    return update.Schedules(**{field.name: schedule(field.name) for field in dataclasses.fields(update.Schedules)})


def limits(tokens: int, *, prompt: int, response: int, queries: int, completions: int, ways: int, shares: bool) -> Limits:
    """What micro-batches hold. Raises ValueError: the mesh does not divide the batch, or `tokens` hold no row for each data way.

    Args: tokens: learner.micro_batch_tokens, 0: the whole batch. prompt, response: P and R. ways: see sharding.row_ways.
    """
    batch = queries * completions
    sharding.check_ways(batch, ways, what="learner.queries × learner.completions", mesh="learner.mesh")
    row_tokens = prompt + response
    if tokens and tokens < ways * row_tokens:
        each = f" for each of the {ways} ways of learner.mesh" if ways > 1 else ""
        raise ValueError(
            f"learner.micro_batch_tokens={tokens} does not hold one row{each}: a row has task.prompt_length + "
            f"task.response_length = {row_tokens} tokens; at least {ways * row_tokens}, or 0 for the whole batch"
        )
    sizes = dict(rows=batch, group=completions, prompt=prompt, response=response)
    return Limits(**sizes, shares=shares, tokens=tokens // ways, ways=ways)


def make_learner_config(c: Any, contract: contract_lib.Contract, policy: Policy, mesh: jax.sharding.Mesh) -> update.LearnerConfig:
    return update.LearnerConfig(
        policy=policy,
        objective=OBJECTIVES[c.objective],
        settings=ObjectiveSettings(**{field.name: c[field.name] for field in dataclasses.fields(ObjectiveSettings)}),
        limits=limits(
            c.micro_batch_tokens,
            prompt=contract.prompt_length,
            response=contract.response_length,
            queries=c.queries,
            completions=c.completions,
            ways=sharding.row_ways(mesh),
            shares=scoring.shares_prompts(policy.model, mesh),
        ),
        logit_bytes=(c.logit_megabytes << 20) * mesh.size,
        space=contract.response_space(),
        remat=hardware.value("learner.remat", c.remat, mesh.devices.flat[0].platform),
        has_reference=contract.has_reference,
    )


def make_moving_reference(c: Any, learner_config: update.LearnerConfig, mesh: jax.sharding.Mesh) -> MovingReference | None:
    """The reference that moves with the policy; None if the reference does not move, or is not stored."""
    r = c.reference
    moves = {"reset": (r.reset_steps, 0.0), "ema": (1, r.ema_decay)}
    if r.kind not in moves:
        return None
    every_steps, decay = moves[r.kind]
    return MovingReference(learner_config, mesh, every_steps=every_steps, decay=decay, offload=r.offload)
