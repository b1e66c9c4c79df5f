"""Runs of tba_jax in the comparison of systems: their settings pass the checks, and metrics become seconds of steps."""

import dataclasses
import json
from pathlib import Path

import pytest

from benchmarks.peers import cases, recipe, tba_run
from tba_jax.run import layout

FIXED = cases.CASES["fixed"]


@pytest.mark.parametrize("interleaved", [True, False])
def test_the_settings_are_of_the_schema(tmp_path, interleaved):
    c = recipe.get_config()
    found = tba_run.settings(FIXED, tmp_path, interleaved=interleaved, reference=True, steps=9, seed=0)
    c.update_from_flattened_dict({leaf: str(value) if isinstance(value, Path) else value for leaf, value in found.items()})
    assert c.schedule.mode == ("interleaved" if interleaved else "asynchronous")
    assert (
        c.searchers.queries_per_batch * c.searchers.samples_per_query == c.learner.queries * c.learner.completions == FIXED.rows
    )


def write(run: layout.RunDir, role: str, *lines: dict[str, float]) -> None:
    folder = run.metrics(role)
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps({"step": 0, **line}) + "\n" for line in lines))


def test_shares_of_time_become_seconds_of_each_step(tmp_path):
    run = layout.RunDir(tmp_path)
    # The second step takes 4 s, half of them decoding; the third takes 6 s, one of them decoding.
    lines = [
        {"time": 100.0},
        {"time": 104.0, "time_decode": 2 / 4, "time_reference": 1 / 4, "time_other": 1 / 4},
        {"time": 110.0, "time_decode": 3 / 10, "time_reference": 2 / 10, "time_wait_rewards": 3 / 10, "time_other": 2 / 10},
    ]
    write(run, "trainer", *lines)
    write(run, "searcher-0", *[{"time": line["time"], "rows_per_second": 8.0, "tokens_per_second": 128.0} for line in lines])
    found = tba_run.record(tmp_path, dataclasses.replace(FIXED, queries=1, samples=4), interleaved=True, skip=1)
    assert found["seconds"] == [0.0, 4.0, 6.0]
    assert found["parts"]["generate"] == pytest.approx([0.0, 2.0, 1.0])
    assert found["parts"]["score"] == pytest.approx([0.0, 1.0, 4.0])  # the reference's log-probs and the rewards
    assert found["parts"]["reference"] == pytest.approx([0.0, 1.0, 1.0])
    assert found["tokens"] == [64, 64, 64]
    assert found["rows_per_second"] == pytest.approx(2 * 4 / 10)


def test_the_checkpoint_at_the_end_of_a_run_is_no_part_of_its_last_step(tmp_path):
    run = layout.RunDir(tmp_path)
    write(run, "trainer", {"time": 100.0}, {"time": 104.0}, {"time": 110.0, "time_checkpoint": 2 / 10})
    write(run, "searcher-0")
    found = tba_run.record(tmp_path, FIXED, interleaved=True, skip=1)
    assert found["seconds"] == pytest.approx([0.0, 4.0, 4.0])


def test_an_asynchronous_run_counts_the_rows_that_are_appended_beside_the_timed_steps(tmp_path):
    run = layout.RunDir(tmp_path)
    write(run, "trainer", *[{"time": time} for time in (100.0, 110.0, 120.0)])
    # Seconds of decoding until each line: 0, 0, 6, 6 and 20.
    shares = {90.0: 0.0, 109.0: 0.0, 112.0: 6 / 22, 116.0: 6 / 26, 130.0: 20 / 40}
    batch = {"rows_per_second": 1.0, "tokens_per_second": 64.0}
    write(run, "searcher-0", *[{"time": time, "time_decode": share, **batch} for time, share in shares.items()])
    found = tba_run.record(tmp_path, FIXED, interleaved=False, skip=2)
    assert found["rows_per_second"] == pytest.approx(2 * 32 / 10)
    assert found["parts"]["generate"] == pytest.approx([20 / 3] * 5)  # it decodes two batches at once, as it were
