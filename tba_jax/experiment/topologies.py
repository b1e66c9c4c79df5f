"""TPUs that are not here: their devices as the TPU's compiler describes them, and what --topology says of each role."""

import math
import os
import re
from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental import topologies

# Topologies that are known to work, with chips of 16, 31, 96 and 95 GiB. Others of these generations are tried.
KNOWN = (
    *("v5e:1x1", "v5e:2x2", "v5e:2x4", "v5e:4x4", "v6e:1x1", "v6e:2x2", "v6e:2x4"),
    *("v5p:1x1x1", "v5p:2x2x1", "v5p:2x2x2", "v5p:2x2x4", "v5p:4x4x4", "tpu7x:2x2x1"),
)
# NAME or NAME/CHIPS. The compiler ends its process at a size of 0.
_NAME = re.compile(r"(?P<name>\w+:[1-9]\d*(x[1-9]\d*){1,2})(/(?P<chips>[1-9]\d*))?")
# The compiler looks for TPUs and asks the cloud about them, unless it is told not to; and one process at a time may use a TPU.
_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5p-8",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def parse(values: Sequence[str], *, roles: Sequence[str]) -> dict[str, str]:
    """Role -> topology, from the parts of --topology=TOPOLOGY or --topology=ROLE=TOPOLOGY,….

    Args: roles: those that there are. A topology without a role is that of all roles which are not named.

    Raises:
      ValueError: a role or a topology that does not exist; names those that do.
    """
    named: dict[str, str] = {}
    for value in values:
        role, _, topology = value.rpartition("=")
        if role and role not in roles:
            raise ValueError(f"--topology={value}: there is no role {role!r}; roles that compute: {', '.join(roles)}")
        if not _NAME.fullmatch(topology):
            raise ValueError(f"--topology={value}: {topology!r} is no topology, {_example()}")
        if role in named:
            raise ValueError(f"--topology={','.join(values)} names {'two topologies' if not role else f'the {role} twice'}")
        named[role] = topology
    everywhere = named.pop("", "")
    return {role: named.get(role, everywhere) for role in roles if named.get(role, everywhere)}


def _example() -> str:
    return f"such as v5p:2x2x1, or v5p:2x2x1/2 for two of its chips; known: {', '.join(KNOWN)}"


def use_no_devices() -> None:
    """Keeps JAX from looking for accelerators in this process, which compiles for others. To be called before JAX has looked."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if "JAX_PLATFORMS" not in os.environ:
        jax.config.update("jax_platforms", "cpu")
    # A program of the cache is loaded onto its devices, and there are none.
    jax.config.update("jax_enable_compilation_cache", False)


def devices(topology: str) -> list[Any]:
    """The devices of a topology, for which programs can be compiled and nothing can be run. Args: topology: see `parse`.

    Raises:
      ValueError: the TPU's compiler is not installed, or knows no such topology.
    """
    found = _NAME.fullmatch(topology)
    if found is None:
        raise ValueError(f"{topology!r} is no topology, {_example()}")
    try:
        described = topologies.get_topology_desc(platform="tpu", topology_name=found["name"]).devices
    except RuntimeError as error:  # JaxRuntimeError is one too
        reason = str(error).splitlines()[0]
        if "TPU support not installed" in reason:
            raise ValueError(
                f"compiling for {topology} needs the TPU's compiler, which is the extra `tpu`: pip install -e '.[tpu]'"
            ) from error
        raise ValueError(f"{topology!r} is no topology, {_example()} ({reason[:200].rstrip('.')})") from error
    chips = int(found["chips"] or len(described))
    if chips > len(described):
        raise ValueError(f"topology {topology} asks for {chips} of {len(described)} chips")
    return list(described[:chips])


def larger(topology: str) -> list[str]:
    """The known topologies of the same generation with more chips, ascending. Args: topology: see `parse`."""

    def chips(name: str) -> int:
        found = _NAME.fullmatch(name)
        assert found is not None
        return int(found["chips"] or math.prod(map(int, found["name"].partition(":")[2].split("x"))))

    same = [name for name in KNOWN if name.partition(":")[0] == topology.partition(":")[0] and chips(name) > chips(topology)]
    return sorted(same, key=chips)
