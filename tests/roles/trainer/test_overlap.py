"""Host work beside the devices': the next batch is prepared while an update runs, and leaves no trace until its own update."""

import dataclasses
import shutil
import threading
import time
import weakref

import jax
import numpy as np
import pytest

from tba_jax.experiment import training
from tba_jax.replay import journal
from tba_jax.replay.log import LogWriter
from tba_jax.replay.reader import LogReader
from tba_jax.roles.trainer import loop
from tba_jax.roles.trainer.buffer import ReplayBuffer
from tba_jax.roles.trainer.checkpointing import Checkpointing
from tba_jax.roles.trainer.publishing import Publishing
from tba_jax.roles.trainer.refusals import Refusals
from tba_jax.roles.trainer.trainer import Trainer
from tba_jax.roles.trainer.update_program import UpdateProgram
from tba_jax.storage import snapshots
from tba_jax.storage.lease import EpochLease
from tests.support import frozen_runs, tiny_run

pytestmark = pytest.mark.usefixtures("one_device_throughout")


class Killed(BaseException):
    """Nothing handles it, so the trainer ends where it is raised, as by a kill."""


def train(s, *, until):
    """Steps a trainer that works ahead, and drops it as a kill would. Returns its state and the steps drawn ahead."""
    prepared = []
    with frozen_runs.trainer(s) as trainer:
        trainer.poll()
        while trainer.step_number < until:
            assert trainer.step(ahead=True) is not None
            if trainer._next is not None:
                prepared.append(trainer.step_number + 1)
        return jax.device_get(trainer.state), prepared


def equal(got, expected):
    jax.tree.map(np.testing.assert_array_equal, got, expected)


MOVING = {
    "learner__objective": "tba_prime",
    "learner__reference__kind": "reset",
    "learner__reference__reset_steps": 3,
    "learner__reference__reset_optimizer": True,
}


@pytest.mark.parametrize("changes", [{}, MOVING], ids=["fixed reference", "moving reference"])
def test_working_ahead_changes_no_number(tmp_path, frozen, changes):
    s = frozen(tmp_path / "ahead", **changes)
    shutil.copytree(s.run.root, tmp_path / "each")
    each = tiny_run.settings(tmp_path / "each", frozen_runs.config(**changes))
    expected = frozen_runs.train(each, until=11, abandon=True)
    got, prepared = train(s, until=11)
    equal(got, expected)
    # Steps 5 and 10 are followed by a checkpoint, which shows the index as it is after them.
    assert prepared == [step for step in range(2, 13) if step not in (6, 11)]
    lines = [[*journal.read_lineage(run.run.journal)] for run in (s, each)]
    assert [line["rows"] for line in lines[0]] == [line["rows"] for line in lines[1]]


# Where a kill of step 8 comes: a function that the step calls, and whether before or after the call.
POINTS = {
    "before the dispatch": (UpdateProgram, "dispatch", "before"),
    "after the dispatch": (UpdateProgram, "dispatch", "after"),
    "before the line": (EpochLease, "check", "before"),
    "without the line": (journal.Journal, "append", "before"),
    "after the line": (journal.Journal, "append", "after"),
    "before the next rows": (ReplayBuffer, "integrate", "before"),
    "after the next rows": (ReplayBuffer, "integrate", "after"),
    "after the next draw": (ReplayBuffer, "draw", "after"),
    "after the next batch": (UpdateProgram, "place", "after"),
    "after the result": (Refusals, "look_at", "after"),
    "before what follows": (Trainer, "_follow_up", "before"),
    "before the snapshot": (Publishing, "publish", "before"),
    "after what follows": (Trainer, "_follow_up", "after"),
}


@pytest.fixture(scope="module")
def after_nine(tmp_path_factory, frozen, one_device_throughout):
    """The state after 9 steps of the frozen log, one at a time, without an interruption."""
    return frozen_runs.train(frozen(tmp_path_factory.mktemp("once") / "run"), until=9, abandon=True)


# The others take their time in the slow tests.
BY_DEFAULT = ("without the line", "after the next rows")


