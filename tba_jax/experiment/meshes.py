"""The mesh of a role against the devices that it has: what the mesh must make up and divide."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tba_jax import sharding
from tba_jax.decoding.slots import lane_sizes
from tba_jax.learner import update
from tba_jax.models import parameters
from tba_jax.models.policy import Policy
from tba_jax.programs import device_memory
from tba_jax.schemas import Mistakes

# Role -> the section of the config that has its mesh.
SECTIONS = {"trainer": "learner", "searcher": "searchers", "evaluator": "evaluation"}
# The share of a device's memory up to which learner.mesh.fsdp=0 keeps the trainer's state whole.
_LARGEST_WHOLE_STATE = 1 / 3
_STATE_BYTES = 5 * 4  # of a trained parameter on the devices


def roles_of(config: Any) -> list[str]:
    """The roles of a run that compute."""
    searches = config.searchers.count or config.schedule.mode == "interleaved"
    there = {"trainer": True, "searcher": searches, "evaluator": config.evaluation.enabled}
    return [role for role in SECTIONS if there[role]]


def check(experiment: Any, *, role: str, devices: int | None) -> None:
    """Raises ValueError where the mesh of a role does not make up its devices, or does not divide its rows or parameters.

    Args: devices: how many the role has; None: not known, so as few as its mesh can make up.
    """
    config, section = experiment.config, SECTIONS[role]
    made = shape(experiment, role=role, devices=devices)
    batch = config.learner.queries * config.learner.completions
    searched = config.searchers.queries_per_batch * config.searchers.samples_per_query
    settings = {
        "trainer": {
            "learner.queries × learner.completions": batch,
            "warm_start.batch_size": config.warm_start.batch_size if config.warm_start.steps else batch,
        },
        "searcher": {"searchers.queries_per_batch × searchers.samples_per_query": searched},
        "evaluator": {"evaluation.batch_size": config.evaluation.batch_size},
    }[role]
    found, ways = Mistakes(), made[0] * made[1]
    for what, rows in settings.items():
        found.attempt(sharding.check_ways, rows, ways, what=what, mesh=f"{section}.mesh")
    if role == "trainer":
        found.attempt(micro_batch_rows, config, ways=ways)
    # Slots that one way cannot divide into groups may suit as many ways as data=-1 makes.
    elif not found and (devices is not None or config[section].mesh.data != -1):
        found.attempt(_check_slots, config, role, ways=made[0], alone=bool(experiment.contract.turns))
    try:
        parameters.check_divides(dict(zip(sharding.MESH_AXES, made, strict=True)), experiment.policy.model_specs)
    except ValueError as error:
        found.add([f"{section}.mesh: {error}"])
    found.end()


def shape(experiment: Any, *, role: str, devices: int | None) -> tuple[int, int, int]:
    """The sizes (data, fsdp, tensor) of the mesh of a role. Args, Raises: as `check`."""
    section, own = SECTIONS[role], task_devices(experiment, role)
    settings = experiment.config[section].mesh
    mesh = (settings.data, settings.fsdp or 1, settings.tensor)  # for fsdp=0 see `by_need`
    if devices is None:
        devices = own + math.prod(max(size, 1) for size in mesh)
    if own >= devices:
        raise ValueError(f"{section}.task_devices={own} leaves the policy none of the {devices} devices of this role")
    return sharding.mesh_shape(mesh, devices - own, setting=f"{section}.mesh")


def in_words(experiment: Any, *, role: str, devices: int) -> str:
    """The mesh of a role by its sizes, such as "learner.mesh data=2 × fsdp=1 × tensor=1"."""
    made = zip(sharding.MESH_AXES, shape(experiment, role=role, devices=devices), strict=True)
    return f"{SECTIONS[role]}.mesh {' × '.join(f'{axis}={size}' for axis, size in made)}"


def task_devices(experiment: Any, role: str) -> int:
    """The devices of a role that are for its task's models alone."""
    return int(experiment.config[SECTIONS[role]].task_devices) if role != "trainer" else 0


def of_trainer(experiment: Any, devices: Sequence[Any]) -> Any:
    """The experiment with the mesh of a trainer on these devices, see `by_need`."""
    here = next((device for device in devices if device.process_index == jax.process_index()), devices[0])
    return by_need(experiment, devices=len(devices), memory=device_memory(here))


def by_need(experiment: Any, *, devices: int, memory: int | None) -> Any:
    """The experiment with what learner.mesh.fsdp=0 means for a trainer of so many devices.

    It means 1 where the trainer's state takes at most a third of a device's memory, or learner.mesh.data is set; otherwise all
    devices beside the tensor axis, or the most of them that divide the parameters.

    Args: memory: bytes of each device, None: not known, as on a CPU; then the state is whole.
    """
    mesh = experiment.config.learner.mesh
    if mesh.fsdp:
        return experiment
    config, policy = experiment.config.copy_and_resolve_references(), experiment.policy
    # A trainer always holds weight, gradient, update and two moments of each trained parameter in float32, and what is frozen.
    frozen = jnp.dtype(policy.model.compute_dtype).itemsize * parameters.count(policy.model_specs) if policy.lora else 0
    state = (_STATE_BYTES * parameters.count(policy.trained_specs) + frozen) / mesh.tensor
    config.learner.mesh.fsdp = 1
    if memory is not None and mesh.data == -1 and state > memory * _LARGEST_WHOLE_STATE:
        ways = devices // mesh.tensor
        fitting = [size for size in range(2, ways + 1) if ways % size == 0 and _divides(size, mesh.tensor, policy)]
        config.learner.mesh.fsdp = max(fitting, default=1)
    return dataclasses.replace(experiment, config=config)


def _divides(fsdp: int, tensor: int, policy: Policy) -> bool:
    try:
        parameters.check_divides({"data": 1, "fsdp": fsdp, "tensor": tensor}, policy.model_specs)
    except ValueError:
        return False
    return True


def micro_batch_rows(config: Any, *, ways: int) -> int:
    """The rows of a micro-batch on the learner's mesh. Raises ValueError, see update.limits."""
    learner, lengths = config.learner, dict(prompt=config.task.prompt_length, response=config.task.response_length)
    rows = dict(queries=learner.queries, completions=learner.completions)
    return update.limits(learner.micro_batch_tokens, **lengths, **rows, ways=ways, shares=False).full_rows


def slots_of(config: Any) -> int:
    """The sequences that a searcher decodes side by side."""
    s = config.searchers
    return s.slots or s.queries_per_batch * s.samples_per_query


def _check_slots(config: Any, role: str, *, ways: int, alone: bool) -> None:
    """Raises ValueError where the slots of a role that decodes cannot be divided over the data ways of its mesh. Args: alone:
    whether each sample is a request of its own."""
    s, section = config.searchers, SECTIONS[role]
    slots, samples, what = config.evaluation.batch_size, 1, f"evaluation.batch_size={config.evaluation.batch_size}"
    if role == "searcher":
        slots, samples = slots_of(config), 1 if alone else s.samples_per_query
        of_batch = f" ({slots} of the {s.queries_per_batch * s.samples_per_query} rows of a batch)"
        what = f"searchers.slots={s.slots}{'' if s.slots else of_batch}"
    try:
        lane_sizes(slots, samples, ways, lockstep=config.schedule.mode == "interleaved", what=what)
    except ValueError as error:
        raise ValueError(f"{section}.mesh.data: {error}") from error
