"""The devices of a role: checked against its mesh before anything is made, and told in the first line of its log."""

import dataclasses
import logging

from tba_jax import sharding
from tba_jax.experiment import compiling, composition, meshes
from tba_jax.experiment.joining import Invocation
from tba_jax.experiment.mistakes import Mistakes
from tba_jax.models import hardware
from tba_jax.rewards import task_models
from tba_jax.roles import gpus, jax_support

log = logging.getLogger(__name__)


def check(experiment: composition.Experiment, *roles: str, trainer_processes: int = 1) -> None:
    """Raises ValueError where JAX misses GPUs of this process, or the meshes of roles that run in it do not fit its devices.

    Args: trainer_processes: processes that the trainer will have, each with as many devices as this one.
    """
    devices, found = gpus.jax_devices(), Mistakes()
    found.attempt(hardware.check, experiment.policy.model, hardware.of(devices[0]))
    for role in roles:
        found.attempt(meshes.check, experiment, role=role, devices=len(devices) * (trainer_processes if role == "trainer" else 1))
        found.attempt(task_models.check, experiment.task, role=role)
    found.end()


def computed_on(s: Invocation, *roles: str, name: str = "") -> Invocation:
    """The invocation as the devices of this process compute it. The first line of a role's log says what they are.

    Args: name: of the role, if not its own.
    """
    devices = gpus.jax_devices()
    if devices[0].platform == "cpu" and (told := jax_support.hidden_gpus()):
        log.warning("%s", told)
    experiment = s.experiment.on_device(devices[0])
    meshed = compiling.of_trainer(s.experiment, devices) if "trainer" in roles else s.experiment
    for role in roles:
        sizes = zip(sharding.MESH_AXES, meshes.shape(meshed, role=role, devices=len(devices)), strict=True)
        mesh = " × ".join(f"{axis}={size}" for axis, size in sizes)
        compute = experiment.policy.model.compute_dtype
        log.info(
            "%s: backend %s, %d × %s, %s.mesh %s, model.compute_dtype=%s",
            *(name or role, devices[0].platform, len(devices), devices[0].device_kind, meshes.SECTIONS[role], mesh, compute),
        )
    return dataclasses.replace(s, experiment=experiment)
