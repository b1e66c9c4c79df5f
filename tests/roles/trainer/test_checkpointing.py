"""Segments of the log that no checkpoint needs: which they are, and a run that goes on, resumes and is audited without them."""

import shutil

import pytest
from tba_jax.roles.trainer.checkpointing import Need

from tba_jax.commands import audit
from tba_jax.experiment import jobs
from tba_jax.roles.trainer import checkpointing
from tba_jax.storage import layout, snapshots
from tests.support import frozen_runs, tiny_run


def test_only_what_every_checkpoint_is_past_expires():
    kept = {
        10: {"a": Need(5, frozenset({1, 4})), "b": Need(2, frozenset())},
        20: {"a": Need(9, frozenset({4, 8})), "b": Need(2, frozenset({0})), "c": Need(3, frozenset())},
    }
    assert checkpointing.expired(kept) == {"a": [0, 2, 3], "b": [1]}
    assert checkpointing.expired({20: kept[20]}) == {"a": [0, 1, 2, 3, 5, 6, 7], "b": [1], "c": [0, 1, 2]}
    assert checkpointing.expired({}) == {}


def test_what_no_checkpoint_needs_is_removed_and_accounted_for(tmp_path, one_device):
    """A segment an append of 16 rows, one a step, and a window of 40 rows."""
    c = tiny_run.config(
        schedule__mode="interleaved",
        evaluation__enabled=False,
        task__missing_eos_reward=-1.0,
        replay__segment_appends=1,
        replay__capacity=40,
        replay__retention="checkpoints",
        checkpoint__every_steps=2,
        learner__steps=10,
        learner__logprob_gap_every_steps=0,
    )
    s = tiny_run.settings(tmp_path / "run", c)
    run = s.run
    assert jobs.everything(s)() == 0
    there = sorted(int(path.name) for path in run.replay.glob("*/[0-9]*") if path.is_dir())
    committed = audit.open_run(run.root).reader.heads()
    (writer,) = committed
    assert committed[writer] == 16 * 10
    # Checkpoints 8 and 10 are kept; what was removed last was decided by 6 and 8, when 10 was saved.
    gone = sorted(set(range(10)) - set(there))
    assert gone and set(range(6, 10)) <= set(there)
    account = audit.accounts(audit.open_run(run.root))[writer]
    told = layout.read_json(run.finished)
    assert account.balances and account.committed == 160 and account.resident == 40 and told["balanced"]
    assert {"resident": account.resident, "evicted": account.evicted}.items() <= told["ledger"][writer].items()
    text, balanced = audit.describe_ledger(audit.open_run(run.root))
    assert balanced and f"removed by retention: {len(gone)} segments of {writer}, the last of them {gone[-1]:06d}" in text
    line = next(line for line in audit.open_run(run.root).lines if any(row // 16 in gone for _, row in line["rows"]))
    with pytest.raises(ValueError, match=rf"step {line['step']} cannot be rebuilt: .*{writer}.* removed by retention"):
        audit.rebuild_batch(audit.open_run(run.root), line["step"])
    assert audit.rebuild_batch(audit.open_run(run.root), 10)[1]

    # A kill before the last checkpoint was whole: the one before is restored, and all that its steps drew is still there.
    expected = snapshots.fingerprint(run.policies / "00000010")
    assert layout.steps_in(run.checkpoints) == [8, 10]
    for folder in (run.policies / "00000009", run.policies / "00000010", run.checkpoints / "00000010"):
        shutil.rmtree(folder)
    assert jobs.everything(s)() == 0
    assert snapshots.fingerprint(run.policies / "00000010") == expected
    assert layout.read_json(run.finished)["epoch"] == 2 and layout.read_json(run.finished)["balanced"]


def test_a_checkpoint_has_the_rows_of_its_moment(tmp_path, frozen, one_device):
    """Rows go on coming while it is written."""
    s = frozen(tmp_path / "run", batches=2)
    with frozen_runs.trainer(s) as trainer:
        before = trainer.buffer.state()
        trainer.poll()
        trainer.buffer.integrate(step=0)
        assert before["visible"] == [] and trainer.buffer.state()["visible"]
