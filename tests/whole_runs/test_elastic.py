"""A searcher that is asked to stop in the middle of a batch while a run trains; others join and leave in test_end_to_end."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tba_jax.commands import audit
from tba_jax.replay import journal
from tba_jax.replay.log import REGISTER
from tests.support import tiny_run

PATIENCE_SECONDS = 120  # for anything: only a hang takes that long
ROWS = 64 * 64  # of a batch that takes a while

pytestmark = [
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc, which this system lacks"),
    pytest.mark.slow,
]

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


class Run:
    """A trainer, and whoever joins it: processes by name, with a log beside the folder of the run."""

    def __init__(self, root: Path):
        self.root, self.processes = root, dict[str, subprocess.Popen[bytes]]()

    def start(self, role: str, name: str, *flags: str) -> subprocess.Popen[bytes]:
        command = tiny_run.command(self.root, *SETTINGS, f"--role={role}", f"--name={name}", *flags)
        with open(self.root.parent / f"{name}.log", "wb") as log:
            process = subprocess.Popen(
                command, cwd=tiny_run.ROOT, env=tiny_run.environment(), stdout=log, stderr=subprocess.STDOUT
            )
        self.processes[name] = process
        return process

    def wait_until(self, name: str, condition: Callable[[], object]) -> None:
        """Until the condition holds. Fails where the process `name` has ended before."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            assert self.processes[name].poll() is None and time.monotonic() < deadline, self.words(name)
            time.sleep(0.1)

    def stop(self, name: str) -> int:
        self.processes[name].send_signal(signal.SIGTERM)
        self.processes[name].send_signal(signal.SIGCONT)
        return self.processes[name].wait(PATIENCE_SECONDS)

    def words(self, name: str) -> str:
        return (self.root.parent / f"{name}.log").read_text(errors="replace")

    def writer(self, name: str) -> str:
        """The id of a searcher's log; "" before it has one."""
        return next((path.stem for path in (self.root / "replay" / REGISTER).glob(f"{name}*.json")), "")

    def head(self, name: str) -> int:
        """Committed rows of a searcher."""
        return audit.open_run(self.root).reader.heads().get(self.writer(name), 0)

    def train(self, count: int = 3) -> None:
        """Waits for further steps."""
        steps = len([*journal.read_lineage(self.root / "journal")])
        self.wait_until("trainer", lambda: len([*journal.read_lineage(self.root / "journal")]) >= steps + count)


@pytest.fixture
def run(tmp_path) -> Iterator[Run]:
    """A trainer and a searcher at work. At the end both stop when asked to, and every row is accounted for."""
    run = Run(tmp_path / "run")
    try:
        run.start("trainer", "trainer")
        run.wait_until("trainer", (run.root / "reference" / "initial.json").exists)
        run.start("searcher", "first")
        run.train()
        yield run
        assert (run.stop("first"), run.stop("trainer")) == (0, 130), run.words("first") + run.words("trainer")
        text, balanced = audit.describe_ledger(audit.open_run(run.root))
        assert balanced, text
    finally:
        for process in run.processes.values():
            process.kill()
            process.wait()


@pytest.mark.parametrize("stop_seconds", [100.0, 0.0], ids=["finishes", "abandons"])
def test_a_searcher_that_is_asked_to_stop_leaves_whole_appends(run, stop_seconds):
    batch = ("--config.searchers.queries_per_batch=64", "--config.searchers.samples_per_query=64")
    process = run.start("searcher", "stopped", *batch, f"--config.searchers.stop_seconds={stop_seconds}")
    run.wait_until("stopped", lambda: run.head("stopped") >= 2 * ROWS)
    before, begin = freeze_in_a_batch(run, process), time.monotonic()
    assert run.stop("stopped") == 0, run.words("stopped")
    assert time.monotonic() - begin < stop_seconds + 30
    head = run.head("stopped")
    # A batch that is abandoned may just have been done: then it is there as a whole.
    assert head in ({before + ROWS} if stop_seconds else {before, before + ROWS})
    rows = audit.open_run(run.root).reader.read(run.writer("stopped"), 0, head)
    assert rows["row"].tolist() == list(range(head)) and (rows["response_length"] > 0).all()
    run.train()


def freeze_in_a_batch(run: Run, process: subprocess.Popen[bytes]) -> int:
    """Stops the process where it has computed for a while without an append. Returns the rows that it has committed by then."""
    before, deadline = -1, time.monotonic() + PATIENCE_SECONDS
    while True:
        process.send_signal(signal.SIGSTOP)
        if (head := run.head("stopped")) == before:
            return head
        before, since = head, cpu_seconds(process.pid)
        process.send_signal(signal.SIGCONT)
        while cpu_seconds(process.pid) < since + 0.03:
            assert time.monotonic() < deadline and process.poll() is None, run.words("stopped")


def cpu_seconds(pid: int) -> float:
    """The time that a process has computed, whatever else the machine does."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
