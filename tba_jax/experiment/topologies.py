"""The devices of each role: those of this machine, or for --topology those of a machine that is not here.

No compiler for GPUs runs without a driver, and the TPU's runs anywhere: as many TPU chips stand in for the GPUs of a role. What
programs take there is compared with the memory of the GPUs, and marked "by TPU proxy".
"""

import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.experimental import topologies

from tba_jax.experiment import meshes
from tba_jax.experiment.composition import Experiment
from tba_jax.programs import device_memory, in_words
from tba_jax.roles import gpus as gpus_lib
from tba_jax.roles.gpus import Gpu
from tba_jax.run import processes
from tba_jax.schemas import Mistakes

_GIB = 1 << 30


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


# This machine

# (variant, platform, devices, GiB of each): what a machine has at least. The first row is taken whose devices are here; GPUs
# beyond its count are used too, see roles/gpus.py.
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


def variant() -> str:
    """--for_this_machine: the variant of a recipe (configs/machines.py) for the devices that are here, by nvidia-smi or by JAX.

    Raises ValueError: there are accelerators of which none is large enough; or see gpus.jax_devices.
    """
    if visible := gpus_lib.visible():
        platform, count, memory = "gpu", len(visible), min(gpu.memory or 0 for gpu in visible)
    else:
        devices = gpus_lib.jax_devices()
        platform, count, memory = devices[0].platform, len(devices), device_memory(devices[0]) or 0
    rows = [row for row in VARIANTS if row[1] == platform]
    for name, _, least, gib in rows:
        if count >= least and memory >= gib * _GIB:
            return name
    raise ValueError(
        f"--for_this_machine has no variant for {in_short()} of {in_words(memory)}: the smallest has "
        f"{min((gib for *_, gib in rows), default=0)} GiB; JAX_PLATFORMS=cpu takes the variant for a CPU"
    )


def in_short() -> str:
    """The accelerators of this machine, or its cores and memory where it has none."""
    kinds = [gpu.kind for gpu in gpus_lib.visible()]
    kinds = kinds or [device.device_kind for device in jax.devices() if device.platform != "cpu"]
    if kinds:
        return ", ".join(f"{kinds.count(kind)} × {kind}" for kind in dict.fromkeys(kinds))
    return f"{len(gpus_lib.available_cpus())} cores, {in_words(processes.memory())} of memory"


def here(experiment: Experiment) -> tuple[dict[str, Devices], dict[str, str]]:
    """Role -> what it has on this machine under --role=all; and role -> why that does not do."""
    if visible := gpus_lib.visible():
        try:
            if experiment.config.schedule.mode == "interleaved":
                gpus_lib.check_free()  # JAX has to find its share of them in this one process
            return by_placement(experiment, visible), {}
        except ValueError as error:
            return {}, {"all roles": str(error)}
    found, refused, there = dict[str, Devices](), dict[str, str](), of_jax(gpus_lib.jax_devices())
    there = dataclasses.replace(there, where="the CPU" if there.on_host else "alone on this host")
    for role in meshes.roles_of(experiment.config):
        own = max(experiment.config.searchers.cpu_devices, there.count) if there.on_host and role == "searcher" else there.count
        try:
            meshes.check(experiment, role=role, devices=own)
            found[role] = dataclasses.replace(there, count=own)
        except ValueError as error:
            refused[role] = str(error)
    return found, refused


def by_placement(experiment: Experiment, there: Sequence[Gpu]) -> dict[str, Devices]:
    """Role -> its part of these GPUs under --role=all. Raises ValueError where the meshes of the roles do not fit them."""
    if experiment.config.schedule.mode == "interleaved":  # one process has all GPUs
        whole = gpus_lib.Placement(cpus=(), gpus=tuple(gpu.name for gpu in there), memory_fraction=gpus_lib.DEFAULT_SHARE)
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
        found[role] = Devices(count=len(mine), limit=limit, where=where + gpus_lib.filled(mine))
    return {role: found[role] for role in meshes.SECTIONS if role in found}


