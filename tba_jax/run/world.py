"""The processes that make up one trainer, and what tells each of them its number: flags, Slurm, Open MPI or a TPU pod."""

import dataclasses
import importlib.util
import os
import re
import urllib.request
from collections.abc import Mapping
from pathlib import Path

# Ports at which process 0 awaits the others where nobody names one; above those that systems hand out to clients by themselves.
_FIRST_PORT, _PORTS = 61000, 4000
_METADATA = "http://metadata.google.internal/computeMetadata/v1/instance/attributes"
_METADATA_SECONDS = 5.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class World:
    """All processes of a trainer, as the process with the number `process`, from 0, sees them.

    coordinator: HOST:PORT at which process 0 awaits the others. local_process, local_processes: the number of this process among
    those that share the devices of its host, and how many they are. source: what told the numbers, in words.
    """

    process: int = 0
    processes: int = 1
    coordinator: str = ""
    local_process: int = 0
    local_processes: int = 1
    source: str = "flags"

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of the coordinator."""
        host, _, port = self.coordinator.rpartition(":")
        return host.strip("[]"), int(port)

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
    told = (of(environment) for of in (_of_slurm, _of_open_mpi, _of_tpu_pod))
    found = next((world for world in told if world is not None and world.processes > 1), None)
    if None not in (processes, process) and coordinator:
        # The launcher still knows which processes share a host, if it is the one that told the numbers.
        found = found if found is not None and (found.processes, found.process) == (processes, process) else None
    if found is None and processes is None and process is None and not coordinator:
        return ALONE
    if found is not None:
        processes = found.processes if processes is None else processes
        process = found.process if process is None else process
        coordinator = coordinator or found.coordinator
    if processes is None or process is None or not coordinator:
        there = {"--coordinator": bool(coordinator), "--processes": processes is not None, "--process": process is not None}
        missing = " and ".join(name for name, is_there in there.items() if not is_there)
        raise ValueError(
            f"a trainer of several processes needs {missing} as well: its launcher does not say by itself what it is"
        )
    if processes < 1:
        raise ValueError(f"--processes={processes} must be at least 1")
    if not 0 <= process < processes:
        raise ValueError(f"--process={process} must be 0 to {processes - 1}, as --processes={processes}")
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ValueError(f"--coordinator={coordinator} must be HOST:PORT of process 0, such as node1:7133")
    return dataclasses.replace(found or ALONE, coordinator=coordinator, processes=processes, process=process)


def _of_slurm(environment: Mapping[str, str]) -> World | None:
    """A task of a step that srun started. The shell of a batch job is none."""
    if "SLURM_STEP_NODELIST" not in environment or "SLURM_PROCID" not in environment:
        return None
    job, step = int(environment["SLURM_JOB_ID"]), int(environment["SLURM_STEP_ID"])
    # Slurm shows such a task its own GPUs alone; otherwise all tasks of a node see all of the step's.
    has_own = any(name in environment for name in ("SLURM_GPUS_PER_TASK", "SLURM_GPU_BIND"))
    of_nodes = _tasks_of_nodes(environment["SLURM_STEP_TASKS_PER_NODE"])
    return World(
        process=int(environment["SLURM_PROCID"]),
        processes=int(environment["SLURM_STEP_NUM_TASKS"]),
        coordinator=f"{_first_host(environment['SLURM_STEP_NODELIST'])}:{_FIRST_PORT + (97 * job + step) % _PORTS}",
        local_process=0 if has_own else int(environment["SLURM_LOCALID"]),
        local_processes=1 if has_own else of_nodes[int(environment["SLURM_NODEID"])],
        source="Slurm",
    )


def _first_host(listed: str) -> str:
    """The first name of Slurm's list of nodes: of "rack[2-3]-n[07,09],login" that is "rack2-n07"."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", listed)
    assert first is not None, listed
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first[0])


def _tasks_of_nodes(listed: str) -> list[int]:
    """Tasks of each node, from Slurm's "2(x3),1"."""
    parts = [re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part) for part in listed.split(",")]
    return [int(part[1]) for part in parts if part for _ in range(int(part[2] or 1))]


def _of_open_mpi(environment: Mapping[str, str]) -> World | None:
    """A process that mpirun started; which does not say where process 0 can be reached."""
    if "OMPI_COMM_WORLD_RANK" not in environment:
        return None
    return World(
        process=int(environment["OMPI_COMM_WORLD_RANK"]),
        processes=int(environment["OMPI_COMM_WORLD_SIZE"]),
        local_process=int(environment["OMPI_COMM_WORLD_LOCAL_RANK"]),
        local_processes=int(environment["OMPI_COMM_WORLD_LOCAL_SIZE"]),
        source="Open MPI",
    )


def _of_tpu_pod(environment: Mapping[str, str]) -> World | None:
    """A host of a TPU slice: Kubernetes sets variables, and a TPU VM asks the metadata server of its cloud."""
    hosts = environment.get("TPU_WORKER_HOSTNAMES", "").split(",")
    worker = environment.get("TPU_WORKER_ID", "")
    may_have_tpus = importlib.util.find_spec("libtpu") and any(Path(place).exists() for place in ("/dev/accel0", "/dev/vfio"))
    if "TPU_WORKER_HOSTNAMES" not in environment and may_have_tpus:
        hosts, worker = tpu_hosts()
    if len(hosts) < 2 or not worker.isdecimal():
        return None
    return World(process=int(worker), processes=len(hosts), coordinator=f"{hosts[0]}:{_FIRST_PORT}", source="the TPU pod")


def tpu_hosts(metadata: str = _METADATA) -> tuple[list[str], str]:
    """Addresses of the hosts of this TPU VM's slice, and the number of this one. ([], "") where nobody answers.

    Args: metadata: URL of the attributes of this machine.
    """

    def read(name: str) -> str:
        request = urllib.request.Request(f"{metadata}/{name}", headers={"Metadata-Flavor": "Google"})
        with urllib.request.urlopen(request, timeout=_METADATA_SECONDS) as answer:
            return str(answer.read().decode())

    try:
        listed = read("worker-network-endpoints")
        return [each.split(":")[2] for each in listed.split(",")], read("agent-worker-number")
    except (OSError, IndexError):
        return [], ""
