"""A trainer goes on from what its predecessor left: exactly, or with a sentence that names what is missing."""

import dataclasses
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tba_jax.experiment import jobs
from tba_jax.replay import journal
from tba_jax.replay.log import REGISTER
from tba_jax.roles.trainer import resume
from tba_jax.storage import fenced, layout, places, published
from tba_jax.storage.checkpoints import Checkpoints
from tba_jax.storage.fenced import StaleEpoch
from tba_jax.telemetry.status import code_digest
from tests.support import frozen_runs, tiny_run
from tests.support.tiny_log import objects
from tests.support.tiny_snapshots import withdraw

pytestmark = [
    pytest.mark.usefixtures("one_device_throughout"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),  # of orbax, whose read failed
]
STEPS = {"checkpoint__every_steps": 3, "learner__steps": 9, "replay__capacity": 200}


@pytest.fixture(scope="module")
def stopped(tmp_path_factory, frozen, one_device_throughout) -> tuple[Path, Any]:
    """A run that was killed after step 8, with checkpoints of steps 3 and 6, and its state then."""
    s = frozen(tmp_path_factory.mktemp("stopped") / "run", **STEPS)
    return s.run.root, frozen_runs.train(s, until=8, abandon=True)


@pytest.fixture
def copied(stopped, tmp_path) -> Callable[..., jobs.Invocation]:
    """A function that copies that run, and joins it under other settings."""

    def copy(**changes: Any) -> jobs.Invocation:
        shutil.copytree(stopped[0], tmp_path / "run")
        return tiny_run.settings(tmp_path / "run", frozen_runs.config(**(STEPS | changes)))

    return copy


def checkpoint(s: jobs.Invocation, step: int) -> Path:
    return s.run.checkpoints / layout.step_name(step)


def assert_resumes_as(s: jobs.Invocation, state: Any) -> None:
    with frozen_runs.trainer(s) as trainer:
        assert trainer.step_number == int(state.step)
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(trainer.state), state)


def adam(trainer: Any) -> optax.ScaleByAdamState:
    """The moments of the policy."""
    nodes = jax.tree.leaves(trainer.state.opt_state["policy"], is_leaf=lambda node: isinstance(node, optax.ScaleByAdamState))
    return next(node for node in nodes if isinstance(node, optax.ScaleByAdamState))


def refused(s: jobs.Invocation, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence), frozen_runs.trainer(s):
        pass


def lines_of(s: jobs.Invocation) -> tuple[Path, list[bytes]]:
    """The last file of the journal that has lines, and these."""
    path = max(path for path in s.run.journal.glob("*.jsonl") if path.stat().st_size)
    return path, path.read_bytes().splitlines(keepends=True)


def test_steps_are_done_again_under_their_own_schedule(copied):
    """Objective, batch size and rate change after step 8. Without any checkpoint, 8 steps are of the schedule before."""
    changes = {"learner__objective": "tba_prime", "learner__queries": 2, "learner__completions": 3, "learner__learning_rate": 0.1}
    changed = copied(**changes)
    with pytest.raises(ValueError, match="to change it, add --allow_change="):
        jobs.join(changed, may_change_schedule=True)
    names = tuple(name.replace("__", ".") for name in changes)
    jobs.join(dataclasses.replace(changed, allow_change=names), may_change_schedule=True)
    with frozen_runs.trainer(changed) as trainer:
        assert trainer.step_number == 8
        assert not adam(trainer).count and not any(jnp.any(leaf) for leaf in jax.tree.leaves(adam(trainer).nu))
        trainer.poll()
        assert trainer.step() is not None and trainer.program.rows == 6
        state = jax.device_get(trainer.state)
    lines = [*journal.read_lineage(changed.run.journal)]
    assert [(line["step"], len(line["rows"])) for line in lines[-2:]] == [(8, 12), (9, 6)]
    shutil.rmtree(changed.run.checkpoints)
    assert_resumes_as(changed, state)


def test_another_rate_keeps_the_moments_of_adam(copied):
    changed = copied(learner__learning_rate=0.1)
    jobs.join(dataclasses.replace(changed, allow_change=("learner.learning_rate",)), may_change_schedule=True)
    with frozen_runs.trainer(changed) as trainer:
        assert adam(trainer).count == 8


def test_steps_that_other_code_made_are_told(copied, caplog):
    s = copied()
    path, content = lines_of(s)
    lines = [json.loads(line) for line in content]
    assert {line["code"] for line in lines} == {code_digest()} and len(code_digest()) == 16
    shutil.rmtree(checkpoint(s, 6))
    path.write_bytes(b"".join(json.dumps(line | {"code": "0" * 16}).encode() + b"\n" for line in lines))
    with frozen_runs.trainer(s):
        assert f"steps from 4 on were made by other code or other versions (digest {'0' * 16}" in caplog.text


def test_a_changed_row_stops_the_replay(copied):
    s = copied()
    path, lines = lines_of(s)
    last = json.loads(lines[-1])
    last["rows"][0], last["rows"][-1] = last["rows"][-1], last["rows"][0]
    path.write_bytes(b"".join([*lines[:-1], json.dumps(last).encode(), b"\n"]))
    refused(s, r"step 8.*not those that were drawn")