def place(experiment: Experiment, there: Sequence[Gpu]) -> dict[str, gpus_lib.Placement]:
    """Role name -> where --role=all runs it on this machine with these GPUs. Raises ValueError, see gpus_lib.place."""

    def check(devices: int) -> None:
        meshes.check(experiment, role="trainer", devices=devices)

    return gpus_lib.place(experiment.config, cpus=gpus_lib.available_cpus(), gpus=there, check=check)


# Machines that are not here

# Topologies that are known to work, with chips of 16, 31, 96 and 95 GiB. Others of these generations are tried.
KNOWN = (
    *("v5e:1x1", "v5e:2x2", "v5e:2x4", "v5e:4x4", "v6e:1x1", "v6e:2x2", "v6e:2x4"),
    *("v5p:1x1x1", "v5p:2x2x1", "v5p:2x2x2", "v5p:2x2x4", "v5p:4x4x4", "tpu7x:2x2x1"),
)
# GiB of GPUs whose name says how much they have, as the driver reports them: error correction takes a part of some.
MEMORY = {"T4": 14.7, "L4": 22.4, "A10G": 22.4, "L40S": 44.9, "A100": 80, "H100": 79.6, "H200": 140, "B200": 179}
# How the name of devices begins that stand in for GPUs.
BY_PROXY = "by TPU proxy, for"
# The share of a GPU's memory that programs may take by proxy: another compiler's figures stand for them, and gaps are lost.
PROXY_SHARE = 0.9
# Stand-ins, by how many chips they have.
_CHIPS = {1: "v5p:1x1x1", 4: "v5p:2x2x1", 8: "v5p:2x2x2", 16: "v5p:2x2x4", 64: "v5p:4x4x4"}
# NAME or NAME/CHIPS. The compiler ends its process at a size of 0.
_TPUS = re.compile(r"(?P<name>\w+:[1-9]\d*(x[1-9]\d*){1,2})(/(?P<chips>[1-9]\d*))?")
_GPUS = re.compile(r"(?P<name>[A-Za-z][\w-]*?)x(?P<count>[1-9]\d*)(@(?P<gib>[1-9]\d*(\.\d+)?))?")
_EXAMPLE = (
    f"such as v5p:2x2x1, v5p:2x2x1/2 for two of its chips, or H100x8 and L4x2@24 for GPUs; known: {', '.join(KNOWN)}, and "
    f"GPUs {', '.join(MEMORY)}"
)
# The compiler looks for TPUs and asks the cloud about them, unless it is told not to; and one process at a time may use a TPU.
_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5p-8",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def parse(values: Sequence[str]) -> dict[str, str]:
    """Role -> topology, from the parts of --topology=TOPOLOGY or --topology=ROLE=TOPOLOGY,….

    A topology without a role is that of all roles which are not named. GPUs without a role are one machine, which the roles
    divide as under --role=all: {"all": "H100x8"}.

    Raises ValueError: a role or a topology that does not exist; names those that do.
    """
    named: dict[str, str] = {}
    for value in values:
        role, _, topology = value.rpartition("=")
        if role and role not in meshes.SECTIONS:
            raise ValueError(f"--topology={value}: there is no role {role!r}; roles that compute: {', '.join(meshes.SECTIONS)}")
        if not gpus(topology) and not _TPUS.fullmatch(topology):
            raise ValueError(f"--topology={value}: {topology!r} is no topology, {_EXAMPLE}")
        if role in named:
            raise ValueError(f"--topology={','.join(values)} names {'two topologies' if not role else f'the {role} twice'}")
        named[role] = topology
    everywhere = named.pop("", "")
    if not (everywhere and gpus(everywhere)):
        return {role: topology for role in meshes.SECTIONS if (topology := named.get(role, everywhere))}
    if named:
        raise ValueError(f"--topology={','.join(values)}: {everywhere} is a machine for all roles, so no role can have another")
    return {"all": everywhere}


