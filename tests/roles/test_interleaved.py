"""The one-process schedule, and through it trainer, searcher, evaluator and resume, without processes."""

from typing import Any

import numpy as np
import pytest

from tba_jax.roles import results as best_step
from tba_jax.storage import layout as layout_lib
from tba_jax.storage import published
from tba_jax.telemetry import metrics
from tests.support import frozen_runs, tiny_run

pytestmark = pytest.mark.usefixtures("one_device_throughout")
LAG, STEPS = 3, 8


@pytest.fixture(scope="module")
def lagging(tmp_path_factory, one_device_throughout) -> Any:
    """A run whose fresh rows come from the policy of three steps ago, with evaluations, exploration and chosen queries."""
    folder = tmp_path_factory.mktemp("lagging") / "run"
    changes = {"schedule__lag": LAG, "learner__steps": STEPS, "replay__merge_duplicates": False, "evaluation__every_steps": 4}
    changes |= {"searchers__prompt_selection": "posterior", "searchers__prompt_candidates": 3}
    changes |= {"sampling__temperature": 1.3, "sampling__explore_top_p_probability": 0.5}
    assert frozen_runs.run(folder, **changes) == 0
    return tiny_run.settings(folder, tiny_run.config(**changes))


def test_rows_come_from_exactly_lag_steps_ago(lagging):
    lines = metrics.read_lines(lagging.run.metrics("trainer"))
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert [line["staleness_max"] for line in lines] == [min(step, LAG) for step in range(STEPS)]
    (rows,) = frozen_runs.rows(lagging).values()
    groups = rows["reward"].reshape(STEPS, 4, 4)[-1].tolist()
    searched = metrics.read_lines(lagging.run.metrics("searcher-0"))[-1]
    assert searched["equal_reward_groups"] == np.mean([len(set(group)) == 1 for group in groups])
    assert (rows["top_p"] < 1).any() and (rows["top_p"] == 1).any()


def test_a_batch_comes_early_where_an_update_finds_too_few_rows(tmp_path):
    """Each row is drawn once at most, and four batches hold enough for five updates."""
    changes = {"schedule__updates_per_search": 3, "replay__max_draws_per_row": 1, "evaluation__enabled": False}
    run = layout_lib.RunDir(tmp_path)
    assert frozen_runs.run(tmp_path, learner__steps=5, replay__merge_duplicates=False, **changes) == 0
    rows = [line["rows_seen"] for line in metrics.read_lines(run.metrics("trainer"))]
    assert rows[0] > 0 and rows == [rows[0] * batches for batches in (1, 2, 3, 4, 4)]


def test_a_run_leaves_what_the_readme_promises(lagging):
    layout = lagging.run
    assert layout_lib.steps_in(layout.evaluations) == [0, 4, 8]
    report = layout_lib.read_json(layout.evaluations / "00000008.json")
    assert report["queries"] == 8 and {"query", "answer", "response", "reward"} <= set(report["samples"]["greedy"][0])
    evaluated, scores = metrics.read_lines(layout.metrics("evaluator")), best_step.Scores(layout.evaluations)
    assert (evaluated[-1]["best_step"], evaluated[-1]["best_greedy_reward"]) == scores.best()
    assert report["score_name"] == "accuracy" and report["accuracy"] == report["greedy_reward"] == scores()[8]
    assert [*published.kept(layout.policies)] == list(range(STEPS + 1))
    assert (layout.root / "progress.png").read_bytes()[:4] == b"\x89PNG"
    line = metrics.read_lines(layout.metrics("trainer"))[-1]
    names = "loss reward kl_to_ref entropy log_z grad_norm draws_per_row buffer_rows ratio_mean ratio_max"
    names += " log_z_std staleness_mean staleness_histogram steps_per_second time_update"
    assert {*names.split(), "effective_sample_share", "kl_to_ref_k3", "advantage_std", "log_weight_std"} <= set(line)
    assert line["logprob_gap_max"] < 1e-4 and line["logprob_gap_alarm"] == 0 and "kl_to_initial" not in line
    assert list(layout.metrics("trainer").glob("events.out.tfevents*"))