def test_a_trainer_without_its_state_does_not_begin_again(copied):
    s = copied()
    shutil.rmtree(s.run.checkpoints)
    for path in s.run.journal.glob("*.jsonl"):
        path.unlink()
    refused(s, r"lacks the file of epoch \d")


def test_a_checkpoint_that_does_not_fit_is_not_called_damaged(copied):
    s = copied(learner__objective="learned_log_z")
    refused(s, r"checkpoint .*00000006 cannot be restored")
    assert layout.steps_in(s.run.checkpoints) == [3, 6] and not list(s.run.checkpoints.glob("set-aside-*"))


def test_a_late_checkpoint_of_a_replaced_trainer_is_set_aside(copied, stopped, caplog):
    """A trainer is stopped while it saves, another one takes over, and the first goes on: before it saves, or after."""
    s, late = copied(), stopped[0] / "checkpoints" / "00000006"  # of the epoch before
    with frozen_runs.trainer(s, polls=True) as trainer:
        shutil.copytree(late, checkpoint(s, 9))
        assert trainer.step() is not None
        trainer.finish()
        state, epoch = jax.device_get(trainer.state), trainer.lease.epoch
    found = Checkpoints(s.run.checkpoints, keep=3, read_only=True)
    assert found.latest_step() == 9 and found.restore_host(9)["epoch"] == epoch
    shutil.rmtree(checkpoint(s, 9))
    shutil.copytree(late, checkpoint(s, 9))
    assert_resumes_as(s, state)
    due, newest = (record.message for record in caplog.records if "is set aside" in record.message)
    assert "replaced wrote it meanwhile" in due
    assert str(checkpoint(s, 9)) in newest and "had been replaced" in newest and "from its checkpoint of step 8" in newest


def test_a_replaced_trainer_leaves_the_checkpoint_of_its_successor(copied):
    """Its host was suspended, so the last renewal of its lease seems to be of a moment ago."""
    s = copied()
    with frozen_runs.trainer(s, polls=True) as trainer:
        fenced.write(s.run.lease, {"released": True}, epoch=trainer.lease.epoch + 1)
        shutil.copytree(checkpoint(s, 6), checkpoint(s, 9))
        before = places.files_in(checkpoint(s, 9))
        with pytest.raises(StaleEpoch, match="another trainer took over"):
            trainer.step()
    assert places.files_in(checkpoint(s, 9)) == before and not list(s.run.checkpoints.glob("set-aside-*"))


@pytest.mark.parametrize("lines, shown", [(0, r"policy/00000008-00000\d-\S+"), (4, "checkpoints/00000006")])
def test_more_lost_lines_than_one_end_the_trainer(copied, lines, shown):
    s = copied()
    for step in (6, 8) if lines else ():
        withdraw(s.run.policies, step)
    path, content = lines_of(s)
    path.write_bytes(b"".join(content[:lines]))
    there = published.kept(s.run.policies)
    refused(s, rf"lost lines of the journal in {s.run.journal}: it ends at step {lines}, and .*{shown} is there. Restore its")
    assert layout.steps_in(s.run.checkpoints) == [3, 6] and published.kept(s.run.policies) == there


def test_the_reference_is_no_way_back_where_rows_have_been_removed(copied):
    s = copied(replay__retention="checkpoints")
    shutil.rmtree(checkpoint(s, 3))
    manifest = checkpoint(s, 6) / "state" / "manifest.ocdbt"
    os.truncate(manifest, manifest.stat().st_size - 7)
    objects(s.run.replay, "frozen*")[0].unlink()
    for _ in range(2):
        refused(s, r"00000006 cannot be used: it is damaged .*replay.retention=checkpoints has removed rows")
    assert layout.steps_in(s.run.checkpoints) == [6]


def test_what_dead_processes_left_is_removed(stopped, tmp_path):
    shutil.copytree(stopped[0], tmp_path / "run")
    run = layout.RunDir(tmp_path / "run")
    shutil.copytree(run.checkpoints / "00000006", run.checkpoints / "set-aside-00000002")  # checkpoint.keep=2 are newer
    shutil.copytree(run.checkpoints / "00000006", run.checkpoints / "set-aside-00000005")  # somebody may look at it
    before = {name for name in places.files_in(run.root) if "set-aside-00000002" not in name}
    shutil.copytree(run.checkpoints / "00000006", run.checkpoints / "00000007.orbax-checkpoint-tmp-1")
    for name in ("embedding.weight/zarr.json", "embedding.weight/c/0/0"):
        for folder in (run.reference(16 * "b"),):
            places.make_folder((folder / name).parent, below=5)
            places.write_bytes(folder / name, b"{")
    shutil.copytree(run.reference(layout.reference_id(run)), run.references / ".draft-0123abcd")
    left = [run.root / ".finished.json.0123456789abcdef", run.lease / ".000001-0000000002.0123abcd"]
    left += [run.replay / REGISTER / ".killed-0123.json.0123abcd", run.references / ".initial.json.0123abcd"]
    for path in left:
        path.write_text("{")
        os.utime(path, (time.time() - 7200,) * 2)
    young = run.replay / REGISTER / ".living-0123.json.0123abcd"
    young.write_text("{")
    resume.sweep(run, keep=2)
    assert {*places.files_in(run.root)} == before | {str(young.relative_to(run.root))}
