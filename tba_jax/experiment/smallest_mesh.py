"""The smallest mesh on which a role would fit, by the estimate from shapes."""

import dataclasses
from collections.abc import Iterator

from tba_jax.experiment import estimate, meshes
from tba_jax.experiment.composition import Experiment

# Numbers of devices that are tried beyond those of the role.
_COUNTS = (*range(1, 65), 128, 256, 512, 1024)

Sizes = tuple[int, int, int]


def advice(experiment: Experiment, *, role: str, devices: int, limit: int, scale: float = 1.0) -> str:
    """The end of a sentence about a role that does not fit: a mesh of its devices that would, or the smallest of more devices.

    Args:
      devices: of the role's policy; limit: bytes of each.
      scale: what the role takes, by an account that is better than the estimate, as a multiple of the estimate.
    """
    section = meshes.SECTIONS[role]
    for sizes in _meshes(devices):
        if _fits(experiment, role, sizes, limit=limit, scale=scale):
            return f"; it would with {_words(section, sizes)}, by the estimate from shapes"
    refused = f"; it fits no mesh of the {devices} device{'s' if devices > 1 else ''}"
    for count in (count for count in _COUNTS if count > devices):
        for sizes in _meshes(count):
            if sizes[0] == 1 and _fits(experiment, role, sizes, limit=limit, scale=scale):
                return f"{refused}; the smallest that would is {_words(section, sizes)}, by the estimate from shapes"
    return f"{refused}, and none of up to {_COUNTS[-1]}, by the estimate from shapes"


def _meshes(devices: int) -> Iterator[Sizes]:
    """All sizes (data, fsdp, tensor) of as many devices: those that divide the parameters least come first."""
    sizes = [
        (devices // parts, parts // tensor, tensor)
        for parts in range(1, devices + 1)
        if devices % parts == 0
        for tensor in range(1, parts + 1)
        if parts % tensor == 0
    ]
    yield from sizes


def _words(section: str, sizes: Sizes) -> str:
    names = zip(("data", "fsdp", "tensor"), sizes, strict=True)
    return f"{section}.mesh {' × '.join(f'{name}={size}' for name, size in names)}"


def _fits(experiment: Experiment, role: str, sizes: Sizes, *, limit: int, scale: float) -> bool:
    config = experiment.config.copy_and_resolve_references()
    mesh = config[meshes.SECTIONS[role]].mesh
    mesh.data, mesh.fsdp, mesh.tensor = sizes
    changed = dataclasses.replace(experiment, config=config)
    try:
        meshes.check(changed, role=role, devices=None)
    except ValueError:
        return False
    return scale * estimate.on_device(estimate.memory(changed)[role]) <= limit
