"""Which checkpoint a trainer begins from, what becomes of one that does not count, and what dead processes left."""

import json
import os
import shutil
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from tba_jax.experiment import jobs, training
from tba_jax.replay import expiry, journal
from tba_jax.replay.log import REGISTER
from tba_jax.storage import layout, places, snapshots
from tba_jax.storage.checkpoints import Checkpoints
from tests.support import frozen_runs, tiny_run
from tests.support import trainer_processes as trainers

pytestmark = [
    pytest.mark.usefixtures("one_device_throughout"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),  # of orbax, whose read failed
]

STEPS = {"checkpoint__every_steps": 3, "learner__steps": 9}


@pytest.fixture(scope="module")
def stopped(tmp_path_factory, one_device_throughout) -> tuple[Path, object]:
    """A run that was killed after step 8, with checkpoints of steps 3 and 6, and its state then."""
    s = frozen_runs.make(tmp_path_factory.mktemp("stopped") / "run", **STEPS)
    return s.run.root, frozen_runs.train(s, until=8, abandon=True)


def copy(stopped: tuple[Path, object], workdir: Path, **changes) -> jobs.Invocation:
    shutil.copytree(stopped[0], workdir)
    return tiny_run.settings(workdir, frozen_runs.config(**(STEPS | changes)))


def damage(s: jobs.Invocation, step: int, file: str = "host/metadata") -> None:
    path = s.run.checkpoints / layout.step_name(step) / file
    path.write_bytes(path.read_bytes()[:-7])


def assert_resumes_exactly(s: jobs.Invocation, expected: object) -> None:
    with frozen_runs.trainer(s) as trainer:
        assert trainer.step_number == 8
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(trainer.state), expected)


def told(caplog) -> list[str]:
    return [record.message for record in caplog.records if "is set aside" in record.message]


def test_damaged_checkpoints_are_set_aside_and_the_reference_is_taken(tmp_path, stopped, caplog):
    """The journal is done again from there, bit for bit."""
    s = copy(stopped, tmp_path / "run")
    for step in (3, 6):
        damage(s, step)
    assert_resumes_exactly(s, stopped[1])
    newest, older = told(caplog)
    assert f"checkpoint {s.run.checkpoints}/00000006 is set aside: it is damaged (host/metadata: " in newest
    assert "goes on from its checkpoint of step 3" in newest and "It is in set-aside-00000006" in newest
    assert "goes on from its reference policy" in older
    left = [s.run.checkpoints / f"set-aside-{layout.step_name(step)}" for step in (3, 6)]
    assert all(folder.is_dir() for folder in left) and layout.steps_in(s.run.checkpoints)[-1] == 8
    caplog.clear()
    assert_resumes_exactly(s, stopped[1])
    assert not told(caplog)


def test_a_checkpoint_that_does_not_fit_is_not_called_damaged(tmp_path, stopped):
    """What can be read stays: its state is one of other settings, say."""
    s = copy(stopped, tmp_path / "run", learner__objective="learned_log_z")
    with pytest.raises(ValueError, match=r"checkpoint .*00000006 cannot be restored"):
        training.make_trainer(s, publish_every_steps=2)
    assert layout.steps_in(s.run.checkpoints) == [3, 6] and not list(s.run.checkpoints.glob("set-aside-*"))


def test_a_late_checkpoint_of_a_replaced_trainer_is_set_aside(tmp_path, stopped, caplog):
    """A trainer is stopped while it saves, another one takes over, and the first goes on."""
    s = copy(stopped, tmp_path / "run")
    with frozen_runs.trainer(s) as trainer:
        trainer.poll()
        assert trainer.step() is not None and trainer.step_number == 9
        state = jax.device_get(trainer.state)
    shutil.rmtree(s.run.checkpoints / "00000009")
    late = s.run.checkpoints / "00000009"
    shutil.copytree(stopped[0] / "checkpoints" / "00000006", late)  # of the epoch before
    with frozen_runs.trainer(s) as trainer:
        assert trainer.step_number == 9
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(trainer.state), state)
    (sentence,) = told(caplog)
    assert str(late) in sentence and "had been replaced" in sentence and "goes on from its checkpoint of step 8" in sentence


def test_a_late_checkpoint_does_not_stop_the_one_that_is_due(tmp_path, stopped, caplog):
    s = copy(stopped, tmp_path / "run")
    with frozen_runs.trainer(s) as trainer:
        trainer.poll()
        shutil.copytree(stopped[0] / "checkpoints" / "00000006", s.run.checkpoints / "00000009")
        assert trainer.step() is not None
        trainer.finish()
        epoch = trainer.lease.epoch
    checkpoints = Checkpoints(s.run.checkpoints, keep=3, read_only=True)
    assert checkpoints.latest_step() == 9 and checkpoints.restore_host(9)["epoch"] == epoch
    assert "replaced wrote it meanwhile" in told(caplog)[0]


