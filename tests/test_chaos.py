"""An asynchronous run whose processes are killed at random times: it ends, and every row and every step is accounted for."""

import dataclasses
import os
import random
import resource
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tba_jax import audit, run_dir
from tba_jax.replay import journal
from tests import tiny_run
from tests.test_end_to_end import PATIENCE_SECONDS, everything_gone, pid_of, processes, trained, wait_until

SEARCHERS = 4
SEED = 4
REFUSED = "File too large"  # EFBIG, what a write beyond RLIMIT_FSIZE fails with

pytestmark = pytest.mark.skipif(
    not (Path("/proc/self/cmdline").exists() and hasattr(resource, "prlimit")),
    reason="finds processes through /proc and limits them by prlimit, which this system lacks",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Seconds from the first step on; the pauses between kills are drawn from half to one and a half of the mean."""

    steps: int
    seconds: float
    searcher_every: float
    trainer_every: float
    supervisor_at: tuple[float, ...]
    refuse_writes_of: tuple[str, ...]
    evaluator: bool


SHORT = Plan(
    steps=240,
    seconds=10,
    searcher_every=4,
    trainer_every=8,
    supervisor_at=(9,),
    refuse_writes_of=("searcher-0",),
    evaluator=False,
)
LONG = Plan(
    steps=16_000,
    seconds=600,
    searcher_every=10,
    trainer_every=60,
    supervisor_at=(200, 400),
    refuse_writes_of=("searcher-0", "trainer"),
    evaluator=True,
)


@dataclasses.dataclass
class Kills:
    """What was killed. epochs: those of the killed trainers that had journalled a step."""

    searchers: int = 0
    trainers: int = 0
    supervisors: int = 0
    epochs: set[int] = dataclasses.field(default_factory=set)


def pids(workdir: Path, name: str) -> list[int]:
    return [pid for pid, line in processes(workdir).items() if f"--name={name}" in line]


def newest_journalled_epoch(run: run_dir.RunDir) -> set[int]:
    """The last epoch on disk that has a whole line, as a set of at most one."""
    epochs = [int(path.stem.removeprefix("epoch-")) for path in run.journal.glob("epoch-*.jsonl") if b"\n" in path.read_bytes()]
    return {max(epochs)} if epochs else set()


def refuse_writes(run: run_dir.RunDir, name: str) -> None:
    """As a full disk does to one role: the kernel refuses its writes beyond a file size; it ends by that, and comes back."""
    pid = pid_of(run.root, name)
    room = run.log(name).stat().st_size + 6000  # for the sentence in its log; the journal, rows and metrics soon need more
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
    wait_until(lambda: pid not in pids(run.root, name), f"{name} to end by a write that was refused")
    words = run.log(name).read_text(errors="replace")
    assert REFUSED in words, words


def progress(run: run_dir.RunDir, plan: Plan) -> float:
    """Share of the steps that may be done under kills; on a fast machine the plan's clock goes by this."""
    return max(run_dir.steps_in(run.policies), default=0) / (0.8 * plan.steps)


def cause_chaos(run: run_dir.RunDir, arguments: list[str], plan: Plan, kills: Kills) -> subprocess.Popen[str]:
    """Starts the run, kills by the plan, and returns the supervisor that is left running."""
    rng = random.Random(SEED)
    supervisor = tiny_run.start(arguments)
    wait_until(lambda: trained(run.root) >= 5, "the first steps")
    for name in plan.refuse_writes_of:
        refuse_writes(run, name)
    if "trainer" in plan.refuse_writes_of:
        kills.epochs |= newest_journalled_epoch(run)
    start = time.monotonic()
    next_searcher, next_trainer = (every * rng.uniform(0.5, 1.5) for every in (plan.searcher_every, plan.trainer_every))
    while (now := max(time.monotonic() - start, plan.seconds * progress(run, plan))) < plan.seconds:
        if supervisor.poll() is not None:
            pytest.fail(f"the supervisor ended by itself with {supervisor.returncode} at {now:.0f} s: {supervisor.communicate()}")
        if now >= next_searcher and (alive := pids(run.root, "searcher-")):
            os.kill(rng.choice(sorted(alive)), signal.SIGKILL)
            kills.searchers += 1
            next_searcher = now + plan.searcher_every * rng.uniform(0.5, 1.5)
        if now >= next_trainer and (alive := pids(run.root, "trainer")):
            os.kill(alive[0], signal.SIGKILL)
            kills.trainers += 1
            kills.epochs |= newest_journalled_epoch(run)
            next_trainer = now + plan.trainer_every * rng.uniform(0.5, 1.5)
        if kills.supervisors < len(plan.supervisor_at) and now >= plan.supervisor_at[kills.supervisors]:
            supervisor.kill()
            supervisor.communicate()
            assert everything_gone(run.root), processes(run.root)
            kills.supervisors += 1
            kills.epochs |= newest_journalled_epoch(run)
            supervisor = tiny_run.start(arguments)
        time.sleep(plan.searcher_every / 80)
    assert kills.supervisors == len(plan.supervisor_at), kills
    assert kills.searchers >= 2 and kills.trainers >= 1, kills
    return supervisor


def check_every_step_and_row(run: run_dir.RunDir, steps: int) -> None:
    """Every step once on the journal's lineage; every row that it drew is in the log, as it was."""
    lineage = journal.read_lineage(run.journal)
    assert [line["step"] for line in lineage] == list(range(1, steps + 1))
    opened = audit.open_run(run.root)
    for step in range(1, steps + 1):
        text, same = audit.rebuild_batch(opened, step)
        assert same, text


def check_ledgers(run: run_dir.RunDir, steps: int) -> None:
    """The trainer's own account, and the one that the audit makes from log and journal alone."""
    finished = run_dir.read_json(run.finished)
    assert finished["step"] == steps and finished["rows_rejected"] == 0
    for writer, entry in finished["ledger"].items():
        accounted = entry["resident"] + sum(entry["evicted"].values()) + sum(entry["rejected"].values())
        assert entry["seen"] == accounted, writer
    command = [*tiny_run.command(run.root)[:2], "tba_jax.audit", f"--workdir={run.root}"]
    audited = tiny_run.call(command, timeout=600)
    assert audited.returncode == 0 and "the ledger balances" in audited.stdout, audited.stdout + audited.stderr


@pytest.mark.slow
@pytest.mark.parametrize("plan", [SHORT, LONG], ids=["short", "long"])
def test_random_kills(tmp_path, plan):
    run = run_dir.RunDir(tmp_path / "run")
    arguments = tiny_run.command(
        run.root,
        "--role=all",
        f"--config.searchers.count={SEARCHERS}",
        "--config.task.missing_eos_reward=-1.0",  # rewards that differ: updates are not zero
        f"--config.learner.steps={plan.steps}",
        f"--config.evaluation.enabled={plan.evaluator}",
    )
    kills = Kills()
    supervisor = cause_chaos(run, arguments, plan, kills)
    output, _ = supervisor.communicate(timeout=PATIENCE_SECONDS + plan.seconds)
    assert supervisor.returncode == 0, output
    assert everything_gone(run.root), processes(run.root)
    check_every_step_and_row(run, plan.steps)
    check_ledgers(run, plan.steps)
    # A trainer that was killed after it had journalled a step keeps its epoch on the lineage; another one finished the run.
    epochs = {line["epoch"] for line in journal.read_lineage(run.journal)}
    assert kills.epochs <= epochs and len(epochs) > len(kills.epochs) >= 1, (kills, epochs)
