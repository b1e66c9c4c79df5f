"""The scripts under launch/: a role whose storage fails is run again by itself, and its end is not that of the run."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

LAUNCH = Path(__file__).parent.parent / "launch"
# A role that notes each of its lives, and ends by the next of the codes that it is given.
ROLE = 'echo >> "$1/lives"; shift; n=$(wc -l < "$WORKDIR/lives"); exit "${!n}"'


def again(workdir: Path, *codes: int) -> subprocess.Popen:
    command = [str(LAUNCH / "again.sh"), "bash", "-c", ROLE, "role", str(workdir), *map(str, codes)]
    return subprocess.Popen(
        command, env=os.environ | {"WORKDIR": str(workdir), "FIRST_PAUSE": "0"}, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize("codes", [(0,), (3, 3, 0), (3, 4), (2,), (5,), (7,)], ids=str)
def test_a_role_is_run_again_as_long_as_its_storage_fails(tmp_path, codes):
    (tmp_path / "config.json").write_text("{}")
    process = again(tmp_path, *codes)
    process.communicate(timeout=30)
    assert process.returncode == codes[-1] and len((tmp_path / "lives").read_text()) == len(codes)


def test_a_role_is_not_run_again_before_its_run_is_there(tmp_path):
    process = again(tmp_path, 3, 0)
    time.sleep(1.0)
    assert process.poll() is None and (tmp_path / "lives").read_text() == "\n"
    (tmp_path / "config.json").write_text("{}")
    _, errors = process.communicate(timeout=70)
    assert process.returncode == 0 and "holds no run at the moment" in errors


def test_a_role_that_is_asked_to_stop_is_not_run_again(tmp_path):
    command = [str(LAUNCH / "again.sh"), "bash", "-c", "trap 'exit 3' TERM; echo ready; while :; do sleep 0.1; done"]
    process = subprocess.Popen(command, env=os.environ | {"WORKDIR": str(tmp_path)}, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 3
    process.stdout.close()


@pytest.mark.parametrize("script", sorted(LAUNCH.glob("*.sh")), ids=lambda path: path.name)
def test_scripts_are_valid_and_run_roles_again(script):
    assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0
    assert "again.sh" in script.read_text()


def test_a_job_that_is_queued_again_begins_no_run_where_it_does_not_see_its_own(tmp_path):
    """Its node has lost the mount; the roles start once the run is there."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("srun", "sbatch", "scontrol"):
        (programs / name).write_text(f'#!/bin/sh\necho "{name} $*" >> {tmp_path}/called\n')
        (programs / name).chmod(0o755)
    workdir = tmp_path / "run"
    workdir.mkdir()
    told = {"SLURM_RESTART_COUNT": "1", "SLURM_SUBMIT_DIR": str(LAUNCH.parent), "SLURM_JOB_ID": "7", "LEASE_SECONDS": "0"}
    told |= {
        "LOOK_SECONDS": "0.2",
        "WORKDIR": str(workdir),
        "RUN": "--config=configs/demo.py",
        "PATH": f"{programs}:{os.defpath}",
    }
    job = subprocess.Popen(["bash", str(LAUNCH / "slurm.sh")], env=told, stderr=subprocess.PIPE, text=True)
    time.sleep(1.0)
    assert job.poll() is None and not (tmp_path / "called").exists()
    (workdir / "config.json").write_text("{}")
    _, errors = job.communicate(timeout=30)
    assert "holds no run at the moment" in errors
    called = (tmp_path / "called").read_text()
    assert "--role=trainer" in called and "sbatch" not in called and "scontrol requeue 7" in called


@pytest.mark.parametrize(
    "environment, expected",
    [
        ({}, {"0,2 0.90", "1 0.90"}),
        ({"GPUS": "4,5,6,7"}, {"4,6 0.90", "5,7 0.90"}),
        ({"CUDA_VISIBLE_DEVICES": "3"}, {"3 0.45"}),
        ({"GPUS": "1", "GPU_MEMORY": "0.3"}, {"1 0.3"}),
        ({"JAX_PLATFORMS": "cpu"}, {"- -"}),
    ],
    ids=lambda value: ",".join(sorted(value)),
)
def test_searchers_of_a_machine_are_dealt_its_gpus(tmp_path, environment, expected):
    driver, python = tmp_path / "nvidia-smi", tmp_path / "python"
    driver.write_text("#!/bin/sh\n[ \"$*\" = '--query-gpu=index --format=csv,noheader' ] && printf '0\\n1\\n2\\n'\n")
    python.write_text('#!/bin/sh\necho "${CUDA_VISIBLE_DEVICES--} ${XLA_CLIENT_MEM_FRACTION--}" >> "$WORKDIR/dealt"\n')
    for script in (driver, python):
        script.chmod(0o755)
    known = {name: value for name, value in os.environ.items() if name not in ("JAX_PLATFORMS", "CUDA_VISIBLE_DEVICES")}
    seen = known | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHON": str(python)} | environment
    subprocess.run([LAUNCH / "local.sh", "2", f"--workdir={tmp_path}"], env=seen, check=True, timeout=60)
    assert set((tmp_path / "dealt").read_text().splitlines()) == expected
