"""launch/slurm.sh on a real Slurm cluster: the one of SLURM_CONF, with two idle nodes or more, which need no GPUs.

    SLURM_CONF=FILE python -m pytest -m slow tests/whole_runs/test_slurm.py

Each scenario submits jobs of its own. The tests read the workdir, and processes where the nodes are virtual ones of this machine.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tba_jax.commands import audit
from tba_jax.replay import journal
from tba_jax.replay.log import REGISTER
from tba_jax.storage import layout
from tests.support import tiny_run

pytestmark = [pytest.mark.slow, pytest.mark.skipif("SLURM_CONF" not in os.environ, reason="SLURM_CONF names no cluster")]
PATIENCE_SECONDS = 300  # for anything: only a hang takes that long
# Searchers and a trainer that wait for each other's news cannot wait for ever.
SETTINGS = tiny_run.SETTINGS | {"publish.every_steps": 2, "replay.max_draws_per_row": 1, "replay.merge_duplicates": False}
SETTINGS |= {"task.missing_eos_reward": -1.0, "checkpoint.every_steps": 10, "trainer.heartbeat_seconds": 5}
ENDLESS = 1_000_000


class Run:
    """A run on a cluster. nodes, tasks: of its trainer, and on each of them."""

    def __init__(self, root: Path, nodes: int, tasks: int):
        self.root, self.tasks_in_all = root, nodes * tasks
        self.tasks = ["--time=60", f"--nodes={nodes}", f"--ntasks-per-node={tasks}"]
        (root / "logs").mkdir(parents=True)
        self.flags = ["--config=configs/base.py", *(f"--config.{name}={value}" for name, value in SETTINGS.items())]

    def call(self, *command: str) -> str:
        seen = tiny_run.environment() | {"PYTHON": sys.executable, "HF_TOKEN": "secret"}
        done = subprocess.run(command, env=seen, cwd=tiny_run.ROOT, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        return done.stdout

    def submit(self, role: str, *options: str, steps: int = ENDLESS, more: tuple[str, ...] = ()) -> str:
        """The id of the job of a role."""
        words = ["sbatch", "--parsable", f"--output={self.root}/logs/{role}-%j.log", "--mem-per-cpu=1G", *options]
        job = ["launch/slurm.sh", f"--role={role}", f"--workdir={self.root}", *self.flags, f"--config.learner.steps={steps}"]
        return self.call(*words, *job, *more).strip()

    def begin(self, *, steps: int = ENDLESS) -> tuple[str, str]:
        """Ids of the trainer's job and of the array of two searchers."""
        return self.submit("trainer", *self.tasks, steps=steps), self.submit("searcher", "--array=0-1", steps=steps)

    def job(self, identity: str) -> dict[str, str]:
        """Fields of a job or of an element of an array, of those that ended too."""
        return dict(re.findall(r"(\S+?)=(\S*)", self.call("scontrol", "show", "job", "--oneliner", identity)))

    def queue(self) -> list[str]:
        mine = self.call("squeue", "--noheader", "--format=%i %T %N %o ").splitlines()
        return [line for line in mine if f"--workdir={self.root} " in line]

    def pids(self, role: str) -> list[int]:
        """The Python processes of a role, on whichever node; not their wrappers."""
        found = tiny_run.processes(self.root).items()
        return sorted(
            pid for pid, line in found if f"--role={role}" in line and line.startswith(f"{sys.executable} -m tba_jax.main")
        )

    def steps(self) -> int:
        return len(self.lineage())

    def lineage(self) -> list[dict]:
        return [*journal.read_lineage(self.root / "journal")] if (self.root / "journal").is_dir() else []

    def writers(self) -> set[str]:
        return {path.stem for path in (self.root / "replay" / REGISTER).glob("[!.]*.json")}

    def words(self) -> str:
        logs = {path.name: path.read_text(errors="replace").splitlines()[-15:] for path in (self.root / "logs").glob("*.log")}
        return "\n".join([*self.queue(), *(f"{name}:\n" + "\n".join(lines) for name, lines in sorted(logs.items()))])

    def wait_until(self, condition: Callable[[], object], what: str) -> float:
        """Returns seconds."""
        begin = time.monotonic()
        while not condition():
            if time.monotonic() > begin + PATIENCE_SECONDS:
                pytest.fail(f"waited {PATIENCE_SECONDS} s for {what}:\n{self.words()}", pytrace=False)
            time.sleep(0.2)
        print(f"{what}: {time.monotonic() - begin:.0f} s", file=sys.stderr)
        return time.monotonic() - begin

    def wait_for_steps(self, more: int = 10) -> None:
        steps = self.steps()
        self.wait_until(lambda: self.steps() >= steps + more, f"{more} further steps")

    def wait_for_end(self) -> None:
        self.wait_until(lambda: not self.queue(), "the end of all jobs")

    def cancel_all(self) -> None:
        self.call("scancel", *(line.split()[0].partition("_")[0] for line in self.queue()))
        self.wait_for_end()

    def finish(self) -> None:
        """Cancels all jobs, submits the run again, and has it finish; then every step is there once, with its rows."""
        self.cancel_all()
        assert tiny_run.everything_gone(self.root, 20)
        steps = self.steps() + 20
        self.submit("searcher", "--array=0-1")
        changed = ("--allow_change=learner.steps",)
        trainer = self.submit("trainer", *self.tasks, steps=steps, more=changed)
        self.wait_for_end()
        assert self.job(trainer)["JobState"] == "COMPLETED", self.words()
        self.check(steps)

    def check(self, steps: int) -> None:
        lines = self.lineage()
        assert layout.read_json(self.root / "finished.json")["step"] == steps
        assert [line["step"] for line in lines] == list(range(1, steps + 1))
        opened = audit.open_run(self.root)
        for line in lines:
            assert journal.batch_hash(opened.reader.read_ids(journal.line_ids(line))) == line["batch"], line["step"]
        text, balanced = audit.describe_ledger(opened)
        assert balanced, text


