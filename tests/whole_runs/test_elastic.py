"""Searchers that are asked to stop in the middle of a batch while a run trains; others join and leave in test_end_to_end."""

import dataclasses
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from tba_jax.commands import audit
from tba_jax.replay import journal
from tba_jax.replay.log import REGISTER
from tests.support import tiny_run

PATIENCE_SECONDS = 120  # for anything: only a hang takes that long

pytestmark = [
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc, which this system lacks"),
    pytest.mark.slow,
]


@dataclasses.dataclass
class Role:
    """A process of the run with its log."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    def cpu_seconds(self) -> float:
        """Time that it has computed, whatever else the machine does."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def fail(self, sentence: str) -> NoReturn:
        words = self.log.read_text(errors="replace").splitlines()[-8:]
        pytest.fail("\n".join([f"{self.name}: {sentence}; its last words:", *words]), pytrace=False)

    def wait_until(self, condition: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            if self.process.poll() is not None:
                self.fail(f"it ended with {self.process.returncode} before {what}")
            if time.monotonic() > deadline:
                self.fail(f"{PATIENCE_SECONDS} s went by without {what}")
            time.sleep(0.1)

    def wait_for_end(self) -> int:
        """Its exit code."""
        try:
            return self.process.wait(PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            self.fail(f"it was asked to stop {PATIENCE_SECONDS} s ago and runs on")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@dataclasses.dataclass
class Run:
    """A trainer, and whoever joins it."""

    root: Path
    roles: dict[str, Role] = dataclasses.field(default_factory=dict)

    def start(self, role: str, name: str, *flags: str) -> Role:
        environment = tiny_run.environment()
        command = tiny_run.command(self.root, *SETTINGS, f"--role={role}", f"--name={name}", *flags)
        path = self.root.parent / f"{name}.log"
        with open(path, "wb") as log:
            process = subprocess.Popen(command, cwd=tiny_run.ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT)
        self.roles[name] = Role(name, process, path)
        return self.roles[name]

    def lineage(self) -> list[dict]:
        return [*journal.read_lineage(self.root / "journal")]

    def head(self, name: str) -> int:
        """Committed rows of the searcher `name`."""
        return audit.open_run(self.root).reader.heads().get(self.writer(name), 0)

    def writer(self, name: str) -> str:
        """Id of its log; "" before it has one."""
        return next((path.stem for path in (self.root / "replay" / REGISTER).glob(f"{name}*.json")), "")

    def wait_for_steps(self, count: int = 3) -> None:
        """Until the trainer has done some more steps."""
        done = len(self.lineage())
        self.roles["trainer"].wait_until(lambda: len(self.lineage()) >= done + count, "further steps")


# The trainer waits for fresh rows, and searchers pause where they are far ahead, yet no two can wait for each other for ever: a
# searcher samples 16 queries of each snapshot, 8 different ones or more as its passes over the 40 are permutations, and the two
# updates until the next snapshot take 3 each, all of whose rows are there because none is merged with another.
SETTINGS = (
    "--config.learner.steps=1000000",
    "--config.publish.every_steps=2",
    "--config.evaluation.every_steps=1000000",
    "--config.replay.max_draws_per_row=1",
    "--config.replay.merge_duplicates=False",
    "--config.searchers.max_rows_per_snapshot=64",
    "--config.task.missing_eos_reward=-1.0",
)


@pytest.fixture
def run(tmp_path) -> Iterator[Run]:
    """A trainer and a searcher at work. At the end both stop when asked to, and every row is accounted for."""
    run = Run(tmp_path / "run")
    try:
        run.start("trainer", "trainer")
        run.roles["trainer"].wait_until((run.root / "reference" / "initial.json").exists, "the reference policy")
        run.start("searcher", "first")
        run.wait_for_steps()
        yield run
        for name, code in (("first", 0), ("trainer", 130)):
            run.roles[name].process.send_signal(signal.SIGTERM)
            assert run.roles[name].wait_for_end() == code, run.roles[name].log.read_text(errors="replace")
        text, balanced = audit.describe_ledger(audit.open_run(run.root))
        assert balanced, text
    finally:
        for role in run.roles.values():
            role.kill()


ROWS = 64 * 64  # of a batch that takes a while


@pytest.mark.parametrize("stop_seconds", [100.0, 0.0], ids=["finishes", "abandons"])
def test_a_searcher_that_is_asked_to_stop_leaves_whole_appends(run, stop_seconds):
    name = f"stopped-{stop_seconds:.0f}"
    batch = ("--config.searchers.queries_per_batch=64", "--config.searchers.samples_per_query=64")
    role = run.start(
        "searcher", name, *batch, "--config.replay.segment_appends=2", f"--config.searchers.stop_seconds={stop_seconds}"
    )
    role.wait_until(lambda: run.head(name) >= 2 * ROWS, "its first batches")
    before = freeze_in_a_batch(run, name)
    begin = time.monotonic()
    role.process.send_signal(signal.SIGTERM)
    role.process.send_signal(signal.SIGCONT)
    assert role.wait_for_end() == 0, role.log.read_text(errors="replace")
    assert time.monotonic() - begin < stop_seconds + 30
    head = run.head(name)
    # A batch that is abandoned may just have been done: then it is there as a whole.
    assert head in ({before + ROWS} if stop_seconds else {before, before + ROWS})
    rows = audit.open_run(run.root).reader.read(run.writer(name), 0, head)
    assert rows["row"].tolist() == list(range(head)) and (rows["response_length"] > 0).all()
    run.wait_for_steps()


def freeze_in_a_batch(run: Run, name: str) -> int:
    """Stops the process where it has computed for a while without an append: between two batches it does next to nothing.

    Returns:
      the rows committed by then.
    """
    role, before = run.roles[name], -1
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        role.process.send_signal(signal.SIGSTOP)
        head = run.head(name)
        if head == before:
            return head
        before, since = head, role.cpu_seconds()
        role.process.send_signal(signal.SIGCONT)
        while role.cpu_seconds() < since + 0.03:
            if time.monotonic() > deadline or role.process.poll() is not None:
                role.fail(f"in {PATIENCE_SECONDS} s it was not found in the middle of a batch")
