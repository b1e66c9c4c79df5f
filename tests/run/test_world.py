"""What tells a process of a trainer its number: flags, Slurm, Open MPI, TPU pods."""

import http.server
import threading

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
MPI = {f"OMPI_COMM_WORLD_{name}": value for name, value in dict(RANK="2", SIZE="4", LOCAL_RANK="0", LOCAL_SIZE="2").items()}
POD = {"TPU_WORKER_HOSTNAMES": "host-0,host-1", "TPU_WORKER_ID": "1"}


def find(environment=None, *, coordinator="", processes=None, process=None) -> World:
    return world.find(coordinator=coordinator, processes=processes, process=process, environment=environment or {})


@pytest.mark.parametrize("given", [{}, {"processes": 1}, {"processes": 1, "process": 0, "coordinator": "here:1"}], ids=str)
def test_a_trainer_of_one_process_needs_nothing(given):
    assert find(**given) == ALONE


def test_flags_say_all():
    found = find(STEP, coordinator="node1:7133", processes=2, process=1)
    assert (found.process, found.processes, found.address, found.source) == (1, 2, ("node1", 7133), "flags")
    assert find(coordinator="[::1]:80", processes=2, process=0).address == ("::1", 80)


def test_a_step_of_slurm():
    found = find(STEP)
    assert (found.process, found.processes, found.local_process, found.local_processes) == (3, 5, 1, 2)
    assert found.address[0] == "gpu007" and 1024 < found.address[1] < 1 << 16
    ports = {
        find(STEP | {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)}).address[1] for job in (77, 78) for step in (0, 1)
    }
    assert len(ports) == 4, "steps and jobs on one node have ports of their own"
    assert find({**STEP, "SLURM_STEP_NUM_TASKS": "1"}) == ALONE
    assert find({name: value for name, value in STEP.items() if name != "SLURM_STEP_NODELIST"}) == ALONE, "the shell of a job"
    for listed, first in (("login,gpu1", "login"), ("rack[2-3]-n[07,09],login", "rack2-n07"), ("node[1-2]-ib", "node1-ib")):
        assert find({**STEP, "SLURM_STEP_NODELIST": listed}).address[0] == first


def test_a_task_with_gpus_of_its_own_takes_all_that_it_sees():
    found = find({**STEP, "SLURM_GPUS_PER_TASK": "2"})
    assert (found.process, found.local_processes) == (3, 1) and found.local_devices(2) == [0, 1]


def test_flags_that_repeat_what_the_launcher_says_leave_gpus_shared():
    found = find(STEP, coordinator="node1:7133", processes=5, process=3)
    assert (found.address, found.local_process, found.local_processes) == (("node1", 7133), 1, 2)


def test_open_mpi_knows_numbers_and_no_address():
    found = find(MPI, coordinator="node1:7133")
    assert (found.process, found.processes, found.local_processes) == (2, 4, 2)
    with pytest.raises(ValueError, match="needs --coordinator"):
        find(MPI)


def test_a_host_of_a_tpu_pod():
    found = find(POD)
    assert (found.process, found.processes, found.address[0]) == (1, 2, "host-0")
    assert find({"TPU_WORKER_HOSTNAMES": "localhost"}) == ALONE


def test_a_tpu_vm_asks_the_metadata_server():
    class Metadata(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            assert self.headers["Metadata-Flavor"] == "Google"
            told = {"worker-network-endpoints": "a:b:10.0.0.1,c:d:10.0.0.2", "agent-worker-number": "1"}
            self.send_response(200)
            self.end_headers()
            self.wfile.write(told[self.path.rpartition("/")[2]].encode())

        def log_message(self, *_):
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Metadata)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        assert world.tpu_hosts(f"http://127.0.0.1:{server.server_port}/attributes") == (["10.0.0.1", "10.0.0.2"], "1")
    finally:
        server.shutdown()
        server.server_close()
    assert world.tpu_hosts(f"http://127.0.0.1:{server.server_port}") == ([], "")


@pytest.mark.parametrize(
    "given, told",
    [
        (dict(processes=2, process=2, coordinator="a:1"), "--process=2 must be 0 to 1, as --processes=2"),
        (dict(processes=2, process=-1, coordinator="a:1"), "--process=-1 must be 0 to 1"),
        (dict(processes=0, process=0, coordinator="a:1"), "--processes=0 must be at least 1"),
        (dict(processes=2, process=0, coordinator="a"), "--coordinator=a must be HOST:PORT"),
        (dict(processes=2, process=0, coordinator=":80"), "--coordinator=:80 must be HOST:PORT"),
        (dict(processes=2, process=0, coordinator="a:99999"), "--coordinator=a:99999 must be HOST:PORT"),
        (dict(processes=2, coordinator="a:1"), "needs --process as well"),
        (dict(process=1), "needs --coordinator and --processes as well"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_wrong_numbers_are_named(given, told):
    with pytest.raises(ValueError, match=told):
        find(**given)


@pytest.mark.parametrize(
    "local, visible, expected",
    [((0, 1), 8, list(range(8))), ((1, 2), 8, [4, 5, 6, 7]), ((1, 4), 4, [1]), ((3, 4), 1, [0]), ((0, 2), 0, [])],
    ids=str,
)
def test_processes_of_a_host_share_its_gpus(local, visible, expected):
    assert World(processes=8, local_process=local[0], local_processes=local[1]).local_devices(visible) == expected


def test_gpus_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="3 GPUs of this host do not divide over the 2 processes"):
        World(processes=2, local_processes=2).local_devices(3)