@pytest.mark.parametrize("lines", [3, 4])
def test_a_checkpoint_that_shows_more_lost_lines_than_one_ends_the_trainer(tmp_path, stopped, lines):
    """An older checkpoint is within the journal, but what the lost lines said is known to nobody."""
    s = copy(stopped, tmp_path / "run")
    for step in (6, 8):
        snapshots.remove(s.run.policies, step)
    (path,) = [path for path in s.run.journal.glob("*.jsonl") if path.stat().st_size]
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:lines]))
    with pytest.raises(ValueError, match=rf"lost lines of the journal in {s.run.journal}: it ends at step {lines}, and "):
        training.make_trainer(s, publish_every_steps=2)
    assert layout.steps_in(s.run.checkpoints) == [3, 6] and layout.steps_in(s.run.policies) == [0, 2, 4]


def test_a_journal_that_is_lost_is_named(tmp_path, stopped):
    """To begin again from the reference would throw the run away without a word."""
    s = copy(stopped, tmp_path / "run")
    for path in s.run.journal.glob("*.jsonl"):
        os.truncate(path, 0)
    with pytest.raises(
        ValueError, match=r"lost lines of the journal in .*: it ends at step 0, and .*00000008 is there. Restore its files"
    ):
        training.make_trainer(s, publish_every_steps=2)
    assert layout.steps_in(s.run.checkpoints) == [3, 6]


def test_the_reference_is_no_way_back_where_rows_have_been_removed(tmp_path, stopped):
    s = copy(stopped, tmp_path / "run", replay__retention="checkpoints")
    shutil.rmtree(s.run.checkpoints / "00000003")
    damage(s, 6, "state/manifest.ocdbt")
    layout.write_json(s.run.replay / expiry.EXPIRED, {"expired": {"frozen": [0]}, "removing": {}})
    for _ in range(2):
        with pytest.raises(
            ValueError, match=r"00000006 cannot be used: it is damaged .*replay.retention=checkpoints has removed rows"
        ):
            training.make_trainer(s, publish_every_steps=2)
    assert layout.steps_in(s.run.checkpoints) == [6]


def test_steps_before_a_damaged_checkpoint_are_done_again_under_their_own_schedule(tmp_path, stopped):
    """The objective changed at step 8; the checkpoints of 8 and 6 are damaged, so that steps 4 to 8 are of the one before."""
    s = copy(stopped, tmp_path / "run")
    with frozen_runs.trainer(s):
        pass
    changed = tiny_run.settings(s.run.root, frozen_runs.config(**STEPS, learner__objective="tba_prime"))
    object.__setattr__(changed, "allow_change", ("learner.objective",))
    jobs.join(changed, may_change_schedule=True)
    with frozen_runs.trainer(changed) as trainer:
        trainer.poll()
        assert trainer.step() is not None
        trainer.finish()
        state = jax.device_get(trainer.state)
    for step in (6, 8, 9):
        if (s.run.checkpoints / layout.step_name(step)).exists():
            damage(s, step)
    with frozen_runs.trainer(changed) as trainer:
        assert trainer.step_number == 9
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(trainer.state), state)


@pytest.mark.slow
def test_all_processes_of_a_trainer_leave_the_same_checkpoint_out(tmp_path):
    """An array that the second process alone reads is damaged: both begin from the checkpoint before, and end as undisturbed."""
    larger = {"model__width": 32, "model__ffn": 64}  # what is smaller is in the files that all processes read
    source = frozen_runs.make(tmp_path / "source", **larger).run.root
    flags = trainers.offline_flags(source, learner__steps=8, checkpoint__every_steps=3, learner__mesh__fsdp=2, **larger)
    trainers.run(tmp_path / "run", *flags, processes=2)
    shutil.copytree(tmp_path / "run", tmp_path / "torn")
    tear_what_the_second_process_reads(tmp_path / "torn" / "checkpoints", 8)
    again = [flag.replace("learner.steps=8", "learner.steps=11") for flag in flags]
    ends = {}
    for name in ("run", "torn"):
        ended = trainers.run(tmp_path / name, *again, "--allow_change=learner.steps", processes=2)
        assert ("00000008 is set aside: it is damaged" in ended[0].text) == (name == "torn"), ended[0].text
        ends[name] = frozen_runs.contents(tmp_path / name / "policy" / "00000011")
        assert json.loads(ends[name].pop("commit.json"))["step"] == 11
    assert ends["run"] == ends["torn"]
    lines = [[line["batch"] for line in journal.read_lineage(tmp_path / name / "journal")] for name in ends]
    assert lines[0] == lines[1] and len(lines[0]) == 11


