"""One step after another: compiled once, prepared beside the update before it, shown once it is durable, by one trainer."""

import contextlib
import dataclasses
import functools
import shutil
import socket
import threading
import time

import jax
import pytest

from tba_jax.experiment import training
from tba_jax.roles.trainer.trainer import Trainer, TrainerAccount
from tba_jax.roles.trainer.update_program import UpdateProgram
from tba_jax.storage import layout
from tba_jax.storage.lease import EpochLease, LeaseHeld
from tests.support import frozen_runs

pytestmark = pytest.mark.usefixtures("one_device_throughout")


def test_a_second_trainer_is_refused(tmp_path, frozen):
    s = frozen(tmp_path / "run", batches=2)
    with frozen_runs.trainer(s), pytest.raises(LeaseHeld, match="held by process"):
        training.trainer(s)


def test_the_update_is_compiled_while_rows_are_awaited_and_once_for_a_shape(tmp_path, caplog, monkeypatch, frozen, own_programs):
    s = frozen(tmp_path / "run", batches=2)

    def updates_compiled():
        return sum("Finished XLA compilation of jit(train_step)" in record.getMessage() for record in caplog.records)

    with frozen_runs.trainer(s, shared=False) as trainer, jax.log_compiles():
        place, plans = trainer.program.place, []
        monkeypatch.setattr(trainer.program, "place", lambda rows: (plans.append((placed := place(rows)).plan), placed)[1])
        trainer.start()
        assert updates_compiled() == len(plans) == 1
        trainer.poll()
        for steps in range(1, 6):
            assert trainer.step() is not None
            # How long the rows are that the frozen searcher drew is chance, and so is what their update has for a shape.
            assert len(plans) == 1 + steps
            assert updates_compiled() == len({(plan.sequences, plan.whole_groups) for plan in plans})


def test_the_next_batch_is_prepared_while_the_devices_compute(tmp_path, frozen, monkeypatch):
    s, computed = frozen(tmp_path / "run", batches=2), threading.Event()
    take, place = Trainer._take_result, UpdateProgram.place

    def taken_late(trainer, *arguments):
        assert computed.wait(60), "the trainer waits for an update before the next batch is there"
        return take(trainer, *arguments)

    monkeypatch.setattr(Trainer, "_take_result", taken_late)
    with frozen_runs.trainer(s, polls=True) as trainer:
        computed.set()
        measurements = trainer.step(ahead=True)
        assert all(isinstance(measurements[name], jax.Array) for name in ("loss", "grad_norm", "finite"))
        computed.clear()  # from here on an update is done only when the next batch is placed
        monkeypatch.setattr(UpdateProgram, "place", lambda *each: (computed.set(), place(*each))[1])
        for _ in range(3):  # step 5 has a checkpoint, before which nothing is drawn ahead
            assert trainer.step(ahead=True) is not None
            computed.clear()
        computed.set()
        assert trainer.step() is not None


def test_devices_wait_from_the_end_of_an_update_to_the_next_dispatch_but_not_for_rows_snapshots_or_compiling(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    account = TrainerAccount()

    def passes(seconds: float, name: str = "") -> None:
        with account.measure(name) if name else contextlib.nullcontext():
            now[0] += seconds

    def dispatch(seconds: float) -> None:
        account.is_dispatched(lambda end=now[0] + seconds: now[0] >= end)

    passes(5)
    account.restart()
    dispatch(3)
    passes(3)
    account.is_done_now()
    for name, seconds in {"publish": 3, "draw": 0.5, "wait_rows": 2, "compile": 4}.items():
        passes(seconds, name)
    dispatch(2.5)
    for name, seconds in {"integrate": 2, "journal": 1}.items():  # seen under way at the end of the first
        passes(seconds, name)
    account.is_done_now()
    dispatch(9)
    passes(0.5)
    assert account.shares()["devices_wait_for_host"] == pytest.approx((0.5 + 1) / 16)


def sharing(s, shared):
    """A run of which the roles meet in the folder `shared` from now on."""
    made = dataclasses.replace(s, run=layout.RunDir(s.run.root, shared))
    shared.mkdir()
    for name in ("config.json", "lease", "policy", "reference", "replay"):
        (s.run.root / name).rename(shared / name)
    layout.note_shared(made.run)
    return made


@pytest.mark.parametrize("where", ["on this host", "on another host"])
def test_of_a_workdir_and_its_copy_that_begin_alike_one_goes_on(tmp_path, frozen, monkeypatch, where):
    """The copy is made while nobody holds the lease; each could be the one that goes on."""
    original = sharing(frozen(tmp_path / "run", batches=2), tmp_path / "shared")
    copy = dataclasses.replace(original, run=layout.RunDir(tmp_path / "copy", original.run.shared))
    shutil.copytree(original.run.root, copy.run.root)
    monkeypatch.setattr(EpochLease, "acquire", functools.partial(EpochLease.acquire, ttl_seconds=6.0))
    with frozen_runs.trainer(copy, polls=True) as trainer:
        with monkeypatch.context() as patch:
            if where == "on another host":
                patch.setattr(socket, "gethostname", lambda: "another")
            told = "which is running" if where == "on this host" else "which renews its lease"
            with pytest.raises(LeaseHeld, match=rf"{original.run.shared} is held by process .*{told}"):
                training.make_trainer(original, publish_every_steps=2)
        assert trainer.step() is not None
        trainer.lease.check()
    with pytest.raises(ValueError, match=rf"went on in {copy.run.root} on host .*{original.run.journal} lacks the file of epoch"):
        training.make_trainer(original, publish_every_steps=2)


def test_a_copied_workdir_cannot_go_on_with_what_its_original_shares(tmp_path, frozen):
    s = frozen(tmp_path / "run", batches=2)
    original = sharing(s, tmp_path / "shared")
    copy = dataclasses.replace(original, run=layout.RunDir(tmp_path / "copy", original.run.shared))
    with frozen_runs.trainer(original, polls=True) as trainer:
        assert trainer.step() is not None
        shutil.copytree(s.run.root, copy.run.root)
        with pytest.raises(LeaseHeld, match="held by process"):
            training.make_trainer(copy, publish_every_steps=2)
        assert trainer.step() is not None and trainer.step() is not None
        epoch = trainer.lease.epoch
    told = rf"journal in {copy.run.journal}: it ends at step 1, and .*step 3 of the journal in {s.run.root} on host"
    with pytest.raises(ValueError, match=told):
        training.make_trainer(copy, publish_every_steps=2)
    with frozen_runs.trainer(original) as trainer:
        assert trainer.step_number == 3 and trainer.lease.epoch == epoch + 2
    told = rf"went on in {s.run.root} on host .*{copy.run.journal} lacks the file of epoch {epoch + 2}"
    with pytest.raises(ValueError, match=told):
        training.make_trainer(copy, publish_every_steps=2)
