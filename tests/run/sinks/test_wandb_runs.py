"""Weights & Biases without a network: what its own files hold, and what a role says that cannot log in."""

import json

import numpy as np
import pytest

from tests.support import tracked, wandb_files

pytest.importorskip("wandb", reason="wandb is not installed")


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A user who has never logged in."""
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_DIR", "NETRC", "WANDB_ENTITY", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


def files(run, role="trainer"):
    return [wandb_files.read(path) for path in sorted(run.metrics(role).glob("wandb/offline-run-*/*.wandb"))]


def test_points_of_all_roles_are_in_one_group(tmp_path, home, monkeypatch, capfd):
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = tracked.run(tmp_path / "sums")
    writer = tracked.writer(run, "wandb")
    writer.write(5, {"loss": 1.5, "note": "text"}, {"staleness": np.array([1, 1, 3])})
    writer.close()
    searcher = tracked.writer(run, "wandb", name="searcher-0", kind="searcher", metrics__project="theirs")
    searcher.write(17, {"reward": 0.5, "policy_step": 4})
    searcher.table("samples", 4, [{"query": "1+1=", "response": "<b>2</b>", "reward": 1.0}])
    searcher.close()
    (trained,), (searched,) = files(run), files(run, "searcher-0")
    told = trained["run"]
    assert (told.project, told.run_group, told.job_type) == ("tba_jax", "sums-01234567", "trainer")
    assert (told.display_name, told.run_id) == ("sums-01234567-trainer", "0123456789abcdef-trainer")
    assert (searched["run"].project, searched["run"].run_group) == ("theirs", "sums-01234567")
    (point,) = trained["history"]
    assert (point["step"], point["train/loss"]) == (5, 1.5) and "train/note" not in point
    assert point["train/staleness.values"] == [2, 0, 1]
    point, table = searched["history"]  # the axis of a searcher is that of its weights: its batches begin anew with each start
    assert (point["step"], point["search/batch"], point["search/reward"]) == (4, 17, 0.5)
    assert table["step"] == 4 and table["search/samples.nrows"] == 1
    (path,) = run.metrics("searcher-0").glob("wandb/offline-run-*/files/media/table/search/*.json")
    assert json.loads(path.read_text()) == {"columns": ["query", "response", "reward"], "data": [["1+1=", "<b>2</b>", 1.0]]}
    assert trained["axes"] == {"*": "step"} and capfd.readouterr() == ("", "")
    config = {item.key: json.loads(item.value_json) for item in told.config.update}
    assert config["learner"]["steps"] == 12


def test_a_role_that_starts_again_goes_on_with_its_run(tmp_path, home, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = tracked.run(tmp_path / "sums")
    for steps in ((1, 2, 3), (2, 3, 4)):  # a trainer that resumes does steps again
        writer = tracked.writer(run, "wandb")
        for step in steps:
            writer.write(step, {"loss": step})
        writer.close()
    first, second = files(run)
    assert first["run"].run_id == second["run"].run_id
    assert [[point["step"] for point in part["history"]] for part in (first, second)] == [[1, 2, 3], [2, 3, 4]]


def test_without_a_login_points_are_kept_and_one_sentence_says_so(tmp_path, home, caplog):
    run = tracked.run(tmp_path / "sums")
    for role in ("trainer", "evaluator"):
        writer = tracked.writer(run, "wandb", name=role, kind=role)
        writer.write(1, {"loss": 1.0})
        writer.close()
        assert files(run, role)[0]["history"][0]["step"] == 1
    (sentence,) = [record.getMessage() for record in caplog.records]
    assert sentence.startswith("wandb is not reached: No API key configured") and "wandb sync" in sentence
    assert (run.metrics("trainer") / "alarms.jsonl").exists() and not (run.metrics("evaluator") / "alarms.jsonl").exists()
