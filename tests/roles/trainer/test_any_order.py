"""A run goes on exactly, whatever happens to it in whatever order: a state machine that Hypothesis drives.

Three invariants: a trainer that comes to a step which was done before has the same bits; every row is accounted for; somebody
can go on, at once or after the file that a sentence names is back.
"""

import contextlib
import functools
import hashlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from tba_jax.commands import audit
from tba_jax.replay import journal, ledger, segment
from tba_jax.replay.reader import LogReader
from tba_jax.roles.trainer import buffer
from tba_jax.roles.trainer.buffer import ReplayBuffer
from tba_jax.roles.trainer.publishing import Publisher
from tba_jax.roles.trainer.trainer import Trainer
from tba_jax.roles.trainer.update_program import Refusals, UpdateProgram
from tba_jax.storage import layout
from tba_jax.storage.lease import EpochLease
from tests.support import frozen_runs, tiny_run
from tests.support.tiny_snapshots import tear

pytestmark = [
    pytest.mark.usefixtures("one_device_throughout"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),  # of orbax, whose read failed
]
CHANGES = {"checkpoint__every_steps": 3, "learner__steps": 1000, "replay__capacity": 120}
# States with all that a checkpoint may hold; the others take their time in the slow tests.
EMA = {"kind": "ema", "ema_decay": 0.8, "offload": True}
EVERYTHING = {"model__compute_dtype": "bfloat16", "learner__logprob_gap_limit": 0.1, "learner__objective": "tba_prime"}
EVERYTHING |= {f"learner__reference__{name}": value for name, value in EMA.items()} | {"learner__non_finite": "skip"}
EVERYTHING |= {"replay__merge_keep": "best", "replay__merge_edit_distance": 0.3, "replay__recent_probability": 0.3}
RESET = {"kind": "reset", "reset_steps": 3, "reset_optimizer": True}
KINDS = {
    "whole policy": {"replay__merge_duplicates": False},
    "everything": EVERYTHING,
    "adapters in bfloat16": {"lora__rank": 2, "model__compute_dtype": "bfloat16", "learner__logprob_gap_limit": 0.1},
    "learned log Z": {"learner__objective": "learned_log_z", "replay__strategy": "softmax"},
    "value head": {"learner__objective": "ppo"},
    "reset reference and optimizer": {"learner__objective": "tba_prime"}
    | {f"learner__reference__{name}": value for name, value in RESET.items()},
}
BY_DEFAULT = ("whole policy", "everything")
FENCED = ("lease/*", "policy/kept/*")
# A file of each kind that a loss of power may tear, of which the newest is torn.
TORN = (
    *(f"checkpoints/0*/{file}" for file in ("host/metadata", "state/_METADATA", "state/manifest.ocdbt", "state/d/*")),
    *(f"policy/0*-*/{file}" for file in ("embedding.weight/zarr.json", "embedding.weight/c/0/0")),
    *FENCED,
    *("journal/*.jsonl", "replay/expired.json", "reference/initial.json", "metrics/trainer/status.json"),
)
# Where a kill within a step comes: a function that the step calls, whether before or after the call, and whether the step counts.
POINTS = (
    (UpdateProgram, "dispatch", "before", False),
    (UpdateProgram, "dispatch", "after", False),
    (EpochLease, "check", "before", False),
    (journal.Journal, "append", "before", False),
    (journal.Journal, "append", "after", True),
    (ReplayBuffer, "integrate", "before", True),
    (ReplayBuffer, "integrate", "after", True),
    (ReplayBuffer, "draw", "after", True),
    (UpdateProgram, "place", "after", True),
    (Refusals, "look_at", "after", True),
    (Trainer, "_follow_up", "before", True),
    (Publisher, "publish", "before", True),
    (Trainer, "_follow_up", "after", True),
)


class Killed(BaseException):
    """Nothing handles it, so the trainer ends where it is raised, as by a kill."""


def digest(tree: Any) -> str:
    """Of every bit of a tree of arrays."""
    found = hashlib.sha256()
    for leaf in jax.tree.leaves(jax.device_get(tree)):
        found.update(leaf.tobytes())
    return found.hexdigest()


