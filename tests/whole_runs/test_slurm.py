"""Runs on a real Slurm cluster of virtual nodes: they finish, and survive whatever happens to jobs and nodes.

Needs root and Debian's or Ubuntu's slurm-wlm, which it installs. Run only one of these tests at a time: ports follow from the
numbers of jobs, and nodes share those of the machine.
"""

import os
import signal
import sys

import pytest

from tba_jax.storage import layout
from tests.conftest import REPOSITORY
from tests.support import slurm_runs
from tests.support.slurm_runs import ENDLESS, SlurmRun

pytestmark = pytest.mark.slow
# Nodes of the trainer and processes on each: one that takes all GPUs of its node, or one a GPU.
PLACES = [(2, "node"), (2, "gpu")]


@pytest.fixture
def run(tmp_path, request):
    """A run that is not yet submitted, on a cluster of its own."""
    nodes, tasks = getattr(request, "param", (1, "node"))
    with slurm_runs.cluster(4, 4) as conf:
        yield SlurmRun(tmp_path / "run", conf, nodes, tasks)


def restarts(run: SlurmRun, job: str) -> int:
    return int(run.job(job)["Restarts"])


@pytest.mark.parametrize("run", PLACES[1:], indirect=True)
def test_a_run_finishes(run):
    trainer, searchers = run.begin(steps=40)
    run.wait_for_end()
    for job in (trainer, f"{searchers}_0", f"{searchers}_1"):
        assert run.job(job)["JobState"] == "COMPLETED" and restarts(run, job) == 0, run.words()
    assert (run.root / "evaluations" / "00000040.json").exists()
    run.check(40)


# In the place of Python: notes what a process of a role is told. The trainer ends by bad input once the searchers are there.
SEAT = """#!{python}
import json, os, pathlib, sys, time
from tba_jax.run import world
here = world.find(coordinator="", processes=None, process=None)
shown = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
told = dict(role=sys.argv[-1], host=os.uname().nodename, step=os.environ["SLURM_STEP_ID"], shown=shown)
told |= dict(process=here.process, processes=here.processes, coordinator=here.coordinator)
told |= dict(taken=[shown[number] for number in here.local_devices(len(shown))])
path = pathlib.Path(os.environ["WORKDIR"]) / f"seat-{{told['step']}}-{{os.environ['SLURM_JOB_ID']}}-{{here.process}}.json"
path.write_text(json.dumps(told))
while told["role"] == "--role=searcher" or len(list(path.parent.glob("seat-*-0.json"))) < 6:
    time.sleep(0.1)
sys.exit(2)
"""


@pytest.mark.parametrize("run", PLACES, indirect=True, ids=["a-task-a-node", "a-task-a-gpu"])
def test_each_process_takes_its_own_gpus(run, tmp_path):
    """Three GPUs of each of two nodes for the trainer and one for the evaluator; searchers share a node of four."""
    program = tmp_path / "python"
    program.write_text(SEAT.format(python=sys.executable))
    program.chmod(0o755)
    shared = {"SEARCHERS": "4", "SEARCHERS_PER_NODE": "4", "SEARCHER_CPUS": "8", "SEARCHER_GPUS": "1"}
    asked = {"TRAINER_GPUS": "3", "TRAINER_CPUS": "30", "EVALUATOR_GPUS": "1", "PYTHONPATH": str(REPOSITORY), **shared}
    trainer, searchers = run.begin(steps=1, PYTHON=str(program), **asked)
    run.wait_for_end()
    assert run.job(trainer)["ExitCode"] == "2:0" and run.job(f"{searchers}_0")["JobState"] == "CANCELLED", run.words()
    seats = [layout.read_json(path) for path in sorted(run.root.glob("seat-*.json"))]
    trainer, evaluator, searchers = (
        [seat for seat in seats if seat["role"] == f"--role={role}"] for role in ("trainer", "evaluator", "searcher")
    )
    count = 2 if run.tasks == "node" else 6
    assert sorted(seat["process"] for seat in trainer) == list(range(count)), run.words()
    assert {seat["processes"] for seat in trainer} == {count} and len({seat["coordinator"] for seat in trainer}) == 1
    assert all(len(seat["shown"]) == 3 and len(seat["taken"]) == 6 // count for seat in trainer)
    taken = [(seat["host"], gpu) for seat in [*trainer, *evaluator] for gpu in seat["taken"]]
    assert len(evaluator) == 1 and len(taken) == len(set(taken)) == 7
    assert len(searchers) == 4 and sorted(seat["taken"] for seat in searchers) == [["0"], ["1"], ["2"], ["3"]]


@pytest.mark.parametrize("run", PLACES[:1], indirect=True)
def test_a_trainer_outlives_a_kill_and_the_power_cut_of_a_node(run):
    trainer, _ = run.begin(steps=ENDLESS)
    run.wait_until(lambda: run.steps() > 60, "steps after a checkpoint")
    os.kill(run.pids("trainer")[-1], signal.SIGKILL)
    steps = run.steps()
    run.wait_until(lambda: run.steps() > steps + 10, "further steps")
    assert restarts(run, trainer) == 0 and "running the role again" in run.log(trainer)
    node, epochs = run.nodes_of(trainer)[-1], {line["epoch"] for line in run.lineage()}
    run.cut_power(node)
    steps = run.steps()
    run.wait_until(lambda: restarts(run, trainer) > 0, "the job to queue again")
    run.wait_until(lambda: run.steps() > steps + 10, "further steps")
    assert node not in run.nodes_of(trainer) and {line["epoch"] for line in run.lineage()} > epochs
    run.finish()
