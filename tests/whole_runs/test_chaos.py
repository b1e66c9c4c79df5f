"""An asynchronous run whose processes are killed and whose storage refuses: it ends, and every row and step is accounted for.

Storage refuses in two ways that need no special file system. A role's writes beyond a file size fail with EFBIG (RLIMIT_FSIZE):
that stands for a full disk or a quota, which also refuse in the middle of a file, and for one role before the others. All folders
of the run lose their write permission, and its processes have given up root's right to ignore that: that stands for a mount that
has become read-only. Files that are open can still be written, as on no real one, but nothing can be made, renamed or removed.
"""

import contextlib
import dataclasses
import os
import random
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tba_jax.commands import audit, command_line
from tba_jax.replay import journal
from tba_jax.replay.log import REGISTER
from tba_jax.run import layout
from tests.support import tiny_run
from tests.support.tiny_run import everything_gone, processes

REFUSED = "storage failed"
ENDLESS = "--config.learner.steps=1000000"
AWAY_SECONDS = 20.0
PATIENCE_SECONDS = 240  # for anything: only a hang takes that long

pytestmark = pytest.mark.skipif(
    not (Path("/proc/self/cmdline").exists() and hasattr(resource, "prlimit")),
    reason="finds processes through /proc and limits them by prlimit, which this system lacks",
)


@dataclasses.dataclass
class Chaos:
    """A supervised run and what was done to it. epochs: those of killed trainers that had journalled a step."""

    run: layout.RunDir
    arguments: list[str]
    searchers: int
    supervisor: subprocess.Popen[str] = dataclasses.field(init=False)
    killed: dict[str, int] = dataclasses.field(default_factory=lambda: dict(searcher=0, trainer=0, supervisor=0))
    refused: dict[str, int] = dataclasses.field(default_factory=lambda: dict(full=0, read_only=0))
    epochs: set[int] = dataclasses.field(default_factory=set)

    def start(self, *flags: str) -> None:
        self.supervisor = tiny_run.start(tiny_run.unprivileged([*self.arguments, *flags]))

    def wait_until(self, condition: Callable[[], object], what: str, *, patience: float = PATIENCE_SECONDS) -> None:
        """Fails early where the run has ended: nothing is going to happen any more then."""
        deadline = time.monotonic() + patience
        while not condition():
            if self.supervisor.poll() is not None:
                pytest.fail(f"the run ended with {self.supervisor.returncode} before {what}: {self.supervisor.communicate()}")
            assert time.monotonic() < deadline, f"waited {patience:.0f} s for {what}: {self.words()}"
            time.sleep(0.05)

    def words(self) -> dict[str, str]:
        """The last lines of every role's log."""
        logs = (self.run.root / "logs").glob("*.log")
        return {path.stem: "\n".join(path.read_text(errors="replace").splitlines()[-8:]) for path in logs}

    def pids(self, name: str) -> list[int]:
        """Of a role, or of all whose name begins with that."""
        return sorted(pid for pid, line in processes(self.run.root).items() if f"--name={name}" in line)

    def journalled(self) -> tuple[int, int]:
        """The newest epoch with a whole line, and its newest step; (0, 0) before the first."""
        for path in sorted(self.run.journal.glob("epoch-*.jsonl"), reverse=True):
            if whole := path.read_bytes().rpartition(b"\n")[0]:
                line = whole.rpartition(b"\n")[2]
                return int(path.stem.removeprefix("epoch-")), int(line.partition(b'"step":')[2].partition(b",")[0])
        return 0, 0

    def writers(self) -> set[str]:
        """Searcher processes that have claimed a log."""
        return {path.stem for path in (self.run.root / "replay" / REGISTER).glob("[!.]*.json")}

    def _note_epoch(self) -> None:
        self.epochs |= {self.journalled()[0]} - {0}

    def kill(self, name: str) -> bool:
        """SIGKILL to a role; False where it is not there at the moment."""
        killed = 0
        for pid in self.pids(name)[:1]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                killed += 1
            if name == "trainer":
                self.wait_until(lambda gone=pid: gone not in self.pids(name), f"the killed {name} to be gone")
                self._note_epoch()
        self.killed[name.split("-")[0]] += killed
        return killed > 0

    def kill_supervisor(self) -> None:
        """SIGKILL to the supervisor: the kernel ends all others by that."""
        self.supervisor.kill()
        self.supervisor.communicate()
        assert everything_gone(self.run.root, seconds=30), processes(self.run.root)
        self.killed["supervisor"] += 1
        self._note_epoch()

    def stop(self) -> None:
        """As Ctrl-C does."""
        self.supervisor.send_signal(signal.SIGINT)
        output, _ = self.supervisor.communicate(timeout=PATIENCE_SECONDS)
        assert self.supervisor.returncode == 130, output

    def fill_disk(self, name: str) -> None:
        """As a full disk does to one role: it ends by a write that is refused, says so, and is started again."""
        self.wait_until(lambda: self.pids(name), f"{name} to be there")
        log, pids = self.run.log(name), self.pids(name)
        told = log.stat().st_size
        # 2000 bytes for the sentence; journal, rows, metrics and evaluations soon need more, or have more already.
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pids[0], resource.RLIMIT_FSIZE, (told + 2000, resource.RLIM_INFINITY))
        self.wait_until(lambda: pids[0] not in self.pids(name), f"{name} to end by a write that was refused")
        words = log.read_bytes()[told:].decode(errors="replace")
        assert REFUSED in words, words
        self.refused["full"] += 1
        if name == "trainer":
            self._note_epoch()

    def wait_for_refusals(self, name: str, count: int) -> None:
        """Waits until a role has been refused by storage so many times from now on: it keeps being started again meanwhile."""
        log = self.run.log(name)
        told = log.read_text(errors="replace").count(REFUSED)
        self.wait_until(lambda: log.read_text(errors="replace").count(REFUSED) >= told + count, f"{name} to be refused again")

    @contextlib.contextmanager
    def read_only(self) -> Iterator[None]:
        """All folders of the run refuse; at the end all roles that ran before have ended by it, or are waited for."""
        names = ["trainer", *(f"searcher-{i}" for i in range(self.searchers))]
        told = {name: self.run.log(name).stat().st_size for name in names}
        before = {pid for name in names for pid in self.pids(name)}
        set_folders(self.run.root, mode=0o555)
        try:
            yield
            self.wait_until(lambda: not before & processes(self.run.root).keys(), "all roles to end by storage that refuses")
            words = [self.run.log(name).read_bytes()[told[name] :].decode(errors="replace") for name in names]
            assert REFUSED in words[0] and any(REFUSED in text for text in words[1:]), self.words()
            self._note_epoch()
        finally:
            set_folders(self.run.root, mode=0o755)
        self.refused["read_only"] += 1

    def freeze(self, name: str) -> int:
        """SIGSTOP to a role; returns its process id."""
        self.wait_until(lambda: self.pids(name), f"{name} to be there")
        pid = self.pids(name)[0]
        os.kill(pid, signal.SIGSTOP)
        return pid

    @contextlib.contextmanager
    def away(self, place: Path) -> Iterator[None]:
        """The workdir is moved away, and back at the end; nothing may have begun in its place."""
        self.run.root.rename(place)
        try:
            yield
        finally:
            assert not self.run.root.exists(), list(self.run.root.iterdir())
            place.rename(self.run.root)
        self._note_epoch()

    def finish(self, steps: int) -> None:
        """Lets the run, which nobody supervises at the moment, go on to its end."""
        self.start(f"--config.learner.steps={steps}", "--allow_change=learner.steps")
        output, _ = self.supervisor.communicate(timeout=PATIENCE_SECONDS + 600)
        assert self.supervisor.returncode == 0, (output, self.words())
        assert everything_gone(self.run.root), processes(self.run.root)