def tear_what_the_second_process_reads(folder: Path, step: int) -> None:
    """Empties a file of the second process that the checkpoint needs; most of its files hold what later ones replace."""
    checkpoints = Checkpoints(folder, keep=2, read_only=True)
    for file in (folder / layout.step_name(step) / "state" / "ocdbt.process_1" / "d").iterdir():
        content = file.read_bytes()
        os.truncate(file, 0)
        if checkpoints.damage(step, ["state"]):
            return
        file.write_bytes(content)
    raise AssertionError("no file of the second process is needed")


def of_run(workdir: Path) -> set[str]:
    """Every file and folder of a run but those that a resume writes."""
    paths = {str(path.relative_to(workdir)) for path in workdir.rglob("*")}
    return {path for path in paths if not path.startswith(("metrics", "policy/00000000/", "checkpoints/0", "journal/epoch"))}


def test_what_dead_processes_left_is_removed(tmp_path, frozen):
    s = frozen(tmp_path / "run", batches=2, checkpoint__every_steps=2)
    frozen_runs.train(s, until=4, abandon=True)
    before, run = of_run(s.run.root), s.run
    # What orbax, a snapshot, a reference, a copy and an atomic write leave of themselves when their process is killed.
    shutil.copytree(run.checkpoints / "00000004", run.checkpoints / "00000006.orbax-checkpoint-tmp-1")
    shutil.copytree(run.policies / "00000004", run.policies / ".00000006.0123abcd")
    shutil.copytree(run.reference(layout.reference_id(run)), run.references / ".draft-0123abcd")
    shutil.copytree(run.reference(layout.reference_id(run)), run.reference(16 * "b"))
    (run.reference(16 * "b") / snapshots.COMMIT).unlink()
    old = [
        run.root / ".grant.json.0123abcd",
        run.root / ".trainer.key.0123456789abcdef",
        run.journal / ".epoch-000001.lease.0123abcd",
        run.replay / ".expired.json.0123abcd",
        run.replay / REGISTER / ".killed-0123.json.0123abcd",
        run.references / ".initial.json.0123abcd",
    ]
    for path in old:
        path.write_text("{")
        os.utime(path, (time.time() - 7200,) * 2)
    young = run.replay / REGISTER / ".living-0123.json.0123abcd"
    young.write_text("{")
    with frozen_runs.trainer(s):
        pass
    assert of_run(run.root) == before | {str(young.relative_to(run.root))}


def test_a_checkpoint_that_was_set_aside_goes_with_those_of_its_time(tmp_path, frozen):
    """Somebody may want to look at it, until as many newer ones are there as are kept."""
    s = frozen(tmp_path / "run", batches=2, checkpoint__every_steps=2, checkpoint__keep=2)
    frozen_runs.train(s, until=4, abandon=True)
    aside = s.run.checkpoints / "set-aside-00000003"
    shutil.copytree(s.run.checkpoints / "00000004", aside)
    with frozen_runs.trainer(s) as trainer:
        assert aside.exists()
        trainer.poll()
        for _ in range(2):
            assert trainer.step() is not None
    assert layout.steps_in(s.run.checkpoints) == [4, 6]
    with frozen_runs.trainer(s):
        assert not aside.exists()


def test_a_mounted_run_stays_as_it_is(tmp_path, frozen):
    source = frozen(tmp_path / "source", batches=2)
    (source.run.checkpoints / "00000006.orbax-checkpoint-tmp-1").mkdir()
    (source.run.references / ".draft-0123abcd").mkdir()
    left = source.run.replay / ".expired.json.0123abcd"
    left.write_text("{")
    os.utime(left, (time.time() - 7200,) * 2)
    before = frozen_runs.contents(source.run.root)
    s = frozen_runs.offline(tmp_path / "run", source.run.root)
    training.reference(s)()
    with frozen_runs.trainer(s) as trainer:
        trainer.poll()
        assert trainer.step() is not None
    assert frozen_runs.contents(source.run.root) == before
    assert (source.run.references / ".draft-0123abcd").is_dir()


def test_half_a_reference_in_an_object_store_is_removed(tmp_path):
    shared = places.place("memory://half-a-reference/run")
    run = layout.RunDir(tmp_path / "run", shared)
    c = tiny_run.config()
    s = tiny_run.settings(run.root, c)
    object.__setattr__(s, "run", run)
    training.reference(s)()
    places.write_bytes(run.reference(16 * "b") / "embedding.weight" / "zarr.json", b"{")
    with frozen_runs.trainer(s):
        pass
    assert places.names_in(run.references) == sorted([layout.reference_id(run), "initial.json"])
