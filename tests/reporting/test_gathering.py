"""What is read of the folders of roles, whatever damage has left."""

import json
import shutil

import numpy as np
import pytest

from tba_jax.reporting.gathering import MOST_POINTS, Role, Source, read_lines
from tba_jax.storage import layout
from tba_jax.telemetry.status import Told
from tests.support import frozen_runs, hostile_runs


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    return hostile_runs.make(tmp_path_factory.mktemp("hostile") / "run")


@pytest.fixture
def copy(hostile, tmp_path):
    shutil.copytree(hostile.root, tmp_path / "run")
    return layout.RunDir(tmp_path / "run")


@pytest.mark.parametrize("count", [7, MOST_POINTS, 5 * MOST_POINTS + 3])
def test_some_lines_are_kept_evenly_with_the_first_and_the_newest(tmp_path, count):
    lines = [json.dumps({"step": step, "time": 1.0}) + "\n" for step in range(count)]
    for name, some in (("metrics.jsonl.1", lines[: count // 3]), ("metrics.jsonl", lines[count // 3 :])):
        (tmp_path / name).write_text("".join(some))
    steps = [line["step"] for line in read_lines(tmp_path)]
    assert steps[0] == 0 and steps[-1] == count - 1 and len(steps) <= MOST_POINTS
    gaps = np.diff(steps)
    assert len(steps) == count or (len(steps) > MOST_POINTS / 2 and len({*gaps[:-1].tolist()}) == 1 and gaps[-1] <= gaps[0])


def test_damaged_lines_are_left_out(tmp_path):
    good = json.dumps({"step": 1, "time": 1.0, "loss": 2.0, "note": "text"})
    odd = ["{", "[]", '{"step": 1}', '{"step": "x", "time": 1}', f'{{"step": 1{"0" * 400}, "time": 1}}']
    (tmp_path / "metrics.jsonl").write_text("\n".join([good, *odd, good, '{"step": 3, "ti']))
    role = Role(lines=read_lines(tmp_path), status=Told())
    assert role.curve("loss").tolist() == [2.0, 2.0] and np.isnan(role.curve("note")).all() and role.last["step"] == 1
    assert read_lines(tmp_path / "none") == []


@pytest.mark.parametrize(
    ("file", "named"),
    [("finished.json", "finished.json"), ("replay/w0/000000/manifest.ocdbt", "w0"), ("config.json", "the tokenizer")],
)
def test_damage_is_named_and_the_rest_is_read(copy, file, named):
    path = copy.root / file
    path.write_bytes(path.read_bytes().replace(b'"path": ""', b'"path": "/gone"') if file == "config.json" else b"[1, {}")
    found = Source(copy.root).gather()
    assert any(named in told for told in found.problems), found.problems
    assert found.roles["trainer"].last["step"] == 20 and (named == "w0" or len(found.table.rows) == hostile_runs.ROWS)


def test_a_run_is_only_read(hostile):
    before = frozen_runs.contents(hostile.root)
    assert Source(hostile.root).gather().problems == [] and frozen_runs.contents(hostile.root) == before
