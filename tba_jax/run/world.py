"""The processes that make up one trainer, and what tells each of them its number: flags, Slurm, Open MPI or a TPU's slice.

What neither flags nor these variables tell, `jax.distributed.initialize` finds: the coordinator, and on TPUs the numbers.
"""

import dataclasses
import importlib.util
import os
import re
from collections.abc import Mapping
from pathlib import Path


@dataclasses.dataclass(frozen=True, kw_only=True)
class World:
    """All processes of a trainer, as the process with the number `process`, from 0, sees them; None: JAX finds it.

    coordinator: HOST:PORT at which JAX' coordinator listens in process 0, "": JAX finds it. local_process, local_processes: the
    number of this process among those that share the devices of its host, and how many they are. source: what told the numbers.
    """

    process: int | None = 0
    processes: int | None = 1
    coordinator: str = ""
    local_process: int = 0
    local_processes: int = 1
    source: str = "flags"

    def local_devices(self, visible: int) -> list[int]:
        """The GPUs of this process, as numbers from 0 among the visible ones, which the processes of a host share equally.

        A process that is shown a single GPU takes it. Raises ValueError where the GPUs do not divide over the processes.
        """
        if self.local_processes == 1 or visible <= 1:
            return list(range(visible))
        if visible % self.local_processes:
            raise ValueError(
                f"{visible} GPUs of this host do not divide over the {self.local_processes} processes of the trainer on it "
                f"({self.source})"
            )
        each = visible // self.local_processes
        return list(range(self.local_process * each, (self.local_process + 1) * each))


ALONE = World()


def find(*, coordinator: str, processes: int | None, process: int | None, environment: Mapping[str, str] = os.environ) -> World:
    """The world of this process. Flags come first; numbers that no flag gives are those of the launcher's environment.

    Args: coordinator: --coordinator, "" where it is not given; processes, process: --processes and --process.

    Raises ValueError: a number is out of range, the coordinator is no HOST:PORT, or something is missing; names the flag.
    """
    if processes == 1 and process in (None, 0):
        return ALONE
    told = (of(environment) for of in (_of_slurm, _of_open_mpi, _of_tpu))
    found = next((world for world in told if world is not None and world.processes != 1), None)
    if None not in (processes, process) and coordinator and found is not None:
        # The launcher still knows which processes share a host, if it is the one that told the numbers.
        found = found if (found.processes, found.process) == (processes, process) else None
    if found is None and processes is None and process is None and not coordinator:
        return ALONE
    if found is not None:
        processes = found.processes if processes is None else processes
        process = found.process if process is None else process
    given = {"--coordinator": coordinator, "--processes": processes, "--process": process}
    if missing := " and ".join(name for name, value in given.items() if value in ("", None)) if found is None else "":
        raise ValueError(
            f"a trainer of several processes needs {missing} as well: its launcher does not say by itself what it is"
        )
    if processes is not None and processes < 1:
        raise ValueError(f"--processes={processes} must be at least 1")
    if process is not None and processes is not None and not 0 <= process < processes:
        raise ValueError(f"--process={process} must be 0 to {processes - 1}, as --processes={processes}")
    host, _, port = coordinator.rpartition(":")
    if coordinator and (not host or not port.isdecimal() or not 0 < int(port) < 1 << 16):
        raise ValueError(f"--coordinator={coordinator} must be HOST:PORT of process 0, such as node1:7133")
    return dataclasses.replace(found or ALONE, coordinator=coordinator, processes=processes, process=process)


def _of_slurm(environment: Mapping[str, str]) -> World | None:
    """A task of a step that srun started. The shell of a batch job is none."""
    if "SLURM_STEP_NODELIST" not in environment or "SLURM_PROCID" not in environment:
        return None
    # Slurm shows such a task its own GPUs alone; otherwise all tasks of a node see all of the step's.
    has_own = any(name in environment for name in ("SLURM_GPUS_PER_TASK", "SLURM_GPU_BIND"))
    # Tasks of each node, as "2(x3),1".
    parts = re.findall(r"(\d+)(?:\(x(\d+)\))?", environment["SLURM_STEP_TASKS_PER_NODE"])
    of_nodes = [int(tasks) for tasks, nodes in parts for _ in range(int(nodes or 1))]
    return World(
        process=int(environment["SLURM_PROCID"]),
        processes=int(environment["SLURM_STEP_NUM_TASKS"]),
        local_process=0 if has_own else int(environment["SLURM_LOCALID"]),
        local_processes=1 if has_own else of_nodes[int(environment["SLURM_NODEID"])],
        source="Slurm",
    )


def _of_open_mpi(environment: Mapping[str, str]) -> World | None:
    """A process that mpirun started."""
    if "OMPI_COMM_WORLD_RANK" not in environment:
        return None
    return World(
        process=int(environment["OMPI_COMM_WORLD_RANK"]),
        processes=int(environment["OMPI_COMM_WORLD_SIZE"]),
        local_process=int(environment["OMPI_COMM_WORLD_LOCAL_RANK"]),
        local_processes=int(environment["OMPI_COMM_WORLD_LOCAL_SIZE"]),
        source="Open MPI",
    )


def _of_tpu(environment: Mapping[str, str]) -> World | None:
    """A host of a TPU's slice, of which JAX knows the others: Kubernetes tells them by variables, a TPU VM by its metadata."""
    has_tpus = importlib.util.find_spec("libtpu") and any(Path(place).exists() for place in ("/dev/accel0", "/dev/vfio"))
    hosts = environment.get("TPU_WORKER_HOSTNAMES", "a TPU VM does not say, so there may be others," if has_tpus else "")
    return World(process=None, processes=None, source="the TPU's slice") if "," in hosts else None