def set_folders(root: Path, *, mode: int) -> None:
    """Top down, each before it is listed: nothing can be made in what was listed, and so be left out."""
    for folder, _, _ in os.walk(root):
        with contextlib.suppress(FileNotFoundError):  # removed since its parent was listed
            os.chmod(folder, mode)


def check_what_is_left(chaos: Chaos, steps: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Every step once on the journal's lineage, of committed rows as they were drawn; the ledger of trainer and audit."""
    lineage = journal.read_lineage(chaos.run.journal)
    assert [line["step"] for line in lineage] == list(range(1, steps + 1))
    epochs = {line["epoch"] for line in lineage}
    # A trainer that was ended after it had journalled a step keeps its epoch on the lineage; another one finished the run.
    assert chaos.epochs <= epochs and len(epochs) > len(chaos.epochs) >= 1, (chaos, epochs)
    reader = audit.open_run(chaos.run.root).reader
    committed = {writer: reader.read(writer, 0, head) for writer, head in reader.heads().items() if head}
    for line in lineage:
        parts = [(committed[line["writers"][number]], row) for number, row in line["rows"]]
        batch = {name: np.stack([rows[name][row] for rows, row in parts]) for name in parts[0][0]}
        assert journal.batch_hash(batch) == line["batch"], f"step {line['step']}"
    finished = layout.read_json(chaos.run.finished)
    assert finished["step"] == steps and finished["rows_rejected"] == 0
    for writer, entry in finished["ledger"].items():
        accounted = entry["resident"] + sum(entry["evicted"].values()) + sum(entry["rejected"].values())
        assert entry["seen"] == accounted, writer
    assert command_line.execute(audit, [f"--workdir={chaos.run.root}"]) == 0
    assert "the ledger balances" in capsys.readouterr().out


def test_kills_and_storage_that_refuses_or_is_away(tmp_path, capsys):
    """Every kind of disturbance once, as soon as the run has got over the one before. Waits for progress, never for a time."""
    run = layout.RunDir(tmp_path / "run")
    arguments = tiny_run.command(
        run.root,
        "--role=all",
        "--config.searchers.count=2",
        "--config.task.missing_eos_reward=-1.0",  # rewards that differ: updates are not zero
        "--config.evaluation.enabled=False",
        "--config.evaluation.every_steps=1000000",
        "--config.publish.keep=4",
        "--config.searchers.max_rows_per_snapshot=0",  # whoever waits for a snapshot writes nothing that could be refused
    )
    chaos = Chaos(run, arguments, searchers=2)

    def has_got_over(epoch: int, writers: set[str], count: int) -> bool:
        now, step = chaos.journalled()
        return now > epoch and step > 2 and len(chaos.writers() - writers) >= count

    chaos.start(ENDLESS)
    chaos.wait_until(lambda: has_got_over(0, set(), 2), "the first steps")
    epoch, writers = chaos.journalled()[0], chaos.writers()
    assert chaos.kill("trainer"), chaos.words()
    chaos.fill_disk("searcher-1")
    chaos.wait_until(lambda: has_got_over(epoch, writers, 1), "both to come back")
    epoch, writers = chaos.journalled()[0], chaos.writers()
    with chaos.read_only():
        # The storage may end it first, and it is started again then.
        chaos.wait_until(lambda: chaos.kill("searcher-0"), "searcher-0 to be there")
    chaos.wait_until(lambda: has_got_over(epoch, writers, 1), "steps after the folders could be written again")
    epoch, writers = chaos.journalled()[0], chaos.writers()
    stopped = chaos.freeze("searcher-1")
    killed = chaos.pids("trainer")
    with chaos.away(tmp_path / "away"):
        for pid in [*killed, *chaos.pids("searcher-0")]:
            with contextlib.suppress(ProcessLookupError):  # the storage may have ended it first
                os.kill(pid, signal.SIGKILL)
        begin = time.monotonic()
        chaos.wait_until(lambda: time.monotonic() - begin > AWAY_SECONDS, "the workdir to be away for long enough")
    os.kill(stopped, signal.SIGCONT)
    chaos.wait_until(lambda: has_got_over(epoch, writers, 1), "steps after the workdir was back")
    chaos.freeze("searcher-1")  # no thread of it runs when the supervisor dies
    chaos.kill_supervisor()
    assert chaos.killed == dict(searcher=1, trainer=1, supervisor=1) and chaos.refused == dict(full=1, read_only=1)
    steps = chaos.journalled()[1] + 20
    chaos.finish(steps)
    check_what_is_left(chaos, steps, capsys)


SECONDS = 600.0
STEPS = 400  # at which the accuracies are compared
SEARCHERS = 4
# The demo with sums of two digits, and a constant rate: what is learned by a step does not depend on the last one.
ARITHMETIC = (
    "--config.task.arithmetic.digits=2",
    "--config.task.arithmetic.train_queries=3000",
    "--config.task.prompt_length=7",
    "--config.task.response_length=24",
    "--config.warm_start.steps=400",
    "--config.learner.remat=none",
    "--config.learner.schedule=constant",
    "--config.learner.learning_rate=2e-6",
    f"--config.searchers.count={SEARCHERS}",
    f"--config.evaluation.every_steps={STEPS // 16}",
    "--config.supervisor.max_restarts=60",
)


def arithmetic(workdir: Path, *flags: str) -> list[str]:
    return tiny_run.command(workdir, *ARITHMETIC, *flags, recipe="configs/demo.py", tiny=False)


def prepare(warm: Path, workdir: Path) -> Path:
    """A workdir that begins with the reference policy of another: all runs have one warm start."""
    shutil.copytree(warm / "reference", workdir / "reference")
    return workdir


def accuracy(workdir: Path, step: int) -> float:
    return layout.read_json(workdir / "evaluations" / f"{layout.step_name(step)}.json")["accuracy"]


def times(rng: random.Random, every: float) -> Iterator[float]:
    """Seconds at which something happens: pauses of half to one and a half of the mean, to the end of the chaos."""
    at = every * rng.uniform(0.5, 1.5)
    while at < SECONDS:
        yield at
        at += every * rng.uniform(0.5, 1.5)


def cause_chaos(chaos: Chaos) -> None:
    """Kills and refusals for SECONDS."""
    rng = random.Random(4)
    kills = [(at, f"searcher-{rng.randrange(SEARCHERS)}") for at in times(rng, 10)] + [(at, "trainer") for at in times(rng, 60)]
    others = [(1 / 3, "supervisor"), (2 / 3, "supervisor"), (0.23, "read only"), (0.77, "read only")]
    others += [(0.15, "full searcher-1"), (0.5, "full trainer"), (0.85, "full evaluator")]
    others = [(SECONDS * share, what) for share, what in others]
    begin = time.monotonic()
    for at, what in sorted(kills + others):
        chaos.wait_until(lambda at=at: time.monotonic() >= begin + at, f"second {at:.0f} of the chaos", patience=SECONDS)
        if (at, what) in kills:
            # What came due while a role was waited for is left out: bursts would leave nobody alive.
            if time.monotonic() < begin + at + 5:
                chaos.kill(what)
        elif what == "supervisor":
            chaos.kill_supervisor()
            chaos.start(ENDLESS)
        elif what == "read only":
            with chaos.read_only():
                chaos.wait_for_refusals("trainer", 2)
        else:
            chaos.fill_disk(what.removeprefix("full "))
    chaos.wait_until(lambda: time.monotonic() >= begin + SECONDS, "the end of the chaos", patience=SECONDS)


@pytest.mark.slow
def test_ten_minutes_of_chaos_cost_no_row_and_no_accuracy(tmp_path, capsys):
    """A trainer and four searchers for ten minutes: SIGKILL to a searcher every 10 s, the trainer every 60 s and the supervisor
    twice, disks that fill and folders that become read-only; beside three runs of other seeds that nobody disturbs.

    Accepted, as laid down before it was first run: at the same trainer step the accuracy on held-out sums is at least the lowest
    of the undisturbed runs less their range, or less two standard errors of an accuracy on so many sums where the range is
    smaller. Why: the disturbed run is one more seed. If disturbances change nothing, its accuracy comes from the distribution of
    the others, of which three values tell little more than their range; and an accuracy on 256 sums is itself uncertain by its
    standard error. A policy that trained on rows that it should not have, or lost its optimiser at a kill, falls by far more.
    There is no upper limit: a better score is no defect.
    """
    warm = tmp_path / "warm"
    made = tiny_run.call([*arithmetic(warm), "--role=reference"], timeout=900)
    assert made.returncode == 0, made.stderr
    run = layout.RunDir(prepare(warm, tmp_path / "run"))
    chaos = Chaos(run, arithmetic(run.root, "--config.seed=4"), searchers=SEARCHERS)
    chaos.start(ENDLESS)
    chaos.wait_until(lambda: chaos.journalled()[1] >= 5, "the first steps")
    begin = time.monotonic()
    cause_chaos(chaos)
    seconds, (epoch, step) = time.monotonic() - begin, chaos.journalled()
    chaos.stop()
    print(f"{seconds:.0f} s of chaos, to step {step}: {chaos.killed}, {chaos.refused}, {epoch} epochs", flush=True)
    steps = max(STEPS, step + 10)
    chaos.finish(steps)
    check_what_is_left(chaos, steps, capsys)
    assert chaos.killed["searcher"] >= 30 and chaos.killed["trainer"] >= 5 and chaos.killed["supervisor"] == 2
    assert chaos.refused == dict(full=3, read_only=2)
    undisturbed = []
    for seed in (1, 2, 3):
        workdir = prepare(warm, tmp_path / f"undisturbed-{seed}")
        begin = time.monotonic()
        done = tiny_run.call(arithmetic(workdir, f"--config.seed={seed}", f"--config.learner.steps={STEPS}"), timeout=1800)
        assert done.returncode == 0, done.stderr
        undisturbed.append(accuracy(workdir, STEPS))
        print(f"undisturbed, seed {seed}: accuracy {undisturbed[-1]:.3f} in {time.monotonic() - begin:.0f} s", flush=True)
    check_accuracy(run.root, steps, undisturbed)


def check_accuracy(workdir: Path, last: int, undisturbed: list[float]) -> None:
    """At STEPS, and at the end: whatever was done to the run after STEPS must not have cost anything either."""
    before, compared, end = (accuracy(workdir, step) for step in (0, STEPS, last))
    mean, count = sum(undisturbed) / len(undisturbed), layout.read_json(workdir / "evaluations" / "00000000.json")["queries"]
    tolerance = max(max(undisturbed) - min(undisturbed), 2 * (mean * (1 - mean) / count) ** 0.5)
    print(f"disturbed: {before:.3f}, {compared:.3f} at step {STEPS}, {end:.3f} at {last}; tolerance {tolerance:.3f}", flush=True)
    assert mean > before + 0.1, "undisturbed runs learn"
    assert min(compared, end) >= min(undisturbed) - tolerance