@pytest.mark.parametrize("point", [pytest.param(name, marks=[] if name in BY_DEFAULT else [pytest.mark.slow]) for name in POINTS])
def test_a_kill_at_every_point_resumes_exactly(tmp_path, frozen, monkeypatch, after_nine, point):
    s = frozen(tmp_path / "run")
    owner, name, when = POINTS[point]
    original = getattr(owner, name)

    def killed(*arguments, **settings):
        if when == "after":
            original(*arguments, **settings)
        raise Killed

    with frozen_runs.trainer(s) as trainer:
        trainer.poll()
        for _ in range(7):
            assert trainer.step(ahead=True) is not None
        assert trainer._next is not None
        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(owner, name, killed)
            trainer.step(ahead=True)
    without = ("before the dispatch", "after the dispatch", "before the line", "without the line")
    recorded = [line["step"] for line in journal.read_lineage(s.run.journal)]
    assert recorded == list(range(1, 8 if point in without else 9))
    equal(train(s, until=9)[0], after_nine)


def test_an_update_that_is_not_finite_stops_the_run_and_the_next_batch_leaves_no_trace(tmp_path, frozen, after_nine):
    s = frozen(tmp_path / "run")
    with frozen_runs.trainer(s, publish_every_steps=2) as trainer:
        trainer.poll()
        for _ in range(6):
            assert trainer.step(ahead=True) is not None
        spoilt = jax.tree.map(lambda x: np.nan * x if x.dtype == np.float32 else x, trainer.state.opt_state)
        trainer.program.state = dataclasses.replace(trainer.state, opt_state=spoilt)
        drawn = []
        with pytest.raises(FloatingPointError, match="step 7 is not finite"):
            trainer.step(ahead=True, beside=lambda: drawn.append(int(trainer.index.row_draws.sum())))
        assert drawn == [7 * trainer.program.rows] == [int(trainer.index.row_draws.sum())]
        assert trainer._next is None
        assert [line["step"] for line in journal.read_lineage(s.run.journal)] == list(range(1, 8))
        trainer.flush_snapshot()
        assert snapshots.committed_steps(s.run.policies) == [0, 2, 4, 6]
    # The weights were spoilt by the test: what the journal holds comes to the state of an undisturbed run.
    equal(train(s, until=9)[0], after_nine)


def test_a_stop_drops_the_next_batch(tmp_path, frozen, after_nine):
    s = frozen(tmp_path / "run")
    trainer, lease = training.make_trainer(s, publish_every_steps=2)
    trainer.poll()
    assert not loop.run_trainer(trainer, s.run, stop=lambda: trainer.step_number == 7)
    lease.release()
    assert trainer._next is not None
    assert trainer.checkpoints.latest_step() == 7 == len(journal.read_lineage(s.run.journal))
    equal(train(s, until=9)[0], after_nine)


def test_the_next_batch_is_prepared_and_the_last_point_written_while_the_devices_compute(tmp_path, frozen, monkeypatch):
    s = frozen(tmp_path / "run")
    order, computed = [], threading.Event()

    def noted(owner, name, told):
        original = getattr(owner, name)

        def noting(*arguments, **settings):
            order.append(told)
            return original(*arguments, **settings)

        monkeypatch.setattr(owner, name, noting)

    take = Trainer._take_result

    def slow(trainer, *arguments):
        assert computed.wait(60)
        return take(trainer, *arguments)

    monkeypatch.setattr(Trainer, "_take_result", slow)
    for owner, name, told in (
        (UpdateProgram, "dispatch", "dispatch"),
        (ReplayBuffer, "draw", "draw"),
        (Refusals, "look_at", "result"),
        (Checkpointing, "save", "checkpoint"),
    ):
        noted(owner, name, told)
    place = UpdateProgram.place

    def placed(program, rows):
        found = place(program, rows)
        computed.set()
        return found

    with frozen_runs.trainer(s) as trainer:
        trainer.poll()
        computed.set()
        assert trainer.step(ahead=True, beside=lambda: order.append("beside")) is not None
        # From here on an update is done only when the next batch is there: a trainer that waited for it first would hang.
        computed.clear()
        monkeypatch.setattr(UpdateProgram, "place", placed)
        assert trainer.step(ahead=True, beside=lambda: order.append("beside")) is not None
        computed.set()
        for _ in range(3):
            assert trainer.step(ahead=True, beside=lambda: order.append("beside")) is not None
        assert trainer.step() is not None
    ahead = ["dispatch", "beside", "draw", "result"]
    assert order == ["draw", *4 * ahead, "dispatch", "beside", "result", "checkpoint", "draw", "dispatch", "result"]


