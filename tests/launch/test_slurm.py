"""launch/slurm.sh as a job, with stand-ins for Slurm's commands. tests/whole_runs/test_slurm.py runs it on a real cluster."""

import os
import re
import subprocess
import sys

import pytest

from tests.support import tiny_run

SCRIPT = tiny_run.ROOT / "launch" / "slurm.sh"


@pytest.fixture
def job(tmp_path):
    """job(code, *flags, ends, queue) -> exit code, errors and calls of Slurm's commands; srun ends with `code`."""
    (tmp_path / "run" / "logs").mkdir(parents=True)

    def run(code: int, *flags: str, ends: tuple[str, ...] = (), queue: str = "", **variables: str):
        told = "".join(f"echo {end} > ${{word#*=}}.{number}; " for number, end in enumerate(ends))
        bodies = {"srun": f"for word; do case $word in --end=*) {told}:;; esac; done; exit {code}"}
        bodies["squeue"] = f"printf '{queue}'"
        for name in ("srun", "scontrol", "scancel", "squeue"):
            body = bodies.get(name, ":")
            (tmp_path / name).write_text(f'#!/bin/bash\necho "{name} $*" >> {tmp_path}/called\n{body}\n')
            (tmp_path / name).chmod(0o755)
        told = {"PATH": f"{tmp_path}:{os.defpath}", "SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "8", "USER": "me"} | variables
        command = [SCRIPT, *flags, f"--workdir={tmp_path / 'run'}"]
        done = subprocess.run(command, env=told, capture_output=True, text=True, timeout=30, check=False)
        return done.returncode, done.stderr, (tmp_path / "called").read_text().splitlines()

    return run


ELEMENT = {"SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "3"}


@pytest.mark.parametrize(
    ("code", "ends", "variables", "requeued"),
    [
        (0, (), {}, ""),
        (0, ("stopped",), ELEMENT, "5_3"),
        (0, ("stopped", "stopped"), {}, "7"),
        (137, (), {}, "7"),
        (1, (), {}, ""),  # the wrapper did not begin
    ],
    ids=str,
)
def test_a_job_queues_again_unless_its_role_is_done(job, code, ends, variables, requeued):
    ended, _, called = job(code, "--role=searcher", ends=ends, **variables)
    assert ended == code and called[1:] == [f"scontrol requeue {requeued}"] * bool(requeued)


@pytest.mark.parametrize("role, cancelled", [("trainer", ["scancel 8 9"]), ("searcher", [])])
def test_a_trainer_that_has_ended_for_good_cancels_the_jobs_of_its_run(job, tmp_path, role, cancelled):
    run = tmp_path / "run"
    lines = ["7 slurm.sh --role=trainer --workdir={}", "8 slurm.sh --role=searcher --workdir={}"]
    lines += ["9 slurm.sh --workdir={} --role=evaluator", "10 slurm.sh --role=searcher --workdir={}2"]
    queue = "".join(line.format(run) + r" \n" for line in lines)
    ended, said, called = job(137, f"--role={role}", ends=("stopped", "code 4"), queue=queue)
    assert ended == 1 and "ended for good: stopped, code 4" in said
    assert [line for line in called if line.startswith("scancel")] == cancelled and not any("requeue" in line for line in called)


@pytest.mark.parametrize("role, kill", [("trainer", 1), ("searcher", 0)])
def test_a_step_runs_the_wrapper_in_the_container(job, tmp_path, role, kill):
    """The processes of a trainer end together; the searchers of a node do not."""
    _, _, called = job(0, f"--role={role}", "--config.seed=3", WRAP="apptainer exec --nv x.sif", PYTHON=sys.executable)
    own = rf"--workdir={tmp_path}/run --deaths=20 --end=\S+/end-7-0"
    words = rf"srun .*--kill-on-bad-exit={kill} .*apptainer exec --nv x.sif {sys.executable} -m tba_jax.run.restart {own} "
    words += rf"{sys.executable} -m tba_jax.main --role={role} --config.seed=3 --workdir={tmp_path}/run"
    assert re.fullmatch(words, called[0])


def test_a_job_waits_for_the_folder_of_its_run(job, tmp_path):
    """A lost mount leaves an empty folder."""
    (tmp_path / "sleep").write_text(f"#!/bin/sh\nmkdir -p {tmp_path}/run/logs\n")
    (tmp_path / "sleep").chmod(0o755)
    (tmp_path / "run" / "logs").rmdir()
    ended, said, called = job(0)
    assert ended == 0 and "waiting for it" in said and len(called) == 1
