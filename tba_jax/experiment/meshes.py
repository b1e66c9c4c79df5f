"""The mesh of a role against the devices that it has: what the mesh must make up and divide."""

import math
from typing import Any

from tba_jax import sharding
from tba_jax.decoding import sizes
from tba_jax.experiment.composition import Experiment
from tba_jax.learner import micro_batches
from tba_jax.models import parameters

# Role -> the section of the config that has its mesh.
SECTIONS = {"trainer": "learner", "searcher": "searchers", "evaluator": "evaluation"}


def check(experiment: Experiment, *, role: str, devices: int | None) -> None:
    """Raises ValueError where the mesh of a role does not make up its devices, or does not divide its rows or parameters.

    Args: devices: how many the role has; None where that is not known: then as few as its mesh can make up.
    """
    config = experiment.config
    made = shape(experiment, role=role, devices=devices)
    batch = config.learner.queries * config.learner.completions
    warm = config.warm_start.batch_size if config.warm_start.steps else batch
    rows_of_searcher = "searchers.queries_per_batch × searchers.samples_per_query"
    settings = {
        "trainer": {"learner.queries × learner.completions": batch, "warm_start.batch_size": warm},
        "searcher": {rows_of_searcher: config.searchers.queries_per_batch * config.searchers.samples_per_query},
        "evaluator": {"evaluation.batch_size": config.evaluation.batch_size},
    }[role]
    for what, rows in settings.items():
        sharding.check_ways(rows, made[0] * made[1], what=what)
    if role == "trainer":
        micro_batch_rows(config, ways=made[0] * made[1])
    _check_slots(config, role, ways=made[0])
    parameters.check_divides(dict(zip(sharding.MESH_AXES, made, strict=True)), experiment.policy.model_specs)


def shape(experiment: Experiment, *, role: str, devices: int | None) -> tuple[int, int, int]:
    """The sizes (data, fsdp, tensor) of the mesh of a role. Args, Raises: as `check`."""
    section = SECTIONS[role]
    own = experiment.config[section].task_devices if role != "trainer" else 0
    mesh = tuple(experiment.config[section].mesh.values())
    if devices is None:
        devices = own + math.prod(max(size, 1) for size in mesh)
    if own >= devices:
        raise ValueError(f"{section}.task_devices={own} leaves the policy none of the {devices} devices of this role")
    return sharding.mesh_shape(mesh, devices - own, setting=f"{section}.mesh")


def micro_batch_rows(config: Any, *, ways: int) -> int:
    """The rows of a micro-batch on the learner's mesh. Raises ValueError, see micro_batches.rows_within."""
    learner, row_tokens = config.learner, config.task.prompt_length + config.task.response_length
    sizes = dict(queries=learner.queries, completions=learner.completions)
    return micro_batches.rows_within(learner.micro_batch_tokens, row_tokens=row_tokens, **sizes, ways=ways)


def _check_slots(config: Any, role: str, *, ways: int) -> None:
    """Raises ValueError where the slots of a role that decodes cannot be divided over the data ways of its mesh."""
    s = config.searchers
    batch = s.queries_per_batch * s.samples_per_query
    if role == "searcher":
        what = f"searchers.slots={s.slots}" if s.slots else f"searchers.slots=0 (queries_per_batch × samples_per_query = {batch})"
        sizes.arrange(s.slots or batch, s.samples_per_query, ways, what=what)
    elif role == "evaluator":
        size = config.evaluation.batch_size
        sizes.arrange(size, 1, ways, what=f"evaluation.batch_size={size}")
