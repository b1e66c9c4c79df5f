"""What a trainer that begins removes of dead processes, and what it leaves to those that live."""

import os
import shutil
import time
from pathlib import Path

import pytest

from tba_jax.experiment import training
from tba_jax.replay.log import REGISTER
from tba_jax.run import layout, places, snapshots
from tests.support import frozen_runs, tiny_run

pytestmark = pytest.mark.usefixtures("one_device_throughout")


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
