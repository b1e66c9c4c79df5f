"""A trainer that was stopped or killed goes on as if it had not been."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest

from tba_jax.commands import audit
from tba_jax.experiment import jobs, training
from tba_jax.replay import journal
from tba_jax.storage import layout as layout_lib
from tests.support import frozen_runs, tiny_run

pytestmark = pytest.mark.usefixtures("one_device_throughout")


ADAPTERS = {"lora__rank": 2, "model__compute_dtype": "bfloat16", "learner__logprob_gap_limit": 0.1}

RESUMED = {
    "whole policy": {},
    "adapters in bfloat16": ADAPTERS,
    "the better of two near-duplicates": {"replay__merge_keep": "best", "replay__merge_edit_distance": 0.3},
    "learned log Z": {"learner__objective": "learned_log_z"},
    "value head": {"learner__objective": "ppo"},
    # 5, the checkpoint, is between two resets.
    "reset reference and optimizer": {
        "learner__objective": "tba_prime",
        "learner__reference__kind": "reset",
        "learner__reference__reset_steps": 3,
        "learner__reference__reset_optimizer": True,
    },
    "moving average in host memory": {
        "model__compute_dtype": "bfloat16",
        "learner__logprob_gap_limit": 0.1,
        "learner__reference__kind": "ema",
        "learner__reference__ema_decay": 0.8,
        "learner__reference__offload": True,
    },
    "weights by reward": {"replay__strategy": "softmax", "replay__recent_probability": 0.5},
}

# Whose states hold what no other's does; the others take their time in the slow tests.
BY_DEFAULT = ("the better of two near-duplicates", "moving average in host memory")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in BY_DEFAULT else [pytest.mark.slow]) for name in RESUMED])
def test_resume_on_a_frozen_log_is_bit_for_bit(tmp_path, name, frozen):
    """12 steps at once = 8 steps with a checkpoint at 5, dropped, replayed from 5 to 8, and on to 12."""
    changes = RESUMED[name]
    once = frozen(tmp_path / "once", **changes)
    shutil.copytree(tmp_path / "once", tmp_path / "twice")
    twice = tiny_run.settings(tmp_path / "twice", frozen_runs.config(**changes))
    expected = frozen_runs.train(once, until=12, abandon=False)
    initial = frozen_runs.published(once, 0)
    assert all(np.any(a != b) for a, b in zip(jax.tree.leaves(initial), jax.tree.leaves(expected.params["policy"]), strict=True))
    frozen_runs.train(twice, until=8, abandon=True)
    lineage = [*journal.read_lineage(twice.run.journal)]
    assert [line["step"] for line in lineage] == list(range(1, 9))
    got = frozen_runs.train(twice, until=12, abandon=False)
    jax.tree.map(np.testing.assert_array_equal, got, expected)
    assert int(got.step) == 12
    lines = [[*journal.read_lineage(s.run.journal)] for s in (once, twice)]
    assert [line["batch"] for line in lines[0]] == [line["batch"] for line in lines[1]]


def test_steps_are_done_again_under_their_own_schedule(tmp_path, frozen):
    """8 steps, the last 3 after the checkpoint, then another objective, batch size and rate: the change counts from step 9 on."""
    s = frozen(tmp_path / "run")
    frozen_runs.train(s, until=8, abandon=True)
    changes = {
        "learner__objective": "tba_prime",
        "learner__queries": 2,
        "learner__completions": 3,
        "learner__learning_rate": 0.1,
    }
    changed = tiny_run.settings(tmp_path / "run", frozen_runs.config(**changes))
    names = tuple(name.replace("__", ".") for name in changes)
    with pytest.raises(ValueError, match="to change it, add --allow_change="):
        jobs.join(changed, may_change_schedule=True)
    jobs.join(dataclasses.replace(changed, allow_change=names), may_change_schedule=True)
    with frozen_runs.trainer(changed) as trainer:
        assert trainer.step_number == 8
        found = jax.device_get(trainer.state.params["policy"])
        trainer.flush_snapshot()
        jax.tree.map(np.testing.assert_array_equal, found, frozen_runs.published(s, 8))
        trainer.poll()
        assert trainer.step() is not None and trainer.program.rows == 6
        state = jax.device_get(trainer.state)
    lines = [*journal.read_lineage(s.run.journal)]
    assert [(line["step"], len(line["rows"])) for line in lines[-2:]] == [(8, 12), (9, 6)]
    frozen_runs.assert_resumes_as(changed, state)


def test_a_changed_row_stops_the_replay(tmp_path, frozen):
    """The journal's hash is checked: rows that are not those that were drawn are never trained on again in silence."""
    s = frozen(tmp_path / "run")
    frozen_runs.train(s, until=8, abandon=True)
    path = max(s.run.journal.glob("*.jsonl"))
    lines = path.read_text().splitlines()
    last = json.loads(lines[-1])
    last["rows"][0], last["rows"][-1] = last["rows"][-1], last["rows"][0]
    path.write_text("\n".join([*lines[:-1], json.dumps(last)]) + "\n")
    with pytest.raises(ValueError, match=r"step 8.*not those that were drawn"):
        frozen_runs.train(s, until=9, abandon=True)