class KilledRun(RuleBasedStateMachine):
    """One run. While `trainer` is None, its trainer is dead."""

    source: Any  # a run whose searchers have ended
    changes: dict[str, Any]  # its settings

    @initialize()
    def begin(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        shutil.copytree(self.source.run.root, self.folder / "run")
        self.s = self.source
        self.states: dict[int, str] = {}  # step -> the state after it
        self.last = self.appended = 0  # the last step with a line
        self.torn: set[str] = set()
        self.lost: Path | None = None
        self.trainer: Any = None
        self.stack = contextlib.ExitStack()
        layout.write_json(self.folder / "run" / "replay" / segment.EXPIRED, {"expired": {}, "removing": {}})
        self.resume(window=0)

    def compare(self) -> None:
        self.last = step = self.trainer.step_number
        assert self.states.setdefault(step, digest(self.trainer.program.trees())) == self.states[step]

    @precondition(lambda self: self.trainer is None)
    @rule(window=st.sampled_from((0, 4)))
    def resume(self, window: int) -> None:
        """A lost line takes its own step with it, and the run goes on from the one before."""
        self.s = tiny_run.settings(self.folder / "run", frozen_runs.config(**self.changes, replay__recent_window=window))
        last, lost = self.last, "journal/*.jsonl" in self.torn
        for _ in range(2):
            try:
                self.trainer = self.stack.enter_context(frozen_runs.trainer(self.s))
                break
            except ValueError as error:
                assert self.lost is not None and "drew row" in str(error) and self.lost.parts[-3] in str(error), error
                self.find()
        assert last - lost <= self.trainer.step_number <= last
        for step in range(self.trainer.step_number + 1, last + 1):
            self.states.pop(step, None)
        self.torn.clear()
        self.compare()
        self.trainer.flush_snapshot()
        shown = frozen_runs.published(self.s, self.trainer.step_number)
        jax.tree.map(np.testing.assert_array_equal, shown, jax.device_get(self.trainer.program.policy_params))

    @rule(absurd=st.booleans())
    def append(self, absurd: bool) -> None:
        """A searcher that lives on appends. An update on an absurd reward is not finite."""
        self.appended += 1
        reward = 1e30 if absurd and self.s.config.learner.non_finite == "skip" else self.appended % 5 / 4
        frozen_runs.append_changed(self.s, f"late-{self.appended}", reward=(2 if absurd else slice(None), reward))

    @precondition(lambda self: self.trainer is not None)
    @rule(ahead=st.booleans(), steps=st.integers(1, 3), coming=st.booleans())
    def step(self, ahead: bool, steps: int, coming: bool) -> None:
        """Rows may come while the devices compute."""

        def beside() -> None:
            if coming:
                self.append(absurd=False)
                self.trainer.poll()

        for _ in range(steps):
            self.trainer.poll()
            assert self.trainer.step(ahead=ahead, beside=beside) is not None
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

    @precondition(lambda self: self.trainer is not None)
    @rule(point=st.sampled_from(POINTS))
    def kill_within_a_step(self, point: tuple[type, str, str, bool]) -> None:
        owner, name, when, counts = point
        original = getattr(owner, name)

        def killed(*arguments: Any, **options: Any) -> None:
            if when == "after":
                original(*arguments, **options)
            raise Killed

        self.trainer.poll()
        assert self.trainer.step(ahead=True) is not None
        self.compare()
        with mock.patch.object(owner, name, killed):
            try:
                self.trainer.step(ahead=True)
                self.compare()  # nothing was due that is killed there
            except Killed:
                self.last += counts
        self.kill()
        assert journal.last_step(self.s.run.journal) == self.last

    @precondition(lambda self: self.trainer is None)
    @rule(kind=st.sampled_from(TORN), emptied=st.booleans())
    def tear(self, kind: str, emptied: bool) -> None:
        files = [path for path in self.s.run.root.glob(kind) if path.stat().st_size]
        if kind in self.torn or not files or (kind.endswith("jsonl") and not self.last):
            return
        path = max(files, key=lambda path: (path.stat().st_mtime_ns, path))
        if kind in FENCED:
            tear(path.parent)
        else:
            os.truncate(path, 0 if emptied and not kind.endswith("jsonl") else max(path.stat().st_size - 7, 0))
        self.torn.add(kind)

    @precondition(lambda self: self.trainer is None)
    @rule()
    def lose_checkpoints(self) -> None:
        shutil.rmtree(self.s.run.checkpoints, ignore_errors=True)

    @precondition(lambda self: self.trainer is None and self.lost is None and self.appended)
    @rule(number=st.integers(1, 3), file=st.sampled_from(("d", "manifest.ocdbt")))
    def lose(self, number: int, file: str) -> None:
        """Rows of a writer cannot be read any more."""
        path = self.s.run.replay / f"late-{min(number, self.appended)}" / "000000" / file
        if path.exists():
            self.lost = path
            path.rename(self.folder / "away")

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
                self.resume(window=0)
            self.step(ahead=False, steps=1, coming=False)
            self.trainer.finish()
            assert layout.read_json(self.s.run.finished)["balanced"]
            text, balanced = audit.describe_ledger(audit.open_run(self.s.run.root))
            assert balanced, text
        finally:
            self.stack.close()
            shutil.rmtree(self.folder)


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[] if kind in BY_DEFAULT else [pytest.mark.slow]) for kind in KINDS])
def test_in_any_order(tmp_path_factory, frozen, monkeypatch, kind):
    monkeypatch.setattr(buffer, "LogReader", functools.partial(LogReader, patience_seconds=0.1))
    KilledRun.changes = CHANGES | KINDS[kind]
    KilledRun.source = frozen(tmp_path_factory.mktemp("source") / "run", batches=2, **KilledRun.changes)
    derandomize = kind in BY_DEFAULT
    phases = (Phase.explicit, Phase.generate) if derandomize else (Phase.generate, Phase.shrink)
    chosen = settings(max_examples=3, stateful_step_count=20, deadline=None, derandomize=derandomize, phases=phases)
    run_state_machine_as_test(KilledRun, settings=chosen)
