"""The devices of this machine that each role of a run gets, and the variant of a recipe that is made for such a machine."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from tba_jax.experiment import meshes
from tba_jax.experiment.composition import Experiment
from tba_jax.programs import device_memory, in_words
from tba_jax.roles import gpus, placement
from tba_jax.run import processes

# (variant, platform, devices, GiB of each): what a machine has at least. The first row is taken whose devices are here; GPUs
# beyond its count are used too, see roles/placement.py.
VARIANTS = (
    ("8x80gb", "gpu", 8, 70),
    ("1x80gb", "gpu", 1, 70),
    ("1x24gb", "gpu", 1, 20),
    ("1x16gb", "gpu", 1, 14),
    ("v5p-8", "tpu", 4, 80),
    ("v5e-8", "tpu", 8, 15),
    ("v5e-1", "tpu", 1, 15),
    ("cpu", "cpu", 1, 0),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Devices:
    """What a role has. count: of devices; limit: bytes that programs may take on each, None: not known; where: in words;
    on_host: whether their memory is that of the machine, which all roles share; of_jax: the devices that are compiled for."""

    count: int
    limit: int | None
    where: str
    on_host: bool = False
    of_jax: Sequence[Any] = ()


def of_jax(devices: Sequence[Any], *, name: str = "", limit: int | None = None) -> Devices:
    """Devices as JAX describes them. Args: name: how they are called besides; limit: None: what the devices say."""
    first, on_host = devices[0], devices[0].platform == "cpu"
    where = f"{len(devices)} × {first.device_kind}{f' ({name})' if name else ''}"
    limit = limit or (processes.memory() if on_host else device_memory(first))
    return Devices(count=len(devices), limit=limit, where=where, on_host=on_host, of_jax=devices)


def here(experiment: Experiment) -> tuple[dict[str, Devices], dict[str, str]]:
    """Role -> what it has on this machine under --role=all; and role -> why that does not do."""
    if visible := gpus.visible():
        try:
            if experiment.config.schedule.mode == "interleaved":
                gpus.check_free()  # JAX has to find its share of them in this one process
            return by_placement(experiment, visible), {}
        except ValueError as error:
            return {}, {"all roles": str(error)}
    found, refused, there = dict[str, Devices](), dict[str, str](), of_jax(jax.devices())
    there = dataclasses.replace(there, where="the CPU" if there.on_host else "alone on this host")
    for role in meshes.roles_of(experiment.config):
        own = max(experiment.config.searchers.cpu_devices, there.count) if there.on_host and role == "searcher" else there.count
        try:
            meshes.check(experiment, role=role, devices=own)
            found[role] = dataclasses.replace(there, count=own)
        except ValueError as error:
            refused[role] = str(error)
    return found, refused


def by_placement(experiment: Experiment, there: Sequence[gpus.Gpu]) -> dict[str, Devices]:
    """Role -> its part of these GPUs and what it may take of them under --role=all.

    Raises:
      ValueError: the meshes of the roles do not fit them.
    """
    if experiment.config.schedule.mode == "interleaved":  # one process has all GPUs
        whole = placement.Placement(cpus=(), gpus=tuple(gpu.name for gpu in there), memory_fraction=gpus.DEFAULT_SHARE)
        placed = dict.fromkeys(meshes.roles_of(experiment.config), whole)
    else:
        placed = place(experiment, there)
    found: dict[str, Devices] = {}
    # Of several searchers, the one with the least memory decides, which is the last to be noted.
    for name, its in sorted(placed.items(), key=lambda item: -item[1].memory_fraction):
        role, mine = name.split("-")[0], [gpu for gpu in there if gpu.name in its.gpus]
        meshes.check(experiment, role=role, devices=len(mine))
        limit = min((int(gpu.memory * its.memory_fraction) for gpu in mine if gpu.memory), default=None)
        where = f"GPU{'s' if len(mine) > 1 else ''} {', '.join(its.gpus)}, {its.memory_fraction:.1%} of the memory"
        found[role] = Devices(count=len(mine), limit=limit, where=where + gpus.filled(mine))
    return {role: found[role] for role in meshes.SECTIONS if role in found}


def place(experiment: Experiment, there: Sequence[gpus.Gpu]) -> dict[str, placement.Placement]:
    """Role name -> where --role=all runs it on this machine with these GPUs. Raises ValueError, see placement.place."""

    def check(devices: int) -> None:
        meshes.check(experiment, role="trainer", devices=devices)

    return placement.place(experiment.config, cpus=placement.available_cpus(), gpus=there, check=check)


def in_short() -> str:
    """The accelerators of this machine, or its cores and memory where it has none."""
    kinds = [gpu.kind for gpu in gpus.visible()] or [device.device_kind for device in jax.devices() if device.platform != "cpu"]
    if kinds:
        return ", ".join(f"{kinds.count(kind)} × {kind}" for kind in dict.fromkeys(kinds))
    return f"{len(placement.available_cpus())} cores, {in_words(processes.memory())} of memory"


def variant() -> str:
    """--for_this_machine: the variant of a recipe (configs/machines.py) for the devices that are here, by nvidia-smi or by JAX.

    Raises:
      ValueError: there are accelerators of which none is large enough; or see gpus.jax_devices.
    """
    if visible := gpus.visible():
        platform, count, memory = "gpu", len(visible), min(gpu.memory or 0 for gpu in visible)
    else:
        devices = gpus.jax_devices()
        platform, count, memory = devices[0].platform, len(devices), device_memory(devices[0]) or 0
    rows = [row for row in VARIANTS if row[1] == platform]
    for name, _, least, gib in rows:
        if count >= least and memory >= gib * (1 << 30):
            return name
    raise ValueError(
        f"--for_this_machine has no variant for {in_short()} of {in_words(memory)}: the smallest has "
        f"{min((gib for *_, gib in rows), default=0)} GiB; JAX_PLATFORMS=cpu takes the variant for a CPU"
    )
