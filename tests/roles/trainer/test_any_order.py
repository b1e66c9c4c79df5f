"""A run goes on exactly, whatever happens to it in whatever order: a state machine that Hypothesis drives.

Three invariants: a trainer that comes to a step which was done before has the same bits; every row is accounted for; somebody
can go on, at once or after the file that a sentence names is back.
"""

import contextlib
import hashlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import jax
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from tba_jax.commands import audit
from tba_jax.replay import ledger
from tba_jax.storage import layout
from tests.support import frozen_runs, tiny_run

pytestmark = [
    pytest.mark.usefixtures("one_device_throughout"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),  # of orbax, whose read failed
]

CHANGES = {"checkpoint__every_steps": 3, "learner__steps": 1000, "replay__capacity": 120, "replay__merge_duplicates": False}
# A file of each kind that a loss of power may tear, of which the newest is torn.
TORN = (
    "checkpoints/0*/host/metadata",
    "checkpoints/0*/state/manifest.ocdbt",
    "policy/0*/commit.json",
    "policy/0*/embedding.weight/c/0/0",
    "journal/*.jsonl",
    "reference/initial.json",
    "metrics/trainer/status.json",
)


def digest(tree: Any) -> str:
    """Of every bit of a tree of arrays."""
    found = hashlib.sha256()
    for leaf in jax.tree.leaves(jax.device_get(tree)):
        found.update(leaf.tobytes())
    return found.hexdigest()


class KilledRun(RuleBasedStateMachine):
    """One run. While `trainer` is None, its trainer is dead."""

    source: Any  # a run whose searchers have ended

    @initialize()
    def begin(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        shutil.copytree(self.source.run.root, self.folder / "run")
        self.s = tiny_run.settings(self.folder / "run", self.source.config)
        self.states: dict[int, str] = {}  # step -> the state after it
        self.appended = self.whole_lines = 0
        self.torn: set[str] = set()
        self.lost: Path | None = None
        self.trainer: Any = None
        self.stack = contextlib.ExitStack()
        self.resume()

    def start(self) -> None:
        self.trainer = self.stack.enter_context(frozen_runs.trainer(self.s))

    def compare(self) -> None:
        step = self.trainer.step_number
        assert self.states.setdefault(step, digest(self.trainer.state)) == self.states[step]

    @precondition(lambda self: self.trainer is None)
    @rule()
    def resume(self) -> None:
        """A lost line takes its own step with it, and the run goes on from the one before."""
        last = max(self.states, default=0)
        try:
            self.start()
        except ValueError as error:
            assert self.lost is not None and "drew row" in str(error) and self.lost.parts[-2] in str(error), error
            self.find()
            self.start()
        lost = "journal/*.jsonl" in self.torn
        assert last - lost <= self.trainer.step_number <= last
        for step in range(self.trainer.step_number + 1, last + 1):
            del self.states[step]
        self.torn.clear()
        self.compare()

    @rule()
    def append(self) -> None:
        """A searcher that lives on appends."""
        self.appended += 1
        frozen_runs.append_changed(self.s, f"late-{self.appended}", reward=(slice(None), self.appended % 5 / 4))

    @precondition(lambda self: self.trainer is not None)
    @rule(ahead=st.booleans(), steps=st.integers(1, 3))
    def step(self, ahead: bool, steps: int) -> None:
        for _ in range(steps):
            self.trainer.poll()
            assert self.trainer.step(ahead=ahead) is not None
            self.compare()

    @precondition(lambda self: self.trainer is not None)
    @rule()
    def publish(self) -> None:
        self.trainer.publish_what_is_new()

    @precondition(lambda self: self.trainer is not None)
    @rule()
    def checkpoint(self) -> None:
        self.trainer.save_checkpoint()

    @precondition(lambda self: self.trainer is not None)
    @rule()
    def kill(self) -> None:
        self.stack.close()
        self.trainer = None

    @precondition(lambda self: self.trainer is None)
    @rule(kind=st.sampled_from(TORN), emptied=st.booleans())
    def tear(self, kind: str, emptied: bool) -> None:
        files = [path for path in self.s.run.root.glob(kind) if path.stat().st_size]
        if kind in self.torn or not files or (kind.startswith("journal") and not self.states):
            return
        path = max(files, key=lambda path: (path.stat().st_mtime_ns, path))
        os.truncate(path, 0 if emptied and not kind.startswith("journal") else path.stat().st_size - 7)
        self.torn.add(kind)

    @precondition(lambda self: self.trainer is None)
    @rule()
    def lose_checkpoints(self) -> None:
        shutil.rmtree(self.s.run.checkpoints, ignore_errors=True)

    @precondition(lambda self: self.trainer is None and self.lost is None and self.appended)
    @rule(number=st.integers(1, 3))
    def lose(self, number: int) -> None:
        """Rows of a writer cannot be read any more."""
        data = self.s.run.replay / f"late-{min(number, self.appended)}" / "000000" / "d"
        if data.exists():
            self.lost = data
            data.rename(self.folder / "away")

    @precondition(lambda self: self.lost is not None)
    @rule()
    def find(self) -> None:
        assert self.lost is not None
        (self.folder / "away").rename(self.lost)
        self.lost = None

    @invariant()
    def every_row_is_accounted_for(self) -> None:
        if getattr(self, "trainer", None) is not None:
            accounts = ledger.accounts(self.trainer.index, self.trainer.index.heads)
            assert all(account.balances for account in accounts.values())

    def teardown(self) -> None:
        """Somebody goes on: a trainer comes to the state, makes a step, and the books balance."""
        if not hasattr(self, "folder"):
            return
        try:
            if self.trainer is None:
                self.resume()
            self.step(ahead=False, steps=1)
            self.trainer.finish()
            assert layout.read_json(self.s.run.finished)["balanced"]
            text, balanced = audit.describe_ledger(audit.open_run(self.s.run.root))
            assert balanced, text
        finally:
            self.stack.close()
            shutil.rmtree(self.folder)


@pytest.mark.parametrize(
    "examples, derandomize", [(8, True), pytest.param(60, False, marks=pytest.mark.slow)], ids=["fixed", "random"]
)
def test_in_any_order(tmp_path_factory, frozen, examples, derandomize):
    KilledRun.source = frozen(tmp_path_factory.mktemp("source") / "run", batches=2, **CHANGES)
    phases = (Phase.explicit, Phase.generate) if derandomize else (Phase.generate, Phase.shrink)
    chosen = settings(max_examples=examples, stateful_step_count=20, deadline=None, derandomize=derandomize, phases=phases)
    run_state_machine_as_test(KilledRun, settings=chosen)
