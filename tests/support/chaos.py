"""A supervised run of real processes, what a test does to it, and what must be left at its end."""

import contextlib
import dataclasses
import io
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tba_jax.commands import audit, command_line
from tba_jax.replay import journal
from tba_jax.replay.log import REGISTER
from tba_jax.run.processes import STORAGE_FAILED, STORAGE_FORBIDS
from tba_jax.storage import layout, published
from tests.support import tiny_run
from tests.support.small_disk import SmallDisk
from tests.support.tiny_run import everything_gone, processes

# More than a run does meanwhile, and few enough that the snapshots of its evaluations fit on the small disk.
ENDLESS = "--config.learner.steps=10000"
PATIENCE_SECONDS = 240  # for anything: only a hang takes that long


@dataclasses.dataclass
class Chaos:
    """A supervised run and what was done to it.

    output: what the supervisor says, outside of the run. epochs: those of killed trainers that had journalled a step.
    stopped: seconds of each SIGSTOP, by role.
    """

    run: layout.RunDir
    arguments: list[str]
    searchers: int
    output: Path
    supervisor: subprocess.Popen[bytes] = dataclasses.field(init=False)
    killed: dict[str, int] = dataclasses.field(default_factory=lambda: dict(searcher=0, trainer=0, supervisor=0))
    refused: dict[str, int] = dataclasses.field(default_factory=lambda: dict(full=0, read_only=0))
    lost: int = 0
    damaged: list[int] = dataclasses.field(default_factory=list)
    stopped: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    epochs: set[int] = dataclasses.field(default_factory=set)

    def start(self, *flags: str) -> None:
        with self.output.open("ab") as output:
            told = dict(cwd=tiny_run.ROOT, env=tiny_run.environment(), stdout=output, stderr=subprocess.STDOUT)
            self.supervisor = subprocess.Popen([*self.arguments, *flags], **told)

    def said(self) -> str:
        """By all supervisors so far."""
        return self.output.read_text(errors="replace")

    def wait_until(self, condition: Callable[[], object], what: str, *, patience: float = PATIENCE_SECONDS) -> None:
        """Fails early where the run has ended: nothing is going to happen any more then."""
        deadline = time.monotonic() + patience
        while not condition():
            if self.supervisor.poll() is not None:
                pytest.fail(f"the run ended with {self.supervisor.returncode} before {what}: {self.said()}")
            assert time.monotonic() < deadline, f"waited {patience:.0f} s for {what}: {self.said()} {self.words()}"
            time.sleep(0.05)

    def wait(self, seconds: float, what: str) -> None:
        begin = time.monotonic()
        self.wait_until(lambda: time.monotonic() >= begin + seconds, what, patience=2 * seconds + 60)

    def words(self) -> dict[str, str]:
        """The last lines of every role's log."""
        logs = (self.run.root / "logs").glob("*.log")
        return {path.stem: "\n".join(path.read_text(errors="replace").splitlines()[-8:]) for path in logs}

    def pids(self, name: str) -> list[int]:
        """Of a role, or of all whose name begins with that."""
        if name == "supervisor":
            return [self.supervisor.pid]
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
        self.supervisor.wait()
        assert everything_gone(self.run.root, seconds=30), processes(self.run.root)
        self.killed["supervisor"] += 1
        self._note_epoch()

    def stop(self) -> None:
        """As Ctrl-C does."""
        self.supervisor.send_signal(signal.SIGINT)
        self.supervisor.wait(PATIENCE_SECONDS)
        assert self.supervisor.returncode == 130, self.said()

    def __enter__(self) -> "Chaos":
        return self

    def __exit__(self, *error: object) -> None:
        """Leaves no process, whatever has happened: all others die with the supervisor."""
        if self.supervisor.poll() is None:
            self.supervisor.kill()
            self.supervisor.wait()
            everything_gone(self.run.root, seconds=30)

    def _refusals(self, name: str) -> int:
        """How often a role ended by storage that refused it. The supervisor tells it: the role's own log may have no room."""
        return sum(self.said().count(f"{name} (exit code {code})") for code in (STORAGE_FAILED, STORAGE_FORBIDS))

    def refuse(self, kind: str, state: contextlib.AbstractContextManager[None], again: Callable[[], None] = lambda: None) -> None:
        """The disk of the run is in a state, in which it is kept by `again`, until the trainer has ended by it twice."""
        before = self._refusals("trainer")
        with state:
            self.wait_until(lambda: again() or self._refusals("trainer") >= before + 2, f"an end by a {kind} disk")
            self._note_epoch()
        self.refused[kind] += 1

    def gone(self, disk: SmallDisk, seconds: float) -> None:
        """The disk of the run is unmounted, and mounted again."""
        with disk.gone():
            self.wait(seconds, "the disk to be gone for long enough")
        self.lost += 1
        self._note_epoch()

    def move_away(self, place: Path, seconds: float) -> None:
        """The workdir is moved away, and back at the end; nothing may have begun in its place."""
        self.run.root.rename(place)
        try:
            self.wait(seconds, "the workdir to be away for long enough")
        finally:
            assert not self.run.root.exists(), list(self.run.root.iterdir())
            place.rename(self.run.root)
        self.lost += 1
        self._note_epoch()

    def freeze(self, name: str, *, seconds: float) -> None:
        """SIGSTOP to a role, which goes on after that time if it is there by then."""
        for pid in self.pids(name)[:1]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
                threading.Timer(seconds, self._thaw, (pid, name.split("-")[0], seconds)).start()

    def _thaw(self, pid: int, role: str, seconds: float) -> None:
        if pid in processes(self.run.root):
            self.stopped.setdefault(role, []).append(seconds)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def damage_snapshot(self, *, spared: int) -> bool:
        """Flips a byte in the middle of the largest file of the newest snapshot, and cuts the second largest in half.

        Returns: False where the newest is that of step `spared`, or has just been pruned.
        """
        newest, folder = max(published.kept(self.run.policies).items())
        if newest == spared:
            return False
        try:
            files = sorted((path for path in folder.rglob("*") if path.is_file()), key=lambda path: -path.stat().st_size)
            content = bytearray(files[0].read_bytes())
            content[len(content) // 2] ^= 1
            files[0].write_bytes(content)
            os.truncate(files[1], files[1].stat().st_size // 2)
        except FileNotFoundError:
            return False
        self.damaged.append(newest)
        return True

    def finish(self, steps: int) -> None:
        """Lets the run, which nobody supervises at the moment, go on to its end."""
        self.start(f"--config.learner.steps={steps}", "--allow_change=learner.steps")
        self.supervisor.wait(PATIENCE_SECONDS + 600)
        assert self.supervisor.returncode == 0, (self.said(), self.words())
        assert everything_gone(self.run.root), processes(self.run.root)


def check_what_is_left(run: layout.RunDir, steps: int, *, epochs: set[int]) -> None:
    """Every step once on the journal's lineage, of committed rows as they were drawn; the ledger of trainer and audit.

    Args: epochs: those of trainers that were ended after they had journalled a step, which stay on the lineage.
    """
    lineage = journal.read_lineage(run.journal)
    assert [line["step"] for line in lineage] == list(range(1, steps + 1))
    there = {line["epoch"] for line in lineage}
    assert epochs <= there and len(there) > len(epochs) >= 1, (epochs, there)  # another trainer finished the run
    reader = audit.open_run(run.root).reader
    committed = {writer: reader.read(writer, 0, head) for writer, head in reader.heads().items() if head}
    for line in lineage:
        parts = [(committed[line["writers"][number]], row) for number, row in line["rows"]]
        batch = {name: np.stack([rows[name][row] for rows, row in parts]) for name in parts[0][0]}
        assert journal.batch_hash(batch) == line["batch"], f"step {line['step']}"
    finished = layout.read_json(run.finished)
    assert finished["step"] == steps and finished["rows_rejected"] == 0
    for writer, entry in finished["ledger"].items():
        accounted = entry["resident"] + sum(entry["evicted"].values()) + sum(entry["rejected"].values())
        assert entry["seen"] == accounted, writer
    with contextlib.redirect_stdout(io.StringIO()) as said:
        assert command_line.execute(audit, [f"--workdir={run.root}"]) == 0
    assert "the ledger balances" in said.getvalue()
    assert not processes(run.root)
