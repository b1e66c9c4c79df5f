"""Which snapshots wait for the evaluator, and what asking costs."""

import numpy as np
import pytest

from tba_jax import evaluator, policy_store, run_dir, storage
from tba_jax.policy_store import COMMIT, SnapshotInfo


@pytest.fixture(params=["folder", "memory"])
def run(request, tmp_path):
    shared = storage.place("memory://store/shared") if request.param == "memory" else tmp_path / "shared"
    return run_dir.RunDir(tmp_path / "own", shared)


def publish(run, *steps):
    for step in steps:
        folder = run.policies / run_dir.step_name(step)
        policy_store.save(folder, {"a": np.zeros(3, np.float32)}, SnapshotInfo(step=step, epoch=1), dtype="float32")


def test_only_what_is_newer_is_looked_at(run, monkeypatch):
    pending = evaluator.PendingSteps(run, every_steps=10, final_step=45)
    assert pending() == []
    publish(run, 0, 5, 10, 15, 20, 45)
    assert pending() == [0, 10, 20, 45]
    names_in, asked = storage.names_in, []
    monkeypatch.setattr(storage, "names_in", lambda *a, **k: (asked.extend(names := names_in(*a, **k)), names)[1])
    monkeypatch.setattr(storage, "exists", None)
    run_dir.write_json(run.evaluations / "00000010.json", {})
    assert pending() == [0, 20, 45]
    assert asked == ["00000010.json"], "what is known is not listed again"


def test_a_snapshot_that_is_committed_later_is_not_missed(run):
    """A killed trainer may leave one without a commit, which the next one writes again, behind others or not."""
    pending = evaluator.PendingSteps(run, every_steps=10, final_step=99)
    storage.write_bytes(run.policies / "00000010" / "a" / "zarr.json", b"{")
    publish(run, 0, 20)
    assert pending() == [0, 20] == pending()
    run_dir.write_json(run.policies / "00000010" / COMMIT, {})
    publish(run, 30)
    assert pending() == [0, 10, 20, 30]
