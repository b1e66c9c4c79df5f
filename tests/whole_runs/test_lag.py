"""Trainer and searchers of one process, which take turns: the weights of every row are those that searchers.lag asks for."""

import numpy as np
import pytest

from tba_jax.experiment import jobs, training
from tba_jax.telemetry.status import TimeAccount
from tests.support import frozen_runs, tiny_run

pytestmark = pytest.mark.usefixtures("one_device_throughout")
LAG, EVERY = 4, 2
# The fewest snapshots that may be kept; a batch of a searcher has 16 rows, an update takes 12.
SETTINGS = dict(searchers__lag=LAG, searchers__max_updates_ahead=2, replay__recent_probability=1.0)
SETTINGS |= dict(publish__every_steps=EVERY, publish__keep=LAG // EVERY + 3)


def test_rows_of_fast_searchers_are_of_the_newest_weights_that_are_old_enough(tmp_path):
    """One begins with the run, another one joins after 7 steps, and the first is started again after 9."""
    s = tiny_run.settings(tmp_path / "run", frozen_runs.config(**SETTINGS))
    training.reference(s)()
    expected: dict[str, list[int]] = {}
    with frozen_runs.trainer(s) as trainer:
        trainer.flush_snapshot()
        searchers = {}
        while not trainer.is_done:
            for name in {0: ["first"], 7: ["second"], 9: ["first"]}.get(trainer.step_number, []):
                searchers[name] = jobs.make_searcher(s, name=name, account=TimeAccount())
            newest = trainer.step_number // EVERY * EVERY
            for made in searchers.values():
                made.refresh()
                made.idle()  # what came last is taken up, and the newest one is loaded
                made.refresh()
                while made.may_search:
                    made.search()
                    expected.setdefault(made.writer, []).append(max(0, newest - LAG))
            trainer.poll()
            before = trainer.step_number
            if (measurements := trainer.step()) is not None:  # the demand may not be written yet
                assert measurements["staleness"].min() >= min(before, LAG)
            trainer.flush_snapshot()
    found = frozen_runs.rows(s)
    assert found.keys() == expected.keys() and len(expected) == 3
    for writer, steps in expected.items():
        rows = found[writer]
        assert len(rows["row"]) == 16 * len(steps)
        for row, (taken, length) in enumerate(zip(rows["policy_step"], rows["response_length"], strict=True)):
            assert set(taken[:length].tolist()) <= {steps[row // 16]}, (writer, row)
    assert sum(map(len, expected.values())) * 16 <= 12 * (12 + 2) + 3 * 16 * 2, "rows of two updates and a batch each ahead"
    assert max(np.concatenate(list(expected.values()))) >= 8 - LAG
