"""A run in the pods of the JobSet, which are evicted, lost and crash as in a cluster: it finishes, with every row accounted for.

The pods are processes of this machine, see tests/support/pods.py.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from tba_jax.commands import audit
from tba_jax.replay import journal
from tba_jax.storage import layout
from tests.support import kustomize, manifests, pods, tiny_run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc, which this system lacks"),
]

STEPS = 120
# Fresh rows only, so that neither side is ever far ahead of the other.
SETTINGS = tiny_run.SETTINGS | {
    "learner.steps": STEPS,
    "publish.every_steps": 2,
    "evaluation.every_steps": 40,
    "replay.max_draws_per_row": 1,
    "replay.merge_duplicates": False,
    "searchers.max_rows_per_snapshot": 64,
    "task.missing_eos_reward": -1.0,
}


def resources(folder: Path, *, hosts: int, searchers: int) -> list[kustomize.Resource]:
    """The base, with an overlay as a cluster has one: counts and settings."""
    counts = [
        {"op": "replace", "path": f"/spec/replicatedJobs/{job}/template/spec/{name}", "value": count}
        for job, count in ((0, hosts), (1, searchers))
        for name in ("completions", "parallelism")
    ]
    run = "--config=configs/base.py\n" + "\n".join(f"--config.{name}={value}" for name, value in SETTINGS.items())
    literals = ["WORKDIR=/runs/pods", f"RUN={run}", f"TRAINER_HOSTS={hosts}"]
    overlay = {
        "resources": [str(tiny_run.ROOT / "launch/kubernetes/base")],
        "configMapGenerator": [{"name": "tba-run", "behavior": "merge", "literals": literals}],
        "generatorOptions": {"disableNameSuffixHash": True},
        "patches": [{"target": {"kind": "JobSet", "name": "tba"}, "patch": yaml.safe_dump(counts)}],
    }
    folder.mkdir()
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(overlay))
    made = kustomize.build(folder)
    manifests.check(made)
    return made


class Run:
    """A cluster and the run on its volume."""

    def __init__(self, folder: Path, *, hosts: int) -> None:
        self.hosts = hosts
        self.folder = layout.RunDir(folder / "volume" / "pods")
        (folder / "volume").mkdir()
        ours = ("JAX_", "XLA_", "PYTHON")
        environment = {name: value for name, value in tiny_run.environment().items() if name.startswith(ours)}
        del environment["JAX_COMPILATION_CACHE_DIR"]  # role.sh names one
        made = resources(folder / "overlay", hosts=hosts, searchers=2)
        self.cluster = pods.Cluster(made, folder / "volume", environment=environment | {"FINISH_SECONDS": "2", "DEATHS": "0"})

    def steps(self) -> int:
        return len(journal.read_lineage(self.folder.journal)) if self.folder.journal.is_dir() else 0

    def train(self, count: int) -> None:
        """Waits for further steps."""
        before = self.steps()
        self.cluster.run_until(lambda: self.steps() >= before + count, f"{count} steps after {before}", seconds=300)

    def after(self, event: Callable[[str, int], None], job: str, index: int) -> None:
        """Does this to a pod, and waits until another one is in its place and the trainer has done further steps."""
        pods_before = self.cluster.jobs[job].lives[index]
        event(job, index)
        self.cluster.run_until(
            lambda: self.cluster.jobs[job].lives[index] > pods_before, f"another pod {job}-{index}", seconds=300
        )
        self.train(5)

    def lives(self) -> dict[str, int]:
        """Pods that each index has had."""
        return {f"{job.name}-{index}": count for job in self.cluster.jobs.values() for index, count in job.lives.items()}


@pytest.fixture
def run(tmp_path) -> Iterator[Run]:
    yield from running(tmp_path, hosts=2)


def running(folder: Path, *, hosts: int) -> Iterator[Run]:
    made = Run(folder, hosts=hosts)
    try:
        yield made
    finally:
        made.cluster.close()


def test_a_run_outlives_what_a_cluster_does_to_its_pods(run):
    cluster = run.cluster
    run.train(5)
    run.after(cluster.evict, "searchers", 0)
    run.after(cluster.lose, "searchers", 1)
    run.after(cluster.lose, "evaluator", 0)
    before = epoch(run)
    run.after(cluster.lose, "trainer", 1)
    assert epoch(run) > before
    run.after(cluster.crash, "trainer", 0)
    run.after(cluster.evict, "trainer", 0)
    # The loss of a pod is the loss of one pod, and nobody but the trainer's other process is touched by a trainer's trouble.
    expected = {"trainer-0": 3, "trainer-1": 2, "searchers-0": 2, "searchers-1": 2, "evaluator-0": 2}
    assert run.lives() == expected, cluster.words()
    assert cluster.jobs["trainer"].failures == 1  # the crash; the others were no failures of the Job
    cluster.run_until(lambda: cluster.is_done, "the end of the JobSet", seconds=600)
    assert run.lives() == expected
    # Process 1 saw the end of process 0 in a pod that stayed, and the other way round.
    for index, other in ((0, 1), (1, 0)):
        log = cluster.log("trainer", index)
        assert f"process {index} of 2 of the trainer" in log and "trainer ended with code 6" in log, log
        assert f"process {other} " in log and "of this trainer has ended" in log, log
    check_what_is_left(run)


def test_bad_input_fails_a_new_run_at_once(tmp_path, monkeypatch):
    monkeypatch.setitem(SETTINGS, "learner.completions", 0)
    for made in running(tmp_path, hosts=2):
        with pytest.raises(AssertionError, match="trainer-0 ended with code 2"):
            made.train(1)
        assert "learner.completions=0" in made.cluster.log("trainer", 0)


def epoch(run: Run) -> int:
    """The lease's: how many trainers there have been."""
    return max(line["epoch"] for line in journal.read_lineage(run.folder.journal))


def check_what_is_left(run: Run) -> None:
    """Every step once, of committed rows, and the ledger balanced."""
    assert run.folder.finished.exists()
    lineage = [*journal.read_lineage(run.folder.journal)]
    assert [line["step"] for line in lineage] == list(range(1, STEPS + 1))
    text, balanced = audit.describe_ledger(audit.open_run(run.folder.root))
    assert balanced, text
    assert len(os.listdir(run.folder.root / "evaluations")) >= 4