def test_a_damaged_line_before_the_checkpoint_stops_no_resume_and_the_audit_names_it(tmp_path, frozen):
    s = frozen(tmp_path / "run")
    frozen_runs.train(s, until=8, abandon=True)  # with a checkpoint at 5
    path = max(s.run.journal.glob("*.jsonl"))
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:4], b"\0" * 40 + b"\n", *lines[5:]]))
    frozen_runs.train(s, until=12, abandon=False)
    assert layout_lib.read_json(s.run.finished) | {"step": 12, "balanced": True} == layout_lib.read_json(s.run.finished)
    with pytest.raises(ValueError, match=rf"{path.name} line 5 is not a journal line"):
        audit.open_run(s.run.root)


def test_a_line_that_is_damaged_at_the_end_is_told_and_the_run_ends_unbalanced(tmp_path, frozen, caplog):
    s = frozen(tmp_path / "run")
    with frozen_runs.trainer(s) as trainer:
        trainer.poll()
        while not trainer.is_done:
            assert trainer.step() is not None
        path = max(s.run.journal.glob("*.jsonl"))
        path.write_bytes(path.read_bytes().replace(b'{"step":3,', b'{"step":4,'))
        trainer.finish()
    assert not layout_lib.read_json(s.run.finished)["balanced"]
    assert f"{path.name} line 3: step 4 of epoch {trainer.lease.epoch} stands before step 4" in caplog.text


def test_a_trainer_without_its_state_does_not_begin_again(tmp_path, frozen):
    s = frozen(tmp_path / "run", batches=2)
    frozen_runs.train(s, until=5, abandon=False)
    shutil.rmtree(s.run.checkpoints)
    journals = list(s.run.journal.glob("*.jsonl"))
    for path in journals:
        path.rename(path.with_suffix(".away"))
    with pytest.raises(ValueError, match=r"holds the policy of step 4 of a trainer whose checkpoints and journal are not in"):
        training.make_trainer(s, publish_every_steps=2)
    for path in journals:
        path.with_suffix(".away").rename(path)
    with frozen_runs.trainer(s) as trainer:
        assert trainer.step_number == 5


def test_what_a_checkpoint_tells_of_rows_is_what_its_index_has(tmp_path, frozen):
    """Rows go on coming while it is written."""
    s = frozen(tmp_path / "run")
    with frozen_runs.trainer(s) as trainer:
        before = trainer.buffer.state()
        trainer.poll()
        trainer.buffer.integrate(step=0)
        assert before["visible"] == [] and trainer.buffer.state()["visible"]
