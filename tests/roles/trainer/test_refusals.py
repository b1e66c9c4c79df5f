"""Updates that are not finite, and rows that an objective cannot learn from, of which no setting told when the trainer began."""

import dataclasses

import jax
import numpy as np
import pytest

from tba_jax.replay import journal
from tba_jax.roles.trainer.update_program import BehaviorCheck, Refusals
from tba_jax.run import processes
from tba_jax.storage import published
from tests.support import frozen_runs, tiny_run
from tests.support.tiny_log import make_rows

pytestmark = pytest.mark.usefixtures("one_device_throughout")
IDS = [("a", row) for row in range(4)]


def look(refusals: Refusals, step: int, *, finite: bool, was_passed: bool = False, at_fault: tuple[int, ...] = (1,)) -> None:
    """An update of four rows, of which some are at fault unless it is finite."""
    measurements = {"finite": np.float32(finite), "loss": np.nan, "grad_norm": 1.0}
    row_finite = np.array([finite or row not in at_fault for row in range(4)])
    refusals.look_at(measurements, row_finite, IDS, step=step, was_passed=was_passed)


def test_ten_refusals_in_a_row_or_all_rows_at_fault_stop_a_run_that_skips(tmp_path):
    refusals = Refusals(skips=True, journal=tmp_path)
    for step, finite in enumerate([False] * 9 + [True] + [False] * 9):
        look(refusals, step, finite=finite)
    with pytest.raises(FloatingPointError, match=r"step 19 .* 1 of 4 rows .*a:1.* it is step 10 of such in a row, so the run"):
        look(refusals, 19, finite=False)
    for at_fault, told in (((0, 1, 2, 3), "4 of 4 rows are not, a:0, .*all rows are at fault"), ((), "its rows are, ")):
        with pytest.raises(FloatingPointError, match=f"{told}.*in spite of learner.non_finite=skip"):
            look(refusals, 20, finite=False, at_fault=at_fault)


def test_a_run_that_stops_goes_on_when_told_to_skip(tmp_path, frozen, caplog):
    """The square of an absurd reward is not finite. Its row is drawn in some steps, and not in others."""
    changes = {"replay__merge_duplicates": False, "replay__recent_probability": 0.0}
    s = frozen(tmp_path / "run", batches=1, **changes)
    frozen_runs.append_changed(s, "planted-1", reward=(2, 1e30))
    names_it = r"1 of 12 rows are not, planted-1:2; .*--config.learner.non_finite=skip --allow_change=learner.non_finite"
    for _ in range(2):  # the journal ends with that step
        with pytest.raises(FloatingPointError, match=names_it):
            frozen_runs.train(s, until=8, abandon=True)
    skipping = tiny_run.settings(tmp_path / "run", frozen_runs.config(**changes, learner__non_finite="skip"))
    with frozen_runs.trainer(skipping, polls=True) as trainer:
        # A journal that ends with a refused step would stop a run again that does not skip.
        while trainer.step_number < 8 or ("planted-1", 2) in journal.line_ids([*journal.read_lineage(s.run.journal)][-1]):
            assert trainer.step() is not None
        state = jax.device_get(trainer.state)
    told = {record.message for record in caplog.records if "the update is left out" in record.message}
    assert len(told) == int(state.skipped) and all("1 of 12 rows are not, planted-1:2;" in sentence for sentence in told)
    assert 0 < int(state.skipped) < int(state.step) and all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.params))
    # A replayed step passes the rows that it passed before, whatever the setting says now.
    frozen_runs.assert_resumes_as(s, state)


def test_an_update_that_is_not_finite_stops_the_run_and_the_next_batch_leaves_no_trace(tmp_path, frozen):
    s = frozen(tmp_path / "run", batches=2)
    with frozen_runs.trainer(s, polls=True) as trainer:
        for _ in range(2):
            assert trainer.step(ahead=True) is not None
        before = trainer.state
        spoilt = jax.tree.map(lambda x: np.nan * x if x.dtype == np.float32 else x, before.opt_state)
        trainer.program.state = dataclasses.replace(before, opt_state=spoilt)
        drawn = []
        with pytest.raises(FloatingPointError, match="step 3 is not finite"):
            trainer.step(ahead=True, beside=lambda: drawn.append(int(trainer.index.row_draws.sum())))
        assert drawn == [3 * trainer.program.rows] == [int(trainer.index.row_draws.sum())]
        assert [line["step"] for line in journal.read_lineage(s.run.journal)] == [1, 2, 3]
        trainer.flush_snapshot()
        assert [*published.kept(s.run.policies)] == [0, 2]


@pytest.mark.parametrize("name, value", [("top_p", 0.5), ("top_k", 3), ("min_p", 0.25), ("temperature", 2.0)])
def test_a_row_is_refused_where_its_behaviour_is_read_and_is_truncated_or_of_a_file(name, value):
    rows = make_rows(0, 4) | {"top_p": np.ones(4, np.float32), "top_k": np.zeros(4, np.int32), "min_p": np.zeros(4, np.float32)}
    rows[name] = rows[name].copy()
    rows[name][2] = value
    BehaviorCheck(tiny_run.config().learner)(rows, [*IDS[:3], ("given-0", 3)])
    check = BehaviorCheck(tiny_run.config(learner__objective="a_star_po").learner)
    if name == "temperature":
        check(rows, IDS)
        with pytest.raises(processes.BadInput, match=r"a_star_po reads π_behaviour .* row given-0:3, a response of"):
            check(rows, [*IDS[:3], ("given-0", 3)])
        return
    with pytest.raises(processes.BadInput, match=rf"a_star_po needs .* row a:2 was drawn with .*{name}={value}"):
        check(rows, IDS)