def use_no_devices() -> None:
    """Keeps JAX from looking for accelerators in this process. To be called before JAX has looked."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if "JAX_PLATFORMS" not in os.environ:
        jax.config.update("jax_platforms", "cpu")
    # A program of the cache is loaded onto its devices, and there are none.
    jax.config.update("jax_enable_compilation_cache", False)


def of_roles(experiment: Experiment, asked: Mapping[str, str], *roles: str) -> dict[str, Devices]:
    """Role -> the devices of its topology, of those roles that have one. Args: asked: see `parse`.

    Raises ValueError: a topology cannot be had, or the roles do not fit the machine that they share.
    """
    if machine_of_all := asked.get("all"):
        placed = by_placement(experiment, gpus(machine_of_all))
        return {role: _by_proxy(machine_of_all, placed[role].count, placed[role].limit) for role in roles if role in placed}
    found = Mistakes()
    made = {role: found.attempt(_of_topology, asked[role]) for role in roles if role in asked}
    found.end()
    return {role: on for role, on in made.items() if on}


def _of_topology(name: str) -> Devices:
    if there := gpus(name):
        return _by_proxy(name, len(there), int(there[0].usable_share(1) * (there[0].memory or 0)))
    return of_jax(devices(name), name=name)


def _by_proxy(name: str, count: int, limit: int | None) -> Devices:
    """TPU chips in the place of `count` GPUs of a machine. Args: limit: bytes that the role may take of each of the GPUs."""
    if count > max(_CHIPS):
        raise ValueError(f"TPU chips can stand in for up to {max(_CHIPS)} GPUs of a role, not {count}")
    chips = devices(next(topology for chips, topology in _CHIPS.items() if chips >= count))[:count]
    return of_jax(chips, name=f"{BY_PROXY} {count} of {name}", limit=int(PROXY_SHARE * (limit or 0)))


def gpus(topology: str) -> tuple[Gpu, ...]:
    """The GPUs of NAMExCOUNT or NAMExCOUNT@GIB, such as H100x8 or MI300Xx4@192; () for any other text.

    Raises ValueError: the text does not say the memory of a GPU that is not in MEMORY.
    """
    if (found := _GPUS.fullmatch(topology)) is None:
        return ()
    known = {name.lower(): gib for name, gib in MEMORY.items()}
    gib = float(found["gib"] or known.get(found["name"].lower(), 0))
    if not gib:
        raise ValueError(f"{topology}: the memory of {found['name']} is not known: say it as {topology}@GIB, {_EXAMPLE}")
    return tuple(Gpu(name=str(i), kind=found["name"], memory=int(gib * _GIB)) for i in range(int(found["count"])))


def devices(topology: str) -> list[Any]:
    """The TPUs of a topology, for which programs can be compiled and nothing can be run. Args: topology: see `parse`.

    Raises ValueError: the TPU's compiler is not installed, or knows no such topology.
    """
    found = _TPUS.fullmatch(topology)
    assert found is not None, "parse comes first"
    try:
        described = topologies.get_topology_desc(platform="tpu", topology_name=found["name"]).devices
    except RuntimeError as error:  # JaxRuntimeError is one too
        reason = str(error).splitlines()[0]
        if "TPU support not installed" in reason:
            raise ValueError(
                f"compiling for {topology} needs the TPU's compiler, which is the extra `tpu`: pip install -e '.[tpu]'"
            ) from error
        raise ValueError(f"{topology!r} is no topology, {_EXAMPLE} ({reason[:200].rstrip('.')})") from error
    chips = int(found["chips"] or len(described))
    if chips > len(described):
        raise ValueError(f"topology {topology} asks for {chips} of {len(described)} chips")
    return list(described[:chips])
