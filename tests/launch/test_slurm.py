"""launch/slurm.sh and the jobs that it submits, with stand-ins for Slurm's commands."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

LAUNCH = Path(__file__).parent.parent.parent / "launch"
FLAGS = ["--config=configs/demo.py", "--config.seed=1"]


@pytest.fixture
def slurm(tmp_path):
    """A folder for the PATH with stand-ins that note how they were called. srun ends with the code in `tmp_path/code`."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("srun", "sbatch", "scontrol", "scancel"):
        code = f"$(cat {tmp_path}/code 2>/dev/null || echo 0)" if name == "srun" else "0"
        (programs / name).write_text(f'#!/bin/sh\necho "{name} $*" >> {tmp_path}/called\nexit "{code}"\n')
        (programs / name).chmod(0o755)
    return programs


def environment(programs: Path, **variables: str) -> dict[str, str]:
    home = {"HOME": str(programs.parent), "PATH": f"{programs}:{os.defpath}", "PYTHON": sys.executable}
    return home | {"SLURM_SUBMIT_DIR": str(LAUNCH.parent), "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node1"} | variables


def submit(programs: Path, *flags: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [str(LAUNCH / "slurm.sh"), f"--workdir={programs.parent / 'run'}", *flags]
    return subprocess.run(
        command, env=environment(programs, **variables), capture_output=True, text=True, timeout=60, check=False
    )


def printed(programs: Path, *flags: str, **variables: str) -> list[list[str]]:
    """The words of each line that --dry_run prints."""
    done = submit(programs, "--dry_run", *(flags or FLAGS), **variables)
    assert done.returncode == 0, done.stderr
    assert not (programs.parent / "run").exists() and not (programs.parent / "called").exists()
    return [line.split() for line in done.stdout.splitlines()]


def test_a_dry_run_prints_jobs_and_their_steps(slurm):
    trainer, step, evaluator, searchers, searcher = printed(slurm)
    assert trainer[0] == searchers[0] == "sbatch" and step[0] == evaluator[0] == searcher[0] == "srun"
    assert {"--nodes=1", "--gres=gpu:5", "--cpus-per-task=32", "--mem=128G", "--requeue", "--signal=TERM@180"} <= set(trainer)
    assert {"--ntasks=1", "--gres=gpu:4", "--mem=96G", "--role=trainer", *FLAGS} <= set(step)
    assert {"--ntasks=1", "--gres=gpu:1", "--exact", "--role=evaluator", *FLAGS} <= set(evaluator)
    assert {"--array=0-3", "--gres=gpu:1", "--requeue", "--signal=TERM@180"} <= set(searchers)
    assert {"--exact", "--gres=gpu:1", "--role=searcher", *FLAGS} <= set(searcher)
    assert not any("--partition" in word or "--account" in word for word in trainer)
    # A step that names no memory takes all of its job's, and the step beside it waits for ever.
    lines = printed(slurm, TRAINER_MEMORY="0", EVALUATOR_MEMORY="0", SEARCHER_MEMORY="0")
    assert not any(word.startswith("--mem") for line in lines if line[0] == "sbatch" for word in line)
    assert all("--mem=0" in line for line in lines if line[0] == "srun")


SITE = dict(ACCOUNT="lab", PARTITION="big", SEARCHER_PARTITION="spot", SBATCH_MORE="--exclusive --exclude=node7")


@pytest.mark.parametrize(
    ("variables", "line", "words"),
    [
        ({"TRAINER_TASKS": "node"}, 1, "--nodes=2 --ntasks=2 --ntasks-per-node=1 --cpus-per-task=24 --gres=gpu:4"),
        ({"TRAINER_TASKS": "gpu"}, 0, "--nodes=2 --gres=gpu:4 --mem=96G"),
        # Each process ends by itself, so that the code of the first one says why.
        ({"TRAINER_TASKS": "gpu"}, 1, "--ntasks=8 --ntasks-per-node=4 --cpus-per-task=6 --kill-on-bad-exit=0 --wait=90"),
        ({"SEARCHERS": "8", "SEARCHERS_PER_NODE": "4", "SEARCHER_GPUS": "2"}, 2, "--array=0-1 --gres=gpu:8 --cpus-per-task=32"),
        (SITE, 0, "--account=lab --partition=big --exclusive --exclude=node7"),
        (SITE, 2, "--account=lab --partition=spot --exclusive --exclude=node7"),
    ],
    ids=str,
)
def test_variables_become_words_of_sbatch_and_srun(slurm, variables, line, words):
    assert set(words.split()) <= set(printed(slurm, TRAINER_NODES="2", EVALUATOR="none", **variables)[line])


def test_roles_run_in_a_container(slurm):
    image = slurm.parent / "tba.sif"
    image.write_text("")
    hub = {"HF_HOME": "/data/hub", "CONTAINER_IMAGE": str(image), "CONTAINER_MOUNTS": "/scratch:/scratch"}
    mounts = f"{LAUNCH.parent},{slurm.parent / 'run'},/data/hub,/scratch:/scratch"
    steps = [line for line in printed(slurm, CONTAINER="pyxis", **hub) if line[0] == "srun"]
    assert steps and all({f"--container-image={image}", f"--container-mounts={mounts}"} <= set(line) for line in steps)
    steps = [line for line in printed(slurm, CONTAINER="apptainer", **hub) if line[0] == "srun"]
    inside = ["apptainer", "exec", "--nv", "--bind", mounts, "--pwd", str(LAUNCH.parent), str(image), sys.executable, "-m"]
    assert steps and all(line[line.index("apptainer") :][: len(inside)] == inside for line in steps)


def test_a_change_of_the_schedule_is_for_the_trainer_alone(slurm):
    changed = ["--config.learner.steps=9", "--allow_change=learner.steps,replay.capacity"]
    roles = [line for line in printed(slurm, *FLAGS, *changed) if line[0] == "srun"]
    for line in roles:
        assert set(FLAGS) <= set(line) and (set(changed) <= set(line)) == ("--role=trainer" in line)
        assert "--role=trainer" in line or not set(changed) & set(line)


@pytest.mark.parametrize(
    ("flags", "variables", "named"),
    [
        (FLAGS, {"TRAINER_TASKS": "gpu", "TRAINER_GPUS": "5"}, ["TRAINER_GPUS=5", "TRAINER_CPUS=24"]),
        ([*FLAGS, "--only=evaluator"], {}, ["only=evaluator", "trainer searchers"]),
        ([*FLAGS, "--only=searchers"], {"SEARCHERS": "0"}, ["SEARCHERS=0", "--only=searchers"]),
        (FLAGS, {"EVALUATOR_MEMORY": "0"}, ["TRAINER_MEMORY=96", "EVALUATOR_MEMORY=0"]),
        (FLAGS, {"CONTAINER": "pyxis"}, ["CONTAINER=pyxis", "CONTAINER_IMAGE"]),
        (FLAGS, {"PYTHON": "/none/python"}, ["PYTHON=/none/python"]),
        ([*FLAGS, "--role=trainer"], {}, ["--role=trainer"]),
        (["--config.seed=1"], {}, ["holds no run yet", "--config=RECIPE"]),
    ],
    ids=lambda value: " ".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else value[-1],
)
def test_bad_values_are_refused_by_one_sentence(slurm, flags, variables, named):
    done = submit(slurm, *flags, **variables)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("error: ") and all(word in done.stderr for word in named), done.stderr
    assert not (slurm.parent / "run").exists() and not (slurm.parent / "called").exists()


def start(script: str, programs: Path, **variables: str) -> subprocess.Popen[str]:
    command = ["bash", str(LAUNCH / script), f"--workdir={programs.parent / 'run'}", *FLAGS]
    told = environment(programs, LOOK_SECONDS="0.1", **variables)
    return subprocess.Popen(command, env=told, stderr=subprocess.PIPE, text=True)


def called(programs: Path, program: str) -> list[str]:
    return [line for line in (programs.parent / "called").read_text().splitlines() if line.startswith(program)]


def test_a_job_begins_no_run_where_it_does_not_see_its_own(slurm):
    """Its node has lost the mount; the roles start once the run is there."""
    job = start("slurm_job.sh", slurm, SLURM_RESTART_COUNT="1")
    time.sleep(0.3)
    assert job.poll() is None and not (slurm.parent / "called").exists()
    (slurm.parent / "run" / "logs").mkdir(parents=True)
    _, errors = job.communicate(timeout=30)
    assert "waiting until it is back" in errors and called(slurm, "srun")
    assert called(slurm, "scontrol") == ["scontrol requeue 7"]  # asked to stop: there is no finished.json


def ended(script: str, programs: Path, *, code: str, **variables: str) -> tuple[int, str]:
    """The exit code and the errors of a job of an existing run whose roles end by a code."""
    (programs.parent / "run" / "logs").mkdir(parents=True, exist_ok=True)
    (programs.parent / "code").write_text(code)
    job = start(script, programs, **variables)
    _, errors = job.communicate(timeout=60)
    return job.returncode, errors


@pytest.mark.parametrize(
    ("code", "variables", "queued", "starts"),
    [
        ("130", {}, True, 1),
        ("2", {}, False, 1),
        ("2", {"SLURM_RESTART_COUNT": "1"}, True, 1),  # a hub that is away for a moment, or a lease that is still held
        ("6", {"DEATHS": "1"}, True, 2),
    ],
)
def test_what_follows_from_the_end_of_a_trainer(slurm, code, variables, queued, starts):
    job, _ = ended("slurm_job.sh", slurm, code=code, EVALUATOR="none", **variables)
    assert bool(called(slurm, "scontrol")) == queued and len(called(slurm, "srun")) == starts
    assert job == (0 if queued else int(code))


def test_searchers_of_a_trainer_that_has_ended_for_good_are_cancelled(slurm):
    (slurm / "sbatch").write_text("#!/bin/sh\necho Submitted batch job 1$#\n")
    for flags in (FLAGS, [*FLAGS, "--only=searchers"]):
        assert submit(slurm, *flags).returncode == 0
    joined = (slurm.parent / "run" / "logs" / "slurm-joined").read_text().split()
    job, errors = ended("slurm_job.sh", slurm, code="4", EVALUATOR="none")
    assert job == 4 and len(joined) == 2 and called(slurm, "scancel") == [f"scancel {' '.join(joined)}"]
    assert "code 4 for good" in errors


def test_a_job_that_dies_again_and_again_is_given_up(slurm):
    settings = dict(code="137", EVALUATOR="none", DEATHS="0", REQUEUES="1")
    assert ended("slurm_job.sh", slurm, **settings)[0] == 0
    (slurm.parent / "run" / "logs" / "slurm-joined").write_text("8\n")
    job, errors = ended("slurm_job.sh", slurm, **settings)
    assert job == 137 and len(called(slurm, "scontrol")) == 1 and called(slurm, "scancel") == ["scancel 8"]
    assert "deaths-7" in errors


@pytest.mark.parametrize(("code", "requeued"), [("137", "scontrol requeue 5_3"), ("5", "")])
def test_an_element_of_the_array_queues_again_by_its_own_name(slurm, code, requeued):
    element = {"SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "3", "SEARCHERS_PER_NODE": "2", "SEARCHERS": "2", "DEATHS": "0"}
    job, _ = ended("slurm_searchers.sh", slurm, code=code, **element)
    assert len(called(slurm, "srun")) == 2 and called(slurm, "scontrol") == [line for line in [requeued] if line]
    assert job == (0 if requeued else int(code))


def test_a_finished_run_ends_its_jobs(slurm):
    (slurm.parent / "run" / "logs").mkdir(parents=True)
    (slurm.parent / "run" / "finished.json").write_text("{}")
    for script in ("slurm_job.sh", "slurm_searchers.sh"):
        job = start(script, slurm)
        job.communicate(timeout=60)
        assert job.returncode == 0 and not called(slurm, "scontrol")


@pytest.mark.parametrize(
    ("lines", "code", "expected"),
    [
        (["task 0: Exited with exit code 6", "tasks 1-3: Exited with exit code 2", "task 4: Killed"], 137, 2),
        (["task 1: Killed", "task 0: Exited with exit code 6"], 137, 137),
    ],
    ids=str,
)
def test_the_code_of_a_step_is_that_of_the_process_that_ended_first(slurm, lines, code, expected):
    said = "".join(f"echo 'srun: error: node1: {line}' >&2\n" for line in lines)
    (slurm / "srun").write_text(f"#!/bin/sh\n{said}exit {code}\n")
    done = subprocess.run([LAUNCH / "slurm_step.sh", "srun"], env=environment(slurm), capture_output=True, text=True, check=False)
    assert done.returncode == expected and done.stderr.count("srun: error") == len(lines)
