"""Runs on a real Slurm cluster of virtual nodes on this machine, as launch/slurm.sh submits them.

`local_cluster.sh`, beside this file, says how its nodes differ from real ones.
"""

import contextlib
import dataclasses
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tba_jax.commands import audit
from tba_jax.replay import journal
from tba_jax.replay.log import REGISTER
from tba_jax.storage import layout
from tests.support import tiny_run

SCRIPT = Path(__file__).parent / "local_cluster.sh"
PATIENCE_SECONDS = 240  # for anything: only a hang takes that long
# A trainer that waits for fresh rows and searchers that wait for its snapshots cannot wait for each other for ever: a searcher
# samples 16 queries of each snapshot, and the two updates until the next one take 3 each.
SETTINGS = {
    "publish.every_steps": 2,
    "replay.max_draws_per_row": 1,
    "replay.merge_duplicates": False,
    "task.missing_eos_reward": -1.0,  # rewards that differ: updates are not zero
    "checkpoint.every_steps": 50,
}
ENDLESS = 1_000_000
# A trainer and its evaluator fill most of the 64 CPUs of a node, so that jobs spread over the nodes.
VARIABLES = {
    "TRAINER_GPUS": "2",
    "TRAINER_CPUS": "30",
    "TRAINER_MEMORY": "64",
    "TRAINER_TIME": "60",
    "EVALUATOR_CPUS": "10",
    "SEARCHERS": "2",
    "SEARCHER_CPUS": "24",
    "SEARCHER_TIME": "60",
}


@dataclasses.dataclass
class SlurmRun:
    """A run on a cluster. nodes, tasks: of its trainer, as TRAINER_NODES and TRAINER_TASKS say."""

    root: Path
    conf: str
    nodes: int = 1
    tasks: str = "node"

    def environment(self, **variables: str) -> dict[str, str]:
        of_trainer = {"TRAINER_NODES": str(self.nodes), "TRAINER_TASKS": self.tasks, "PYTHON": sys.executable}
        return tiny_run.environment() | VARIABLES | of_trainer | variables | {"SLURM_CONF": self.conf}

    def call(self, *command: str | Path, **variables: str) -> str:
        """What a command of Slurm prints. Fails the test where it fails."""
        done = subprocess.run(
            [str(word) for word in command],
            env=self.environment(**variables),
            cwd=tiny_run.ROOT,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        return done.stdout

    def submit(self, *flags: str, **variables: str) -> list[str]:
        """Ids of the jobs that launch/slurm.sh submits for an existing run."""
        said = self.call(tiny_run.ROOT / "launch" / "slurm.sh", f"--workdir={self.root}", *flags, **variables)
        return re.findall(r"Submitted batch job (\d+)", said)

    def begin(self, *, steps: int, **variables: str) -> list[str]:
        """Submits a new run; the ids of the trainer's job and of the searchers' array."""
        settings = tiny_run.SETTINGS | SETTINGS | {"learner.steps": steps}
        flags = [f"--config.{name}={value}" for name, value in settings.items()]
        return self.submit("--config=configs/base.py", *flags, **variables)

    def job(self, identity: str) -> dict[str, str]:
        """Fields of a job or of an element of an array, of those that ended too."""
        said = self.call("scontrol", "show", "job", "--oneliner", identity)
        return dict(re.findall(r"(\S+?)=(\S*)", said))

    def queue(self) -> list[str]:
        return self.call("squeue", "--noheader", "--format=%i %T %N").splitlines()

    def nodes_of(self, identity: str) -> list[str]:
        return self.call("scontrol", "show", "hostnames", self.job(identity)["NodeList"]).split()

    def cut_power(self, node: str) -> None:
        os.kill(int((Path(self.conf).parent / f"{node}.pid").read_text()), signal.SIGKILL)

    def pids(self, role: str) -> list[int]:
        """The Python processes of a role, on whichever node."""
        found = tiny_run.processes(self.root).items()
        return sorted(pid for pid, line in found if line.startswith(sys.executable) and f"--role={role}" in line)

    def lineage(self) -> list[dict]:
        return [*journal.read_lineage(self.root / "journal")] if (self.root / "journal").is_dir() else []

    def steps(self) -> int:
        return len(self.lineage())

    def writers(self) -> set[str]:
        """Searcher processes that have claimed a log."""
        return {path.stem for path in (self.root / "replay" / REGISTER).glob("[!.]*.json")}

    def words(self) -> str:
        logs = sorted((self.root / "logs").glob("*.log"))
        last = ("\n".join(path.read_text(errors="replace").splitlines()[-12:]) for path in logs)
        return "\n".join([*self.queue(), *(f"{path.name}:\n{text}" for path, text in zip(logs, last, strict=True))])

    def wait_until(self, condition: Callable[[], object], what: str) -> None:
        begin = time.monotonic()
        while not condition():
            if time.monotonic() > begin + PATIENCE_SECONDS:
                pytest.fail(f"waited {PATIENCE_SECONDS} s for {what}:\n{self.words()}", pytrace=False)
            time.sleep(0.2)

    def wait_for_end(self) -> None:
        """Until no job is left in the queue."""
        self.wait_until(lambda: not self.queue(), "the end of all jobs")

    def cancel_all(self) -> None:
        self.call("scancel", "--partition=local")
        self.wait_for_end()

    def log(self, job: str, role: str = "trainer") -> str:
        return (self.root / "logs" / f"slurm-{role}-{job}.log").read_text(errors="replace")

    def finish(self, more: int = 20) -> list[str]:
        """Cancels all jobs and has new ones finish the run after `more` further steps; their ids."""
        self.cancel_all()
        steps = self.steps() + more
        ids = self.submit(f"--config.learner.steps={steps}", "--allow_change=learner.steps", SEARCHERS="2")
        self.wait_for_end()
        assert self.job(ids[0])["JobState"] == "COMPLETED", self.words()
        self.check(steps)
        return ids

    def check(self, steps: int) -> None:
        """Every step once, of committed rows as they were drawn; and the ledger."""
        finished = layout.read_json(self.root / "finished.json")
        lines = self.lineage()
        assert finished["step"] == steps and [line["step"] for line in lines] == list(range(1, steps + 1))
        opened = audit.open_run(self.root)
        for line in lines:
            rows = opened.reader.read_ids(journal.line_ids(line))
            assert journal.batch_hash(rows) == line["batch"], f"step {line['step']}"
        text, balanced = audit.describe_ledger(opened)
        assert balanced, text


@contextlib.contextmanager
def cluster(nodes: int, gpus: int) -> Iterator[str]:
    """The file that SLURM_CONF names. Skips the test where this machine cannot have a cluster."""
    started = subprocess.run([SCRIPT, "start", str(nodes), str(gpus)], capture_output=True, text=True, check=False)
    if started.returncode != 0:
        last = (started.stderr.strip().splitlines() or ["it said nothing"])[-1]
        if any(word in last for word in ("root", "namespaces", "install")):
            pytest.skip(f"no Slurm here: {last}")
        pytest.fail(started.stderr)
    conf = started.stdout.strip().partition("SLURM_CONF=")[2]
    try:
        yield conf
    finally:
        subprocess.run([SCRIPT, "stop"], env=os.environ | {"SLURM_CONF": conf}, check=True, timeout=120)
