"""What tells a process of a trainer its number: flags, Slurm, Open MPI, TPU pods."""

import pytest

from tba_jax.run import world
from tba_jax.run.world import ALONE, World

STEP = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "1",
    "SLURM_STEP_NODELIST": "gpu[007-008,011]",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}
SHELL = {name: value for name, value in STEP.items() if name != "SLURM_STEP_NODELIST"}
MPI = {f"OMPI_COMM_WORLD_{name}": value for name, value in dict(RANK="2", SIZE="4", LOCAL_RANK="0", LOCAL_SIZE="2").items()}
POD = {"TPU_WORKER_HOSTNAMES": "host-0,host-1", "TPU_WORKER_ID": "1"}


def find(environment=None, *, coordinator="", processes=None, process=None) -> World:
    return world.find(coordinator=coordinator, processes=processes, process=process, environment=environment or {})


def test_a_trainer_of_one_process_needs_nothing():
    """Also one of a step of one task, in the shell of a job, and on one host of TPUs."""
    assert find(STEP, processes=1, process=0, coordinator="here:1") == ALONE
    for environment in ({}, {**STEP, "SLURM_STEP_NUM_TASKS": "1"}, SHELL, {"TPU_WORKER_HOSTNAMES": "localhost"}):
        assert find(environment) == ALONE


@pytest.mark.parametrize(
    "environment, given, process, processes, coordinator, local",
    [
        (STEP, dict(coordinator="node1:7133", processes=2, process=1), 1, 2, "node1:7133", (0, 1)),
        ({}, dict(coordinator="[::1]:80", processes=2, process=0), 0, 2, "[::1]:80", (0, 1)),
        (STEP, {}, 3, 5, "", (1, 2)),  # JAX finds the coordinator
        # Flags that repeat what Slurm says leave GPUs shared.
        (STEP, dict(coordinator="node1:7133", processes=5, process=3), 3, 5, "node1:7133", (1, 2)),
        (STEP | {"SLURM_GPUS_PER_TASK": "2"}, {}, 3, 5, "", (0, 1)),  # it sees its own GPUs alone
        (MPI, dict(coordinator="node1:7133"), 2, 4, "node1:7133", (0, 2)),
        (MPI, {}, 2, 4, "", (0, 2)),
        (POD, {}, None, None, "", (0, 1)),  # JAX finds all of it
    ],
)
def test_flags_come_before_what_the_launcher_says(environment, given, process, processes, coordinator, local):
    found = find(environment, **given)
    assert (found.process, found.processes, found.coordinator) == (process, processes, coordinator)
    assert (found.local_process, found.local_processes) == local


@pytest.mark.parametrize(
    "given, told",
    [
        (dict(processes=2, process=2, coordinator="a:1"), "--process=2 must be 0 to 1, as --processes=2"),
        (dict(processes=0, process=0, coordinator="a:1"), "--processes=0 must be at least 1"),
        (dict(processes=2, process=0, coordinator="a:99999"), "--coordinator=a:99999 must be"),
        (dict(processes=2, coordinator="a:1"), "needs --process as well"),
        (dict(process=1), "needs --coordinator and --processes as well"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_wrong_numbers_are_named(given, told):
    with pytest.raises(ValueError, match=told):
        find(**given)


def test_processes_of_a_host_share_its_gpus():
    shared = [((0, 1), 8), ((1, 2), 8), ((1, 4), 4), ((3, 4), 1), ((0, 2), 0)]
    found = [World(processes=8, local_process=i, local_processes=n).local_devices(visible) for (i, n), visible in shared]
    assert found == [list(range(8)), [4, 5, 6, 7], [1], [0], []]
    with pytest.raises(ValueError, match="3 GPUs of this host do not divide over the 2 processes"):
        World(processes=2, local_processes=2).local_devices(3)
