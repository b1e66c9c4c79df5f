"""What is read of the folders of roles: curves against a plain computation, whatever damage has left."""

import json
import shutil

import numpy as np
import pytest

from tba_jax.reporting import gathering
from tba_jax.reporting.gathering import MOST_POINTS, Source, read_curves
from tba_jax.storage import layout
from tba_jax.telemetry.alarms import Alarms
from tests.support import frozen_runs, hostile_runs


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    return hostile_runs.make(tmp_path_factory.mktemp("hostile") / "run")


@pytest.fixture
def copy(hostile, tmp_path):
    shutil.copytree(hostile.root, tmp_path / "run")
    return layout.RunDir(tmp_path / "run")


@pytest.mark.parametrize("count", [7, 5 * MOST_POINTS + 3])
def test_points_hold_mean_least_and_greatest_of_their_lines(tmp_path, count):
    values = np.random.default_rng(0).normal(size=count)
    lines = [
        {"step": step, "time": 1.0, "reward": value} | ({"late": 1.0} if step == count else {})
        for step, value in enumerate(values, 1)
    ]
    for name, part in (("metrics.jsonl.1", lines[: count // 3]), ("metrics.jsonl", lines[count // 3 :])):
        (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in part))
    curves, first, last, damaged = read_curves(tmp_path)
    assert first == lines[0] and last == lines[-1] and damaged == 0 and len(curves["step"]) <= MOST_POINTS
    ends = curves["step"][:, 2].astype(int)
    assert curves["step"][0, 1] == 1 and curves["step"][1:, 1].tolist() == (ends[:-1] + 1).tolist() and ends[-1] == count
    mine = [values[begin:end] for begin, end in zip([0, *ends[:-1]], ends, strict=True)]
    np.testing.assert_allclose(curves["reward"], [[each.mean(), each.min(), each.max()] for each in mine])
    assert np.isfinite(curves["late"][:, 0]).tolist() == [False] * (len(ends) - 1) + [True]


def test_damaged_lines_are_counted_and_one_that_is_being_written_is_none(tmp_path):
    good = json.dumps({"step": 1, "time": 1.0, "loss": 2.0})
    odd = ["{", "[]", '{"step": 1}', '{"step": "x", "time": 1}', f'{{"step": 1{"0" * 400}, "time": 1}}']
    (tmp_path / "metrics.jsonl").write_text("\n".join([good, *odd, good, '{"step": 3, "ti']))
    curves, _, last, damaged = read_curves(tmp_path)
    assert damaged == 5 and curves["loss"][:, 0].tolist() == [2.0, 2.0] and last["step"] == 1
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "time": 1.0, **{f"name{i}": 1.0 for i in range(5000)}}) + "\n")
    assert len(read_curves(tmp_path)[0]) <= gathering._MOST_NAMES
    assert read_curves(tmp_path / "none") == ({}, {}, {}, 0)


@pytest.mark.parametrize(
    ("file", "named"),
    [
        ("finished.json", "finished.json"),
        ("metrics/trainer/metrics.jsonl", "metrics/trainer are left out: 1"),
        ("replay/w0/000000/manifest.ocdbt", "w0"),
        ("config.json", "the tokenizer"),
    ],
)
def test_damage_is_named_and_the_rest_is_read(copy, file, named):
    path = copy.root / file
    path.parent.mkdir(exist_ok=True)
    before = path.read_bytes() if file.endswith(("metrics.jsonl", "config.json")) else b""
    path.write_bytes(before + b"[1, {}" + b"\n" * bool(before))
    if file == "config.json":
        path.write_bytes(before.replace(b'"path": ""', b'"path": "/gone"'))
    found = Source(copy.root).gather()
    assert any(named in told for told in found.problems), found.problems
    assert found.roles["trainer"].last["step"] == 20 and (named == "w0" or len(found.table.rows) == hostile_runs.ROWS)


def test_of_very_many_roles_all_alarms_are_told_and_searchers_are_left_out_first(copy):
    for name in (*(f"searcher-{i}" for i in range(40)), "evaluator", "trainer-process-1"):
        copy.metrics(name).mkdir()
        (copy.metrics(name) / "metrics.jsonl").write_text('{"step": 1, "time": 1001.0, "time_evaluate": 1.0}\n')
    Alarms(copy.metrics("searcher-9")).tell(kind="rewards_fail", sentence="searcher-9 is sad", advice="look", step=1)
    found = Source(copy.root).gather()
    assert {"trainer", "evaluator", "trainer-process-1"} <= set(found.roles) and len(found.roles) == gathering.MOST_ROLES
    assert found.left_out_roles == 20 and "searcher-9 is sad" in [alarm.sentence for _, alarm in found.alarms]
    assert found.roles["evaluator"].shares() == {"evaluate": 1.0}


def test_a_run_is_only_read_and_told_how_far(hostile):
    before, told = frozen_runs.contents(hostile.root), []
    assert Source(hostile.root).gather(told.append).problems == []
    assert frozen_runs.contents(hostile.root) == before and told == ["read 16 of at most 16 rows"]