@pytest.fixture
def run(tmp_path, request):
    run = Run(tmp_path / "run", *request.param)
    yield run
    if run.queue():
        run.cancel_all()


def on(*places: tuple[int, int]):
    """Nodes of the trainer and tasks on each."""
    return pytest.mark.parametrize("run", places, indirect=True, ids=[f"{nodes}x{tasks}" for nodes, tasks in places])


@on((1, 1), (2, 2))
def test_a_run_finishes_and_tokens_stay_where_they_are(run):
    run.submit("evaluator", steps=40)
    trainer, searchers = run.begin(steps=40)
    run.wait_until(lambda: run.pids("trainer"), "the trainer's processes")
    for pid in run.pids("trainer"):
        assert b"HF_TOKEN" not in Path(f"/proc/{pid}/environ").read_bytes()
    run.wait_for_end()
    for job in (trainer, f"{searchers}_0", f"{searchers}_1"):
        found = run.job(job)
        assert (found["JobState"], found["Restarts"]) == ("COMPLETED", "0"), run.words()
    run.check(40)


@on((1, 1), (2, 1))
def test_a_killed_process_is_run_again_within_its_job(run):
    trainer, _ = run.begin()
    run.wait_until(lambda: run.steps() > 15, "steps after a checkpoint")
    os.kill(run.pids("trainer")[-1], signal.SIGKILL)
    run.wait_for_steps()
    said = (run.root / "logs" / f"trainer-{trainer}.log").read_text()
    assert run.job(trainer)["Restarts"] == "0" and said.count("running the role again") >= run.tasks_in_all, said


@on((1, 1), (2, 1))
def test_a_lost_node_queues_the_job_again(run):
    trainer, _ = run.begin()
    run.wait_until(lambda: run.steps() > 15, "steps after a checkpoint")
    node = run.call("scontrol", "show", "hostnames", run.job(trainer)["NodeList"]).split()[-1]
    pid = Path(os.environ["SLURM_CONF"]).parent / f"{node}.pid"
    if pid.exists():  # a virtual node: its power is cut
        os.kill(int(pid.read_text()), signal.SIGKILL)
    else:
        run.call("scontrol", "update", f"nodename={node}", "state=down", "reason=test")
    run.wait_until(lambda: run.job(trainer)["Restarts"] != "0", "the job to queue again")
    run.wait_for_steps()
    run.finish()


@on((1, 1), (2, 1))
def test_before_its_time_limit_a_job_saves_and_queues_again(run):
    trainer, _ = run.begin()
    run.wait_until(lambda: run.steps() > 10, "steps")
    run.call("scancel", "--signal=TERM", trainer)  # as Slurm does it then, to the steps
    run.wait_until(lambda: run.job(trainer)["Restarts"] != "0", "the job to queue again")
    steps = run.steps()
    assert max(int(path.name) for path in (run.root / "checkpoints").iterdir() if path.name.isdigit()) == steps
    run.wait_for_steps()


@on((1, 1))
def test_searchers_come_and_go(run):
    trainer, searchers = run.begin()
    run.wait_for_steps()

    def new_writer(what: str) -> None:
        before = run.writers()
        run.wait_until(lambda: run.writers() - before, f"a new writer after {what}")

    os.kill(run.pids("searcher")[0], signal.SIGKILL)
    new_writer("a kill")
    run.call("scontrol", "requeue", f"{searchers}_1")
    new_writer("a requeue")
    more = run.submit("searcher", "--array=0-1")
    new_writer("more searchers")
    run.wait_for_steps()
    # Nothing would make this trainer better: all other jobs of the run leave with it.
    run.call("scancel", trainer)
    run.submit("trainer", *run.tasks, more=("--config.learner.queries=5",))
    run.wait_for_end()
    assert run.job(f"{more}_0")["JobState"] == "CANCELLED" and "ended for good: code 2" in run.words()
