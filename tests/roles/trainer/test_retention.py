"""Segments of the log that no checkpoint needs: which they are, and a run that goes on, resumes and is audited without them."""

import dataclasses
import shutil

import pytest

from tba_jax.commands import audit
from tba_jax.experiment import jobs
from tba_jax.roles.trainer import checkpointing
from tba_jax.roles.trainer.checkpointing import Need
from tba_jax.storage import layout
from tests.support import tiny_run


def test_only_what_every_checkpoint_is_past_expires():
    kept = {
        10: {"a": Need(5, frozenset({1, 4})), "b": Need(2, frozenset())},
        20: {"a": Need(9, frozenset({4, 8})), "b": Need(2, frozenset({0})), "c": Need(3, frozenset())},
    }
    assert checkpointing.expired(kept) == {"a": [0, 2, 3], "b": [1]}
    assert checkpointing.expired({20: kept[20]}) == {"a": [0, 1, 2, 3, 5, 6, 7], "b": [1], "c": [0, 1, 2]}
    assert checkpointing.expired({}) == {}


def settings(workdir, *, steps, **changes):
    c = tiny_run.config(
        schedule__mode="interleaved",
        evaluation__enabled=False,
        task__missing_eos_reward=-1.0,
        replay__segment_appends=1,  # a segment an append
        replay__capacity=40,
        replay__retention="checkpoints",
        checkpoint__every_steps=3,
        learner__steps=steps,
        **changes,
    )
    return dataclasses.replace(tiny_run.settings(workdir, c), allow_change=("learner.steps",))


@pytest.fixture(scope="module")
def twenty_steps(tmp_path_factory, one_device_throughout):
    """A function that makes a workdir with a run of 20 steps."""
    done = tmp_path_factory.mktemp("retention") / "run"
    assert jobs.everything(settings(done, steps=20))() == 0

    def copy(workdir):
        shutil.copytree(done, workdir)
        return settings(workdir, steps=20)

    return copy


def segments(run):
    """Numbers of the segments that are there."""
    return sorted(int(path.name) for path in run.replay.glob("*/[0-9]*") if path.is_dir())


def test_what_no_checkpoint_needs_is_removed_and_accounted_for(tmp_path, twenty_steps):
    run = twenty_steps(tmp_path / "run").run
    there = segments(run)
    committed = audit.open_run(run.root).reader.heads()
    (writer,) = committed
    assert committed[writer] == 16 * 20  # an append of 16 rows a step
    # Checkpoints 18 and 20 are kept; what was removed last was decided by 15 and 18, when 20 was saved.
    gone = sorted(set(range(20)) - set(there))
    assert gone and set(range(14, 20)) <= set(there)
    account = audit.accounts(audit.open_run(run.root))[writer]
    told = layout.read_json(run.finished)
    assert account.balances and account.committed == 320 and account.resident == 40 and told["balanced"]
    assert {"resident": account.resident, "evicted": account.evicted}.items() <= told["ledger"][writer].items()
    text, balanced = audit.describe_ledger(audit.open_run(run.root))
    assert balanced and f"removed by retention: {len(gone)} segments of {writer}, the last of them {gone[-1]:06d}" in text

    line = next(line for line in audit.open_run(run.root).lines if any(row // 16 in gone for _, row in line["rows"]))
    with pytest.raises(ValueError, match=rf"step {line['step']} cannot be rebuilt: .*{writer}.* removed by retention"):
        audit.rebuild_batch(audit.open_run(run.root), line["step"])
    text, same = audit.rebuild_batch(audit.open_run(run.root), 20)
    assert same

    # On: the last checkpoint is restored, and a new writer's segments expire as well.
    assert jobs.everything(settings(run.root, steps=30))() == 0
    there = {path.parent.name: path for path in run.replay.glob("*/[0-9]*")}
    assert len(there) == 2 and layout.read_json(run.finished)["balanced"]
    accounts = audit.accounts(audit.open_run(run.root))
    assert all(account.balances for account in accounts.values())
    assert sum(account.resident for account in accounts.values()) == 40


def parameters_of(run, step):
    folder = run.policies / layout.step_name(step)
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("c/*") if path.is_file()}


def test_steps_after_an_older_checkpoint_can_be_done_again(tmp_path, twenty_steps):
    """A kill before the last checkpoint was whole: the one before is restored, and all that its steps drew is still there."""
    s = twenty_steps(tmp_path / "run")
    expected = parameters_of(s.run, 20)
    assert layout.steps_in(s.run.checkpoints) == [18, 20] and set(range(20)) - set(segments(s.run)) and expected
    for step in (19, 20):
        shutil.rmtree(s.run.policies / layout.step_name(step))
    shutil.rmtree(s.run.checkpoints / layout.step_name(20))
    assert jobs.everything(s)() == 0
    assert parameters_of(s.run, 20) == expected
    assert layout.read_json(s.run.finished)["epoch"] == 2 and layout.read_json(s.run.finished)["balanced"]
