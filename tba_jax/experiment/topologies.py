"""Devices that are not here, for --topology: TPUs as their compiler describes them, and TPU chips in the place of GPUs.

No compiler for GPUs runs without a driver, and the TPU's runs anywhere. So as many TPU chips stand in for the GPUs of a role, and
what programs take there is compared with the memory of the GPUs. Such figures are marked "by TPU proxy".
"""

import os
import re
from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental import topologies

from tba_jax.roles.gpus import Gpu

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


def parse(values: Sequence[str], *, roles: Sequence[str]) -> dict[str, str]:
    """Role -> topology, from the parts of --topology=TOPOLOGY or --topology=ROLE=TOPOLOGY,….

    A topology without a role is that of all roles which are not named. GPUs without a role are one machine, which the roles
    divide as under --role=all: {"all": "H100x8"}.

    Raises:
      ValueError: a role or a topology that does not exist; names those that do.
    """
    named: dict[str, str] = {}
    for value in values:
        role, _, topology = value.rpartition("=")
        if role and role not in roles:
            raise ValueError(f"--topology={value}: there is no role {role!r}; roles that compute: {', '.join(roles)}")
        if not gpus(topology) and not _TPUS.fullmatch(topology):
            raise ValueError(f"--topology={value}: {topology!r} is no topology, {_EXAMPLE}")
        if role in named:
            raise ValueError(f"--topology={','.join(values)} names {'two topologies' if not role else f'the {role} twice'}")
        named[role] = topology
    everywhere = named.pop("", "")
    if not (everywhere and gpus(everywhere)):
        return {role: topology for role in roles if (topology := named.get(role, everywhere))}
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


def gpus(topology: str) -> tuple[Gpu, ...]:
    """The GPUs of NAMExCOUNT or NAMExCOUNT@GIB, such as H100x8 or MI300Xx4@192; () for any other text.

    Raises:
      ValueError: the text does not say the memory of a GPU that is not in MEMORY.
    """
    if (found := _GPUS.fullmatch(topology)) is None:
        return ()
    known = {name.lower(): gib for name, gib in MEMORY.items()}
    gib = float(found["gib"] or known.get(found["name"].lower(), 0))
    if not gib:
        raise ValueError(f"{topology}: the memory of {found['name']} is not known: say it as {topology}@GIB, {_EXAMPLE}")
    kind, memory = found["name"], int(gib * (1 << 30))
    return tuple(Gpu(name=str(number), kind=kind, memory=memory) for number in range(int(found["count"])))


def stand_ins(count: int) -> list[Any]:
    """TPU chips in the place of so many GPUs. Raises ValueError where there are too many, or see `devices`."""
    if count > max(_CHIPS):
        raise ValueError(f"TPU chips can stand in for up to {max(_CHIPS)} GPUs of a role, not {count}")
    return devices(next(topology for chips, topology in _CHIPS.items() if chips >= count))[:count]


def devices(topology: str) -> list[Any]:
    """The TPUs of a topology, for which programs can be compiled and nothing can be run. Args: topology: see `parse`.

    Raises:
      ValueError: the TPU's compiler is not installed, or knows no such topology.
    """
    found = _TPUS.fullmatch(topology)
    if found is None:
        raise ValueError(f"{topology!r} is no topology, {_EXAMPLE}")
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