def late_rows(s):
    """Appends the rows of the log again, four at a time, by a writer that is new each time."""
    reader = LogReader(s.run.replay, s.experiment.contract.row_shape())
    ((source, rows),) = reader.heads().items()
    for first in range(0, rows - 4, 4):
        columns = {name: column.copy() for name, column in reader.read(source, first, first + 4).items()}
        columns["row"][:] = np.arange(4)
        columns["reward"] += 0.125 * (1 + first % 5)
        writer = LogWriter(s.run.replay, f"late-{first}", reader.shape, rows_per_append=4, segment_appends=4, info={})
        writer.append(columns)
        yield
    raise AssertionError("no rows are left")


def test_rows_that_come_during_an_update_are_replayed_as_they_came(tmp_path, frozen):
    """They are integrated before the next draw, beside the update: the line of the next step tells of them, none before."""
    s = frozen(tmp_path / "run", replay__capacity=24)
    with frozen_runs.trainer(s) as trainer:
        trainer.poll()
        coming = late_rows(s)

        def come() -> None:
            next(coming)
            trainer.poll()

        for _ in range(4):
            assert trainer.step(ahead=True, beside=come) is not None
        assert trainer._next is not None  # dropped: a checkpoint shows its rows, but not its draw
        trainer.save_checkpoint()
    lines = [*journal.read_lineage(s.run.journal)]
    came = [[writer for each in line["visible"] for writer in each["heads"] if writer.startswith("late")] for line in lines]
    assert came == [[], ["late-0"], ["late-4"], ["late-8"]]
    with frozen_runs.trainer(s) as trainer:
        assert trainer.index.heads["late-12"] == 4
        trainer.poll()
        assert trainer.step(ahead=True) is not None
        state = jax.device_get(trainer.state)
    assert [list(each["heads"]) for each in [*journal.read_lineage(s.run.journal)][4]["visible"]] == [["late-12"]]
    frozen_runs.assert_resumes_as(s, state)


def test_what_an_update_read_and_gave_is_let_go_of_once_the_devices_have_the_next_one(tmp_path, frozen, monkeypatch):
    """To let go of arrays and to fetch some takes time in which the devices would be idle."""
    s = frozen(tmp_path / "run")
    batches, alive = [], []
    dispatch = UpdateProgram.dispatch

    def dispatched(program, placed):
        alive.append([batch() is not None for batch in batches])
        batches.append(weakref.ref(placed.batch.tokens))
        return dispatch(program, placed)

    monkeypatch.setattr(UpdateProgram, "dispatch", dispatched)
    with frozen_runs.trainer(s) as trainer:
        trainer.poll()
        for _ in range(3):
            measurements = trainer.step(ahead=True)
            assert all(isinstance(measurements[name], jax.Array) for name in ("loss", "grad_norm", "finite"))
    assert alive == [[], [True], [False, True]]


def test_a_compilation_beside_an_update_has_its_own_share_of_time(tmp_path, frozen, monkeypatch):
    s = frozen(tmp_path / "run")
    with frozen_runs.trainer(s) as trainer:
        trainer.poll()
        assert trainer.step(ahead=True) is not None
        trainer.account.restart()
        with monkeypatch.context() as patch:
            patch.setattr(UpdateProgram, "compile_where_new", lambda program, placed: time.sleep(2))
            assert trainer.step(ahead=True) is not None
        assert trainer.step(ahead=True) is not None
        shares = trainer.account.shares()
    assert shares["time_compile"] > 0.5 and shares["devices_wait_for_host"] < 0.5
