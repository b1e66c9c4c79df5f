"""The mesh of a role against the devices that it has: what the mesh must make up and divide."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tba_jax import sharding
from tba_jax.decoding import sizes
from tba_jax.experiment.composition import Experiment
from tba_jax.experiment.fitting import device_memory
from tba_jax.learner import micro_batches
from tba_jax.models import parameters

# Role -> the section of the config that has its mesh.
SECTIONS = {"trainer": "learner", "searcher": "searchers", "evaluator": "evaluation"}


# The share of a device's memory from which on learner.mesh.fsdp=0 splits the trainer's state.
_LARGEST_WHOLE_STATE = 1 / 3
# float32 numbers that a trained parameter takes on the devices: weight, gradient, update and two moments.
_STATE_NUMBERS = 5


def check(experiment: Experiment, *, role: str, devices: int | None, memory: int | None = None) -> None:
    """Raises ValueError where the mesh of a role does not make up its devices, or does not divide its rows or parameters.

    Args:
      devices: how many the role has; None where that is not known: then as few as its mesh can make up.
      memory: bytes of each device, None: not known.
    """
    config = experiment.config
    made = shape(experiment, role=role, devices=devices, memory=memory)
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


def shape(experiment: Experiment, *, role: str, devices: int | None, memory: int | None = None) -> tuple[int, int, int]:
    """The sizes (data, fsdp, tensor) of the mesh of a role. Args, Raises: as `check`."""
    section = SECTIONS[role]
    own = experiment.config[section].task_devices if role != "trainer" else 0
    mesh = tuple(experiment.config[section].mesh.values())
    if devices is None:
        devices = own + math.prod(max(size, 1) for size in mesh)
    if own >= devices:
        raise ValueError(f"{section}.task_devices={own} leaves the policy none of the {devices} devices of this role")
    data, fsdp, tensor = mesh
    if fsdp == 0:
        fsdp = _fsdp_by_need(experiment, ways=(devices - own) // tensor, tensor=tensor, memory=memory) if data == -1 else 1
    return sharding.mesh_shape((data, fsdp, tensor), devices - own, setting=f"{section}.mesh")


def _fsdp_by_need(experiment: Experiment, *, ways: int, tensor: int, memory: int | None) -> int:
    """What learner.mesh.fsdp=0 means: 1 where the state is small for a device, otherwise the most of `ways` that divides it.

    Args: ways: devices beside the tensor axis. memory: bytes of each device, None: not known, then the state counts as small.
    """
    policy = experiment.policy
    state = 4 * _STATE_NUMBERS * parameters.count(policy.trained_specs)
    frozen = jnp.dtype(policy.model.compute_dtype).itemsize * parameters.count(policy.model_specs) if policy.lora else 0
    if memory is None or (state + frozen) / tensor <= memory * _LARGEST_WHOLE_STATE:
        return 1

    def divides(fsdp: int) -> bool:
        try:
            parameters.check_divides({"data": 1, "fsdp": fsdp, "tensor": tensor}, policy.model_specs)
        except ValueError:
            return False
        return ways % fsdp == 0

    return max(filter(divides, range(2, ways + 1)), default=1)


def with_trainer_mesh(experiment: Experiment, devices: Sequence[Any] | None = None) -> Experiment:
    """The experiment of a trainer: learner.mesh has the numbers of its mesh. Args: devices: None: of this process."""
    devices = jax.devices() if devices is None else devices
    sizes = shape(experiment, role="trainer", devices=len(devices), memory=device_memory(devices[0]))
    config = experiment.config.copy_and_resolve_references()
    config.learner.mesh.update(dict(zip(sharding.MESH_AXES, sizes, strict=True)))
    return dataclasses.replace(experiment, config=config)


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
