"""Updates that are not finite, and rows that an objective cannot learn from, of which no setting told when the trainer began."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from tba_jax.replay import journal
from tba_jax.roles.trainer.refusals import Refusals
from tba_jax.run import processes
from tba_jax.storage import layout as layout_lib
from tests.support import frozen_runs, tiny_run

pytestmark = pytest.mark.usefixtures("one_device_throughout")


IDS = [("a", row) for row in range(4)]


def look(refusals: Refusals, step: int, *, finite: bool, was_passed: bool = False) -> None:
    """An update of four rows, of which one is at fault unless it is finite."""
    measurements = {"finite": np.float32(finite), "loss": np.nan, "grad_norm": 1.0}
    refusals.look_at(measurements, np.array([True, finite, True, True]), IDS, step=step, was_passed=was_passed)


def test_ten_refusals_in_a_row_stop_a_run_that_skips(tmp_path):
    refusals = Refusals(skips=True, journal=tmp_path)
    for step, finite in enumerate([False] * 9 + [True] + [False] * 9):
        look(refusals, step, finite=finite)
    with pytest.raises(FloatingPointError, match=r"step 19 .* 1 of 4 rows .*a:1"):
        look(refusals, 19, finite=False)


def test_what_was_passed_is_passed_again(tmp_path, caplog):
    refusals = Refusals(skips=False, journal=tmp_path)
    look(refusals, 1, finite=False, was_passed=True)
    assert "step 1" in caplog.text and "a:1" in caplog.text
    with pytest.raises(FloatingPointError, match=r"learner\.non_finite=skip"):
        look(refusals, 2, finite=False)


# Old rows are drawn as often as new ones: the planted rows in some steps, and not in others.
ALL_ROWS = {"replay__merge_duplicates": False, "replay__recent_probability": 0.0}


def log_with_an_absurd_reward(frozen, workdir, **changes):
    """A frozen log, and four rows of one query by another writer: the square of the third one's reward is not finite."""
    s = frozen(workdir, batches=1, **ALL_ROWS, **changes)
    frozen_runs.append_changed(s, "planted-1", reward=(2, 1e30))
    return s


def test_a_run_that_stops_goes_on_when_told_to_skip(tmp_path, frozen):
    s = log_with_an_absurd_reward(frozen, tmp_path / "run")
    names_it = r"1 of 12 rows are not, planted-1:2; .*--config.learner.non_finite=skip --allow_change=learner.non_finite"
    with pytest.raises(FloatingPointError, match=names_it):
        frozen_runs.train(s, until=8, abandon=True)
    with pytest.raises(FloatingPointError, match=names_it):  # the journal ends with that step
        frozen_runs.train(s, until=8, abandon=True)
    skipping = tiny_run.settings(tmp_path / "run", frozen_runs.config(**ALL_ROWS, learner__non_finite="skip"))
    with frozen_runs.trainer(skipping) as trainer:
        trainer.poll()
        # A journal that ends with a refused step would stop a run again that does not skip.
        while trainer.step_number < 8 or ("planted-1", 2) in journal.line_ids([*journal.read_lineage(s.run.journal)][-1]):
            assert trainer.step() is not None
        state = jax.device_get(trainer.state)
    assert 0 < int(state.skipped) < int(state.step)
    # A replayed step passes the rows that it passed before, whatever the setting says now.
    frozen_runs.assert_resumes_as(s, state)


def test_a_run_that_skips_counts_and_resumes_exactly(tmp_path, caplog, frozen):
    s = log_with_an_absurd_reward(frozen, tmp_path / "run", learner__non_finite="skip")
    state = frozen_runs.train(s, until=8, abandon=False)
    told = [record.message for record in caplog.records if "the update is left out" in record.message]
    assert 0 < len(told) < 8 and all("1 of 12 rows are not, planted-1:2;" in sentence for sentence in told)
    assert (int(state.step), int(state.skipped)) == (8, len(told))
    assert len(journal.read_lineage(s.run.journal)) == 8 and layout_lib.read_json(s.run.finished)["balanced"]
    initial = frozen_runs.published(s, 0)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.params))
    assert any(np.any(a != b) for a, b in zip(jax.tree.leaves(initial), jax.tree.leaves(state.params["policy"]), strict=True))
    frozen_runs.assert_resumes_as(s, state)


@pytest.mark.parametrize(
    "part, steps, told",
    [
        ("params", 0, r"12 of 12 rows are not, frozen-\w{8}:\d+, .* …; its batch .* all rows are at fault"),
        ("opt_state", 9, "its rows are, .* it is step 10 of such in a row"),
    ],
)
def test_broken_weights_stop_a_run_that_skips(tmp_path, frozen, part, steps, told):
    s = frozen(tmp_path / "run", batches=2, learner__non_finite="skip")
    with frozen_runs.trainer(s, publish_every_steps=100) as trainer:
        trainer.poll()
        spoilt = jax.tree.map(lambda x: np.nan * x if x.dtype == np.float32 else x, getattr(trainer.state, part))
        trainer.program.state = dataclasses.replace(trainer.state, **{part: spoilt})
        for _ in range(steps):
            assert trainer.step() is not None
        with pytest.raises(FloatingPointError, match=f"{told}, so the run stops in spite of learner.non_finite=skip"):
            trainer.step()


def steps(s, count, **changes):
    """Trains with another objective, from where the run stands. Returns the step at which it ends."""
    changed = tiny_run.settings(s.run.root, frozen_runs.config(**changes))
    with frozen_runs.trainer(changed) as trainer:
        trainer.poll()
        for _ in range(count):
            assert trainer.step(ahead=True) is not None
        return trainer.step_number


@pytest.mark.parametrize("name, value", [("top_p", 0.5), ("top_k", 3), ("min_p", 0.25), ("temperature", 2.0)])
def test_a_truncated_row_is_refused_where_it_is_drawn(frozen, tmp_path, name, value):
    as_drawn: dict[str, Any] = {"replay__merge_duplicates": False, "replay__recent_fill": "wait"}
    s = frozen(tmp_path / "run", **as_drawn)
    frozen_runs.append_changed(s, "later-1", **{name: (slice(None), value)})
    if name == "temperature":
        assert steps(s, 12, learner__objective="a_star_po", **as_drawn) == 12
        return
    with pytest.raises(processes.BadInput, match=rf"a_star_po needs .* row later-1:[0-3] was drawn with .*{name}={value}"):
        steps(s, 12, learner__objective="a_star_po", **as_drawn)
    assert steps(s, 12, learner__objective="trajectory_balance", **as_drawn) >= 12, "nothing is lost"


@pytest.mark.parametrize(
    "changes, reader",
    [
        ({"learner__objective": "grpo"}, r"learner\.objective=grpo"),
        ({}, ""),
    ],
)
def test_a_row_of_a_file_is_refused_where_its_behaviour_is_read(frozen, tmp_path, changes, reader):
    """It may come after the trainer has begun, by a mounted run."""
    s = frozen(tmp_path / "run")
    frozen_runs.append_changed(s, "given-0123456789abcdef")
    if not reader:
        assert steps(s, 12) == 12
        return
    with pytest.raises(
        processes.BadInput, match=rf"{reader} reads π_behaviour .* row given-0123456789abcdef:[0-3], a response of"
    ):
        steps(s, 12, **changes)
